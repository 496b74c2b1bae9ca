"""Probe whether fill-in-the-middle teaches models to fill gaps: ``experiments/middle_probe.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.middle_probe import console

if __name__ == "__main__":
    sys.exit(console())
