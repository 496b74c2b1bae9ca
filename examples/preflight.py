"""Check the nodes of a cluster before training: ``cluster/preflight.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.preflight import console

if __name__ == "__main__":
    sys.exit(console())
