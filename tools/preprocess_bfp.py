"""``megatron-bfp-preprocess`` from a checkout that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_bfp.commands.preprocess import console

if __name__ == "__main__":
    sys.exit(console())
