"""Stands in for flash-attn on the CPU: its two varlen functions, document by document."""

__version__ = "0 on the CPU"
