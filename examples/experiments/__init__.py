"""Experiments with trained models: the paper's ablation, and two smaller ones that show why it comes out as it does."""
