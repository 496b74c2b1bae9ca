"""Texts sampled from a model: the layers remember keys and values, so that each new token costs one position."""

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
"""Texts that are continued at once."""


class RememberingAttention:
    """Takes the place of an attention layer's kernel while texts are continued. It is called first with the prompts,
    for which the kernel runs, and then with one new token of each text, which attends to all before it."""

    def __init__(self, attend: Any, rows: int) -> None:
        self._attend, self._rows = attend, rows
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Any, softmax_scale: float, dropout: float
    ) -> Tensor:
        """As ``attention_kernels`` describes a kernel."""
        keys, values = (tensor.unflatten(0, (self._rows, -1)).transpose(1, 2) for tensor in (key, value))
        if self._keys is None:
            self._keys, self._values = keys, values  # [rows, groups, s, head size]
            return self._attend(query, key, value, segments, softmax_scale, dropout)
        self._keys, self._values = torch.cat([self._keys, keys], 2), torch.cat([self._values, values], 2)
        queries = query.unflatten(0, (self._rows, -1)).transpose(1, 2)
        found = scaled_dot_product_attention(
            queries, self._keys, self._values, scale=softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return found.transpose(1, 2).flatten(0, 1)


@contextmanager
def _remembering(model: Any, rows: int) -> Iterator[dict[str, int]]:
    """Let a model's layers remember what they have seen.

    Yields:
        A dictionary whose "position" must be that of the first token of the next call, from 0 on.
    """
    layers = [module for module in model.modules() if isinstance(module, DocumentAttention)]
    kernels = [layer.attend for layer in layers]
    place = {"position": 0}

    def from_position(rotary: Any, arguments: tuple, angles: Tensor) -> Tensor:
        """The model asks for angles from position 0 on."""
        return rotary.get_emb(len(angles), place["position"])

    hook = model.rotary_pos_emb.register_forward_hook(from_position)
    for layer in layers:
        layer.attend = RememberingAttention(layer.attend, rows)
    try:
        yield place
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
    """Continue prompts. Two models are given the same random numbers: they differ where their predictions do.

    Args:
        prompts: int64 [prompts, s].
        count: of tokens to add to each, also after an end of document.

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
    with _remembering(trained.model, rows) as place:
        for step in range(count):
            logits = trained.logits(tokens, [tokens.shape[1]] * rows)[:, -1]
            place["position"] += tokens.shape[1]
            tokens = _draw(logits, uniform[:, step], temperature)[:, None]
            added.append(tokens)
    return torch.cat(added, 1).numpy()


def _draw(logits: Tensor, uniform: np.ndarray, temperature: float) -> Tensor:
    """A token for each row, int64 [rows]: where the cumulative distribution passes the random number."""
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1).cpu()
    tokens = torch.searchsorted(cumulative, torch.from_numpy(np.ascontiguousarray(uniform))[:, None])[:, 0]
    return tokens.clamp(max=logits.shape[-1] - 1)
