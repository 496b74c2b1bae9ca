"""Copies of real checkouts of Megatron that run on the CPU."""
