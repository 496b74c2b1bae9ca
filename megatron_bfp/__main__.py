"""``python -m megatron_bfp``, which is ``megatron-bfp``: see ``commands.main``."""

import sys

from .commands.main import console

if __name__ == "__main__":
    sys.exit(console())
