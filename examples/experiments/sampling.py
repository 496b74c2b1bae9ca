"""Sample texts from a model. The layers cache keys and values, so each new token costs one position."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_bfp.megatron_core.attention import DocumentAttention
from megatron_bfp.progress import Progress, without_progress

from .trained_model import TrainedModel

ROWS = 64
"""Prompts that are continued at once."""


class CachingAttention:
    """Replaces an attention layer's kernel during sampling. The first call has the prompts, on which the kernel runs.
    Each later call has one new token per row, which attends to all tokens before it."""

    def __init__(self, attend: Any, rows: int) -> None:
        self._attend, self._rows = attend, rows
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, boundaries: Any, softmax_scale: float, dropout: float
    ) -> Tensor:
        """As a kernel of ``megatron_bfp.attention.kernels``."""
        keys, values = (tensor.unflatten(0, (self._rows, -1)).transpose(1, 2) for tensor in (key, value))
        if self._keys is None:
            self._keys, self._values = keys, values  # [rows, groups, s, head size]
            return self._attend(query, key, value, boundaries, softmax_scale, dropout)
        self._keys, self._values = torch.cat([self._keys, keys], 2), torch.cat([self._values, values], 2)
        queries = query.unflatten(0, (self._rows, -1)).transpose(1, 2)
        result = scaled_dot_product_attention(
            queries, self._keys, self._values, scale=softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return result.transpose(1, 2).flatten(0, 1)


@contextmanager
def _caching(model: Any, rows: int) -> Iterator[dict[str, int]]:
    """Let a model's layers cache keys and values.

    Yields:
        A dictionary whose "position" must be set to that of the next call's first token. It starts at 0.
    """
    layers = [module for module in model.modules() if isinstance(module, DocumentAttention)]
    kernels = [layer.attend for layer in layers]
    start = {"position": 0}

    def from_position(rotary: Any, arguments: tuple, angles: Tensor) -> Tensor:
        """The model asks for angles that start at position 0."""
        return rotary.get_emb(len(angles), start["position"])

    hook = model.rotary_pos_emb.register_forward_hook(from_position)
    for layer in layers:
        layer.attend = CachingAttention(layer.attend, rows)
    try:
        yield start
    finally:
        hook.remove()
        for layer, kernel in zip(layers, kernels):
            layer.attend = kernel


def sample(
    trained: TrainedModel,
    prompts: np.ndarray,
    count: int,
    temperature: float,
    seed: int,
    progress: Progress = without_progress,
) -> np.ndarray:
    """Continue prompts. All models get the same random numbers, so they differ only where their predictions do.

    Args:
        prompts: int64 [prompts, s].
        count: tokens to add to each prompt, even after an EOD.

    Returns:
        The tokens added, int64 [prompts, count].
    """
    uniform = np.random.default_rng(seed).random((len(prompts), count))
    starts = range(0, len(prompts), ROWS)
    batches = [
        _sample_rows(trained, prompts[start : start + ROWS], uniform[start : start + ROWS], temperature)
        for start in progress(starts, len(starts), "sampling")
    ]
    return np.concatenate(batches)


def _sample_rows(trained: TrainedModel, prompts: np.ndarray, uniform: np.ndarray, temperature: float) -> np.ndarray:
    rows, count = uniform.shape
    tokens = torch.from_numpy(prompts)
    added = []
    with _caching(trained.model, rows) as start:
        for step in range(count):
            logits = trained.logits(tokens, [tokens.shape[1]] * rows)[:, -1]
            start["position"] += tokens.shape[1]
            tokens = _draw(logits, uniform[:, step], temperature)[:, None]
            added.append(tokens)
    return torch.cat(added, 1).numpy()


def _draw(logits: Tensor, uniform: np.ndarray, temperature: float) -> Tensor:
    """A token per row, int64 [rows]: the first whose cumulative probability exceeds the random number."""
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1).cpu()
    tokens = torch.searchsorted(cumulative, torch.from_numpy(np.ascontiguousarray(uniform))[:, None])[:, 0]
    return tokens.clamp(max=logits.shape[-1] - 1)
