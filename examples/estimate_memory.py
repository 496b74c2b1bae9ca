"""Estimate the memory of a GPU that trains a recipe: ``cluster/memory.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.memory import console

if __name__ == "__main__":
    sys.exit(console())
