"""Probe whether models remember facts of documents that training cut: ``experiments/fact_probe.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.fact_probe import console

if __name__ == "__main__":
    sys.exit(console())
