"""Checkpoints: what a complete one is, saving, resuming, and converting one for another number of ranks.

Two modules import no torch: ``save_folder``, for preflight, and ``universal``, which must be quick to start.
"""
