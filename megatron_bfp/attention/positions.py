"""What a training step shows of positions: whether they restart in each document or run on through the sequence."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

NOT_ROTATED = "no rotary positions"


class PositionsSeen:
    """Notes how attention layers rotate and which position ids an embedding gets.

    Args:
        row_length: positions of a row; None if rows are not joined.
        held: if rows are split over ranks: gives, for a number of positions that this rank holds, where in the joined
            rows they are.
    """

    def __init__(self, row_length: int | None, held: Callable[[int], Tensor] | None = None) -> None:
        self.row_length, self.held = row_length, held
        self.rotations: dict[str, str] = {}  # name of an attention layer -> what is true of it
        self.restarts: set[bool] = set()  # whether an embedding's position ids fell back inside a row

    def note_rotation(self, name: str, kind: str, is_rotated: bool, is_joined: bool) -> None:
        """Note a call of an attention layer.

        Args:
            kind: as ``kind_of_rotation``.
            is_joined: its rows are joined; megatron-core then rotates each document from position 0.
        """
        self.rotations[name] = f"{kind} {_course(is_joined)}" if is_rotated else NOT_ROTATED

    def note_embedding(self, position_ids: Tensor) -> None:
        """Note the position ids, int [..., s], that an embedding was called with."""
        rows = position_ids.reshape(-1, position_ids.shape[-1])
        if self.held is not None:
            of_row = self.held(rows.shape[-1]).to(rows.device) % (self.row_length or rows.shape[-1])
            self.restarts.add(bool((rows != of_row).any()))
            return
        falls = torch.nonzero(rows.diff(dim=-1) < 1)[:, -1] + 1
        self.restarts.add(bool((falls % (self.row_length or rows.shape[-1] + 1) != 0).any()))

    def counts(self, rows_hold_documents: bool) -> dict[str, int]:
        """What is true of positions -> attention layers; 0 for what an embedding adds.

        Args:
            rows_hold_documents: a row was seen that holds more than one document; otherwise nothing can restart.
        """
        counts = dict(Counter(self.rotations.values()))
        if any(self.restarts) or (self.restarts and rows_hold_documents):
            counts[f"learned positions {_course(any(self.restarts))}"] = 0
        elif self.restarts:
            counts["learned positions, in rows of one document each"] = 0
        return counts


def _course(restart: bool) -> str:
    return "restart in each document" if restart else "run on through the sequence"


def kind_of_rotation(model: nn.Module) -> str:
    """What a model's rotary positions are called."""
    names = " ".join(type(module).__name__ for module in model.modules())
    if "YarnRotaryEmbedding" in names:
        return "YaRN rotary positions"
    return "multimodal rotary positions" if "MultimodalRotaryEmbedding" in names else "rotary positions"


def rotates(module: nn.Module, keywords: Mapping[str, Any]) -> bool:
    """Whether an attention layer rotates queries and keys by their positions.

    Args:
        module: megatron-core's ``Attention`` or Megatron-DeepSpeed's ``ParallelAttention``.
        keywords: those of its forward call.
    """
    without = getattr(getattr(module, "config", None), "no_rope_freq", None)
    number = getattr(module, "layer_number", 0)
    if isinstance(without, list | tuple) and 0 < number <= len(without) and without[number - 1]:
        return False
    own = getattr(module, "rotary_pos_emb", None)  # of multi-latent attention
    return own is not None or keywords.get("rotary_pos_emb") is not None


def describe_positions(positions: Mapping[str, int]) -> str:
    """What is true of positions in the whole model.

    Args:
        positions: as ``PositionsSeen.counts``, added up over pipeline stages.
    """
    rotary = {text: count for text, count in positions.items() if count and text != NOT_ROTATED}
    learned = sorted(text for text in positions if text.startswith("learned"))
    without = positions.get(NOT_ROTATED, 0)
    texts = [
        text + (f" ({count:,} of {sum(rotary.values()) + without:,} layers)" if len(rotary) > 1 or without else "")
        for text, count in sorted(rotary.items())
    ]
    if not rotary and not learned:
        return "no positions" if without else "positions unknown"
    return ", ".join(texts + learned)
