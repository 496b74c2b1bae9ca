"""Rotary positions with ``--data-impl bfp``: 0 .. L - 1 over each row, as in a run without packing.

Megatron-LM joins the rows of a micro-batch. Whatever rotates joined rows gets the boundaries of documents, and starts
from position 0 at each. ``rotate_by_rows`` gives it the boundaries of rows instead. Any kernel, fused or not, then
rotates as it does for unpacked rows, and has fewer boundaries to look at. Attention keeps those of documents. With
``--reset-position-ids`` nothing is changed.
"""

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import IntegrationError

Options = Callable[[], argparse.Namespace | None]


def rotate_by_rows(rotate: Callable, options: Options) -> Callable:
    """A function that rotates queries or keys, by the positions of rows.

    Args:
        rotate: takes joined rows, [t, ...], as its first argument, and their boundaries as ``cu_seqlens...``.
        options: gives what Megatron-LM parsed; None if the run is none of ours.

    Raises:
        IntegrationError: its table of angles is shorter than a row.
    """
    signature = inspect.signature(rotate)
    of_documents = [name for name in signature.parameters if name.startswith("cu_seqlens")]

    @functools.wraps(rotate)
    def rotate_rows(*arguments: Any, **keywords: Any) -> Any:
        call = signature.bind(*arguments, **keywords)
        tensor = call.args[0]
        given = [name for name in of_documents if call.arguments.get(name) is not None]
        length = length_of_rows(len(tensor), options()) if given else None
        if length is None:
            return rotate(*arguments, **keywords)
        for table in ("freqs", "cos", "sin"):
            if table in call.arguments and len(call.arguments[table]) < length:
                raise IntegrationError(
                    f"Megatron-LM made rotary angles of {len(call.arguments[table]):,} positions for rows of "
                    f"{length:,}; give --reset-position-ids, which restarts positions in each document"
                )
        if "max_seqlen" in signature.parameters:
            call.arguments["max_seqlen"] = length
        is_special = call.arguments.get("mscale", 1.0) != 1.0 or call.arguments.get("mla_rotary_interleaved")
        if is_special and call.arguments["config"].apply_rope_fusion:
            return _rotate_unjoined(rotate, call, given, length)
        call.arguments.update(dict.fromkeys(given, boundaries_of_rows(len(tensor), length, tensor.device)))
        return rotate(*call.args, **call.kwargs)

    rotate_rows.rotates_by_rows = True  # type: ignore[attr-defined]
    return rotate_rows


def _rotate_unjoined(rotate: Callable, call: inspect.BoundArguments, given: list[str], length: int) -> Tensor:
    """Rotate rows as [L, b, heads, head size]. The fused kernel knows neither YaRN's scale nor the interleaving of
    multi-latent attention. megatron-core 0.19 uses it all the same for joined rows, and not for others.

    Args:
        call: of ``rotate``, by joined rows.
        given: names of the arguments that are boundaries.
    """
    first, *_ = call.arguments
    rows = call.arguments[first].unflatten(0, (-1, length)).transpose(0, 1)
    call.arguments.update(dict.fromkeys(given) | {first: rows, "freqs": call.arguments["freqs"][:length]})
    return rotate(*call.args, **call.kwargs).transpose(0, 1).flatten(0, 1)


def length_of_rows(num_positions: int, args: argparse.Namespace | None) -> int | None:
    """Positions of a row, if so many joined positions are rows whose positions do not restart; else None."""
    if args is None or args.reset_position_ids or num_positions % args.seq_length:
        return None
    return args.seq_length


@functools.lru_cache(maxsize=8)
def boundaries_of_rows(num_positions: int, length: int, device: torch.device) -> Tensor:
    """0, ``length``, 2 * ``length``, ... up to ``num_positions``, int32."""
    return torch.arange(0, num_positions + 1, length, dtype=torch.int32, device=device)


def as_long_as_rows(get_rotary_seq_len: Callable, options: Options) -> Callable:
    """``RotaryEmbedding.get_rotary_seq_len``: the positions of a row, where it would be those of the longest document
    in joined rows."""
    signature = inspect.signature(get_rotary_seq_len)

    @functools.wraps(get_rotary_seq_len)
    def get_length(*arguments: Any, **keywords: Any) -> Any:
        call = signature.bind(*arguments, **keywords)
        if getattr(call.arguments.get("packed_seq_params"), "qkv_format", None) == "thd":
            call.arguments["packed_seq_params"] = None
            length = length_of_rows(get_rotary_seq_len(*call.args, **call.kwargs), options())
            if length is not None:
                return length
        return get_rotary_seq_len(*arguments, **keywords)

    return get_length
