"""Micro-batches in the form in which Megatron-Bridge takes document boundaries: rows joined, boundaries beside them.

Two samples of 4 tokens, for example, the second one of two documents::

    tokens        [[a, b, c, d, e, f, g, h]]
    cu_seqlens_q  [0, 4, 6, 8]
    max_seqlen_q  4

Joining costs a copy of the samples, in a worker of the loader.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention.boundaries import Boundaries
from ...megatron_core.sample_tensors import SampleTensors

OF_POSITIONS = ("tokens", "labels", "loss_mask", "position_ids")
"""What a sample has at each of its positions."""

JOINED = "rows_joined_by_megatron_bfp"
"""The key by which our micro-batches are known; its value is the number of rows."""


def join_samples(samples: Sequence[dict[str, Tensor]]) -> SampleTensors:
    """A micro-batch of packed samples as one row.

    Args:
        samples: b of them, as ``BFPGPTDataset`` gives them, of L positions each.

    Returns:
        ``tokens``, ``labels``, ``position_ids``, int64 [1, b * L]; ``loss_mask``, float32 [1, b * L];
        ``cu_seqlens_q`` and ``cu_seqlens_kv``, int32 [chunks + 1], rising from 0 to b * L; ``max_seqlen_q`` and
        ``max_seqlen_kv``, int32 [], the positions of the longest chunk; ``JOINED``, int64 [], b.
    """
    boundaries = Boundaries.of_rows(torch.stack([sample["cu_seqlens"] for sample in samples]))
    batch = SampleTensors({name: torch.cat([sample[name] for sample in samples])[None] for name in OF_POSITIONS})
    longest = torch.tensor(boundaries.max_seqlen, dtype=torch.int32)
    for of in ("q", "kv"):
        batch[f"cu_seqlens_{of}"] = boundaries.cu_seqlens
        batch[f"max_seqlen_{of}"] = longest
    batch[JOINED] = torch.tensor(len(samples))
    return batch


class JoinedSamples:
    """A dataset whose micro-batches have joined rows. Megatron-Bridge's loader takes the collate function from it.

    All attributes of ``dataset`` can be read here, too.

    Args:
        dataset: packed samples, in a blend or in balanced order or not.
    """

    collate_fn = staticmethod(join_samples)

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # not there yet while an instance is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        return self.dataset[idx]
