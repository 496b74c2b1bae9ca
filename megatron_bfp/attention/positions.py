"""What a training step shows of positions: whether they restart in each document or run on through the sequence.

Position ids of an embedding can be looked at. Rotary positions cannot: which angles a function applies to which tokens
depends on the kernel, on its version and on the boundaries it gets. So ``rotations`` calls the same function with one
vector at every position. What comes back depends on the position alone: tokens with equal positions have equal vectors,
and neighbours whose positions differ by one are equally far apart everywhere.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .context_parallel import Shards

NOT_ROTATED = "no rotary positions"
RUN_ON = "run on through the sequence"
RESTART = "restart in each document"
IRREGULAR = "neither run on nor restart"
ONE_EACH = "in rows of one document each"
"""Nothing can restart there, so nothing can be said."""


class PositionsSeen:
    """Notes how attention layers rotate and which position ids an embedding gets.

    Args:
        row_length: positions of a row; None if rows are not joined.
        context_ranks, context_rank: into how many context-parallel ranks rows are split, and which this is.
    """

    def __init__(self, row_length: int | None, context_ranks: int = 1, context_rank: int = 0) -> None:
        self.row_length, self.context_ranks, self.context_rank = row_length, context_ranks, context_rank
        self.layer = ""  # the attention layer that is being called
        self.joined: Tensor | None = None  # the boundaries that it got, int64 [chunks + 1]
        self.kinds: dict[str, str | None] = {}  # name of an attention layer -> what its rotary positions are called
        self.courses: dict[str, set[str]] = {}  # name of a layer that rotates -> RUN_ON, RESTART, IRREGULAR
        self.restarts: set[bool] = set()  # whether an embedding's position ids fell back inside a row

    def enter(self, name: str, kind: str | None, joined: Tensor | None) -> None:
        """Note that an attention layer is called; rotations that follow are its own.

        Args:
            kind: as ``kind_of_rotation``; None if the layer should not rotate.
            joined: its boundaries, int64 [chunks + 1] as ``join_rows`` gives them; None if there are none.
        """
        self.layer, self.joined, self.kinds[name] = name, joined, kind

    def note_rotation(self, rotated: Tensor) -> None:
        """Note what the layer's rotation made of a vector that was the same at each position.

        Args:
            rotated: [t, heads, head size] of joined rows, or [s, b, heads, head size], or [b, s, heads, head size].
        """
        if self.joined is None:
            return
        rotated = rotated[..., 0, :].float()
        if rotated.dim() == 2:
            rotated = rotated[:, None]
        num_positions = int(self.joined[-1])
        row_length = self.row_length or max(rotated.shape[:2]) * self.context_ranks
        if len(rotated) * self.context_ranks not in (row_length, num_positions):
            rotated = rotated.transpose(0, 1)
        length, num_rows = rotated.shape[:2]
        if num_rows * length * self.context_ranks == num_positions:
            by_rows = rotated.transpose(0, 1).flatten(0, 1)
            course = course_of(by_rows, self._places(num_rows, length), self.joined, row_length)
            self.courses.setdefault(self.layer, set()).update({course} if course else ())

    def _places(self, num_rows: int, num_positions: int) -> Tensor:
        """int64 [num_rows * num_positions]: where in the joined rows this rank's positions are.

        Args:
            num_positions: of a row, on this rank.
        """
        if self.context_ranks == 1:
            return torch.arange(num_rows * num_positions)
        return Shards(self.context_ranks, num_rows, num_positions * self.context_ranks).positions(self.context_rank)

    def note_embedding(self, position_ids: Tensor) -> None:
        """Note the position ids, int [..., s], that an embedding was called with."""
        rows = position_ids.reshape(-1, position_ids.shape[-1])
        places = self._places(*rows.shape).view(rows.shape).to(rows.device)
        row_length = self.row_length or rows.shape[-1] * self.context_ranks
        are_neighbours = (places.diff(dim=-1) == 1) & (places[:, 1:] % row_length != 0)
        self.restarts.add(bool((are_neighbours & (rows.diff(dim=-1) < 1)).any()))

    def counts(self, rows_hold_documents: bool) -> dict[str, int]:
        """What is true of positions -> attention layers; 0 for what an embedding adds.

        Args:
            rows_hold_documents: a row was seen that holds more than one document; otherwise nothing can restart.
        """
        counts = dict(Counter(map(self._describe, self.kinds)))
        if any(self.restarts) or (self.restarts and rows_hold_documents):
            counts[f"learned positions {RESTART if any(self.restarts) else RUN_ON}"] = 0
        elif self.restarts:
            counts[f"learned positions, {ONE_EACH}"] = 0
        return counts

    def _describe(self, name: str) -> str:
        """What is true of a layer's rotary positions."""
        kind, courses = self.kinds[name] or "rotary positions", self.courses.get(name)
        if courses is None:
            return NOT_ROTATED if self.kinds[name] is None else f"{kind} that were not seen"
        if not courses:
            return f"{kind}, {ONE_EACH}"
        return f"{kind} {courses.copy().pop() if len(courses) == 1 else IRREGULAR}"


def course_of(rotated: Tensor, places: Tensor, joined: Tensor, row_length: int) -> str | None:
    """Whether positions run on from document to document, restart, or neither. None if that cannot be told: no row
    holds two documents, or nothing was rotated.

    Args:
        rotated: float32 [n, d], a vector that was the same everywhere, rotated by the positions of n tokens.
        places: int64 [n], where in the joined rows these tokens are; rising by one except where a piece of a row ends.
        joined: int64 [chunks + 1], the boundaries of the joined rows.
        row_length: positions of a row.
    """
    is_start = torch.isin(places, joined[:-1]).to(rotated.device)
    places = places.to(rotated.device)
    is_inside_row = places % row_length != 0
    starts = rotated[is_start]
    if not (is_start & is_inside_row).any() or (rotated == rotated[0]).all():
        return None
    if len(starts) > 1 and (starts == starts[0]).all():
        return RESTART
    was_seen = False
    for step in (1, 2):
        distances = (rotated[step:] - rotated[:-step]).square().sum(dim=-1)
        in_one_row = (places[step:] - places[:-step] == step) & (places[step:] % row_length >= step)
        crosses = is_start[step:] if step == 1 else is_start[1:-1] | is_start[2:]
        inside, across = distances[in_one_row & ~crosses], distances[in_one_row & crosses]
        if not len(across):
            continue
        was_seen = True
        if len(inside) and not _are_alike(inside, across):
            return IRREGULAR
    return RUN_ON if was_seen else None


def _are_alike(inside: Tensor, across: Tensor) -> bool:
    """Whether distances inside documents are all alike, and those across their boundaries are the same. In bfloat16
    they vary by 2 %, with scaled angles by more."""
    mean = inside.mean()
    spread = (inside - mean).abs().max()
    return bool(spread <= 0.25 * mean and (across - mean).abs().max() <= torch.maximum(0.05 * mean, 1.5 * spread))


def kind_of_rotation(model: nn.Module) -> str:
    """What a model's rotary positions are called."""
    names = " ".join(type(module).__name__ for module in model.modules())
    if "YarnRotaryEmbedding" in names:
        return "YaRN rotary positions"
    return "multimodal rotary positions" if "MultimodalRotaryEmbedding" in names else "rotary positions"


def rotates(module: nn.Module, keywords: Mapping[str, Any]) -> bool:
    """Whether an attention layer should rotate queries and keys by their positions.

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
