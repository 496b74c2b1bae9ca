"""Report what best-fit packing saves and costs on a dataset; see --help."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron_bfp.commands.report import console  # noqa: E402

if __name__ == "__main__":
    sys.exit(console())
