"""``--data-impl bfp`` in Megatron-DeepSpeed: its options, its dataset, its model, and what its first step showed."""
