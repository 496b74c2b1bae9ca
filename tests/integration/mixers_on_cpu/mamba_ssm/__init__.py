"""Stands in for mamba_ssm on the CPU: its fused convolution and scan, one position after another."""

__version__ = "2.0.0"
