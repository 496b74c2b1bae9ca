"""Run the paper's ablation at a small size: ``experiments/ablation/command.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.ablation.command import console

if __name__ == "__main__":
    sys.exit(console())
