"""Megatron-LM's gated delta nets with ``--data-impl bfp`` and ``--deterministic-mode``, which take no boundaries there.

Their kernels in flash-linear-attention take boundaries but are not deterministic. Megatron-LM's deterministic
operations take none, and so are called for each document. That costs a call per document and layer.

Each function takes one of Megatron-LM's and returns its replacement.
"""

import argparse
import copy
import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu

Options = Callable[[], argparse.Namespace | None]


def accept_boundaries(set_up: Callable, options: Options) -> Callable:
    """``GatedDeltaNet._setup_variant_attrs``, after which a deterministic layer is treated as others are. It keeps the
    deterministic rule that it has chosen.

    Args:
        options: gives what Megatron-LM parsed; None if the run is none of ours.
    """

    @functools.wraps(set_up)
    def set_up_and_accept(self: Any) -> None:
        set_up(self)
        if self.config.deterministic_mode and options() is not None:
            self.config = copy.copy(self.config)
            self.config.deterministic_mode = False

    return set_up_and_accept


def rule_in_documents(rule: Callable, options: Options) -> Callable:
    """``torch_chunk_gated_delta_rule``, with a state that begins anew at each boundary."""

    @functools.wraps(rule)
    def rule_of_documents(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor | None = None, **keywords: Any
    ) -> tuple[Tensor, None]:
        if cu_seqlens is None or options() is None:
            return rule(q, k, v, g, beta, cu_seqlens=cu_seqlens, **keywords)
        parts = [
            rule(*(tensor[:, start:end] for tensor in (q, k, v, g, beta)), **keywords)[0]
            for start, end in pairwise(cu_seqlens.unique_consecutive().tolist())
        ]
        return torch.cat(parts, dim=1), None

    return rule_of_documents


def convolution_in_documents(convolve: Callable, options: Options) -> Callable:
    """flash-linear-attention's ``causal_conv1d``; torch's in deterministic mode."""

    @functools.wraps(convolve)
    def convolve_documents(
        x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None = None, **keywords: Any
    ) -> tuple[Tensor, None]:
        """[b, t, channels], by a weight of [channels, width]."""
        args = options()
        if cu_seqlens is None or args is None or not args.deterministic_mode:
            return convolve(x=x, weight=weight, bias=bias, cu_seqlens=cu_seqlens, **keywords)
        channels, width = weight.shape
        parts = [
            conv1d(pad(x[:, start:end].transpose(1, 2), (width - 1, 0)), weight[:, None], bias, groups=channels)
            for start, end in pairwise(cu_seqlens.unique_consecutive().tolist())
        ]
        return silu(torch.cat(parts, dim=2)).transpose(1, 2), None

    return convolve_documents
