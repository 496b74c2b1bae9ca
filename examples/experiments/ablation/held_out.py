"""The held-out documents of the ablation, token by token: groups of them by position, by length, and by how far back
their evidence lies."""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_bfp.indexed_dataset.reader import IndexedDataset


class Groups(NamedTuple):
    """The targets of the held-out documents, divided by something."""

    title: str
    tokens: dict[str, np.ndarray]
    """Which tokens are in a group, bool [tokens], by the group's label."""


class HeldOut:
    """Held-out documents, cut into chunks of the sequence length as the models are measured on them."""

    def __init__(self, seq_length: int, lengths: np.ndarray, tokens: np.ndarray) -> None:
        """
        Args:
            lengths: of the documents, int64 [documents].
            tokens: of all documents, one after another.
        """
        self.num_documents = len(lengths)
        self._seq_length, self._lengths, self._tokens = seq_length, lengths, tokens
        self._positions = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)

    @property
    def targets(self) -> np.ndarray:
        """All tokens but the first of each document, bool [tokens]."""
        return self._positions > 0

    @cached_property
    def evidence_distance(self) -> np.ndarray:
        """How many positions ago the same token occurred last in the same chunk, int64 [tokens]; 0 if it did not. That
        is where a model may have a token from, such as a name that is used again."""
        chunk = np.cumsum(self._positions % self._seq_length == 0)
        order = np.lexsort((self._positions, self._tokens, chunk))
        is_repeated = (np.diff(chunk[order]) == 0) & (np.diff(self._tokens[order].astype(np.int64)) == 0)
        distance = np.zeros(len(order), dtype=np.int64)
        distance[order[1:]] = np.where(is_repeated, np.diff(self._positions[order]), 0)
        return distance

    @property
    def far(self) -> np.ndarray:
        """Targets whose evidence lies further back than a cut would have left it, bool [tokens]: at least half of the
        sequence length, which is what a cut leaves on average. Frequent tokens, such as line breaks, occurred again
        since, and are not among them."""
        return self.targets & (self.evidence_distance >= self._seq_length // 2)

    def sums(self, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sum of the losses of each document, float64 [documents], and how many they are, int64 [documents].

        Args:
            losses: of all tokens; NaN is left out.
        """
        document = np.repeat(np.arange(self.num_documents), self._lengths)
        is_target = ~np.isnan(losses)
        sums = np.bincount(document[is_target], losses[is_target], self.num_documents)
        return sums, np.bincount(document[is_target], minlength=self.num_documents)

    def groups(self) -> list[Groups]:
        """By position in the document, by the document's length, and by the distance of the evidence, all in tokens."""
        edges = [self._seq_length // part for part in (32, 16, 8, 4, 2, 1)]
        lengths = np.repeat(self._lengths, self._lengths)
        return [
            self._between("position in the document", self._positions, edges),
            self._between("length of the document", lengths, edges[2:]),
            self._between("tokens since its last occurrence", self.evidence_distance, [1, *edges[:-1]]),
        ]

    def _between(self, title: str, values: np.ndarray, edges: list[int]) -> Groups:
        """Targets by the two edges that their values are between. Groups without any are left out."""
        number = np.searchsorted(edges, values, side="right")
        first = f"below {edges[0]}" if edges[0] > 1 else "none"
        labels = [first, *(f"{low}-{high - 1}" for low, high in zip(edges, edges[1:])), f"{edges[-1]}+"]
        groups = {label: self.targets & (number == group) for group, label in enumerate(labels)}
        return Groups(title, {label: tokens for label, tokens in groups.items() if tokens.any()})


def read_held_out(prefix: str, seq_length: int) -> HeldOut:
    """The documents of a dataset."""
    dataset = IndexedDataset(prefix)
    lengths = np.concatenate([*dataset.checked_lengths()])
    return HeldOut(seq_length, lengths, np.concatenate([dataset.document(n) for n in range(len(lengths))]))
