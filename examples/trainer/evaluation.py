"""The loss of micro-batches, and a model's perplexity over the target tokens of a whole split."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from megatron_bfp.megatron_core.attention import DocumentBoundaries, document_boundaries

from .ranks import replicas


class Evaluation(NamedTuple):
    """A model on a split."""

    loss: float
    """Mean over all target tokens, nats; NaN if there are none."""
    num_targets: int

    @property
    def perplexity(self) -> float:
        """e to the loss; NaN if the loss is."""
        return math.inf if self.loss >= 700 else math.exp(self.loss)


def token_losses(model: Any, batch: dict[str, Tensor], boundaries: DocumentBoundaries) -> Tensor:
    """The loss at each position of a micro-batch, float32 [b, L]; 0 at positions without a target."""
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=boundaries)
    return losses.float() * batch["loss_mask"]


def summed_loss(model: Any, batch: dict[str, Tensor], boundaries: DocumentBoundaries) -> Tensor:
    """The sum of the losses of a micro-batch's targets, float32 []."""
    return token_losses(model, batch, boundaries).sum()


def evaluate(model: Any, batches: Iterable[dict[str, Tensor]]) -> Evaluation:
    """Mean loss over the micro-batches of all replicas. The model is in training mode afterwards.

    Args:
        model: a model or engine; all ranks must have equally many micro-batches.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for batch in batches:
            device = batch["tokens"].device
            loss = summed_loss(model, batch, document_boundaries(batch["cu_seqlens"], device))
            sums = sums.to(device) + torch.stack([loss.double(), batch["loss_mask"].sum(dtype=torch.float64)])
    model.train()
    distributed.all_reduce(sums, group=replicas())
    loss, num_targets = sums.tolist()
    return Evaluation(loss / num_targets if num_targets else math.nan, int(num_targets))
