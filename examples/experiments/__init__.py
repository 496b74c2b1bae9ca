"""Experiments with trained models: the ablation of the paper, and two smaller ones."""
