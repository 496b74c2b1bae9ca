"""Probe whether models follow their context if training cut it: ``experiments/context_probe.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.context_probe import console

if __name__ == "__main__":
    sys.exit(console())
