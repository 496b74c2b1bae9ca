"""The example trainer, which at its end writes what its model says of its first samples. Run it as
``examples/pretrain_gpt.py``.

The environment variable LOGITS is a file, which gets the tokens, the boundaries and the logits of ten sequences.
"""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[3] / "examples")]

import numpy as np
import torch
from megatron.core import parallel_state
from torch import distributed
from trainer import training

from megatron_bfp.megatron_core.attention import document_boundaries

SEQUENCES = 10


def logits_of(engine, sample):
    """The logits of a sample's tokens, float32 [L, padded vocabulary]."""
    row = {name: torch.as_tensor(sample[name])[None] for name in ("tokens", "position_ids", "cu_seqlens")}
    boundaries = document_boundaries(row["cu_seqlens"], torch.device("cpu"))
    mine = engine(row["tokens"], row["position_ids"], None, packed_seq_params=boundaries).float().contiguous()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    distributed.all_gather(parts, mine, group=group)
    return torch.cat(parts, dim=-1)[0].numpy()


def with_logits(train):
    def train_and_write(config, engine, batches, iteration, accumulation, history, *others):
        status = train(config, engine, batches, iteration, accumulation, history, *others)
        engine.eval()
        samples = [history.dataset[number] for number in range(SEQUENCES)]
        with torch.no_grad():
            logits = np.stack([logits_of(engine, sample) for sample in samples])
        if distributed.get_rank() == 0:
            rows = {
                name: np.stack([np.asarray(sample[name]) for sample in samples]) for name in ("tokens", "cu_seqlens")
            }
            np.savez(os.environ["LOGITS"], logits=logits, **rows)
        return status

    return train_and_write


training.train = with_logits(training.train)
training.start()
