"""Show what truncation costs on a simple process: ``experiments/truncation_process.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.truncation_process import console

if __name__ == "__main__":
    sys.exit(console())
