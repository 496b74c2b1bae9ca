"""The example trainer, with a record of each step. Run it as ``examples/pretrain_gpt.py``.

The environment variable WATCHED is a folder. Rank r writes ``r.jsonl`` into it: of each step a line with the boundaries
and the positions of its micro-batches, and the work of the whole step as the trainer counts it.
"""

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[3] / "examples")]

from trainer import training


def watch(train_step, path):
    def watched(engine, batches):
        result = train_step(engine, batches)
        seen = {name: [batch[name].tolist() for batch in batches] for name in ("cu_seqlens", "position_ids", "tokens")}
        with open(path, "a", encoding="ascii") as file:
            print(json.dumps(seen | {"work": result.work, "num_targets": result.num_targets}), file=file)
        return result

    return watched


path = Path(os.environ["WATCHED"], f"{os.environ['RANK']}.jsonl")
training.train_step = watch(training.train_step, path)
training.start()
