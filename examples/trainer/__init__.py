"""The example trainer: GPT on megatron-core and DeepSpeed, from its options to its last checkpoint."""
