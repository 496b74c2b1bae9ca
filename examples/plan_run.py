"""Print the plan of a run on a cluster: ``cluster/plan.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.plan import console

if __name__ == "__main__":
    sys.exit(console())
