"""The paper's ablation; its help and how it works are in ``experiments/ablation.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.ablation import console

if __name__ == "__main__":
    sys.exit(console())
