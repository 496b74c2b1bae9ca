"""Stands in for flash-linear-attention on the CPU: what gated delta nets are made of, document by document."""
