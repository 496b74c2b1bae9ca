"""megatron-core's dataset and model classes, with best-fit packing in them. They need torch and megatron-core."""
