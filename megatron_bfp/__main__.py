"""``python -m megatron_bfp``, the door to ``commands.main``."""

import sys

from .commands.main import console

if __name__ == "__main__":
    sys.exit(console())
