"""Tokenize documents into a Megatron dataset and build its sequence index; see --help."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron_bfp.commands.preprocess import console  # noqa: E402

if __name__ == "__main__":
    sys.exit(console())
