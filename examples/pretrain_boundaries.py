"""Whether document boundaries reach attention, established in the first training step."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from pretrain_ranks import log

from megatron_bfp.attention.boundary_check import BoundaryCheck, WatchedIterator, before_first_update


def check_first_step(engine: Any, batches: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """The same micro-batches; before the engine's first update all ranks agree that attention got their boundaries.

    Raises:
        IntegrationError: a module of the model is not known to keep to boundaries. If they do not arrive, the first
            update raises it, on all ranks.
    """
    check = BoundaryCheck([engine.module], replica=parallel_state.get_data_parallel_rank())
    check.refuse_unknown()
    before_first_update(
        engine.optimizer, lambda: log(f"attention inside documents, as the first step showed: {check.conclude()}")
    )
    return WatchedIterator(batches, check)
