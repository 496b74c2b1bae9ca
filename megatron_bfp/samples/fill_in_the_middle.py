"""Fill-in-the-middle: a share of the documents is shown as prefix, suffix and middle, so that models fill gaps.

Cost: a hash per document, and a few copies for each rearranged one. Guarantee: boundaries, labels and the loss mask are
exact. No document is cut for it, and none is padded: three sentinel tokens are added, and packing counts them.

Which documents are rearranged depends on the seed and the document alone, so they are the same in each epoch, and the
plan of an index holds for all of them. Where a document is split, and in which of two forms it is shown, differs from
epoch to epoch::

    PSM    <prefix> the prefix <suffix> the suffix <middle> the middle EOD
    SPM    <prefix> <suffix> the suffix <middle> the prefix, the middle EOD

Both splits are uniform over the document's tokens, so each of the three parts may be empty. A document that ends with
the EOD keeps it at the end.

Source: "Efficient Training of Language Models to Fill in the Middle" (Bavarian et al., 2022), with its second variant
of SPM, as in Megatron-LM's fim_dataset.py; here on tokens and not on characters, so that no length changes.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..errors import OptionError
from ..indexed_dataset.reader import IndexedDataset
from ..packing.chunks import ChunkSpan
from .order import mixed, mixed_array, round_keys

NUM_SENTINELS = 3
"""Tokens that are added to a document."""
VECTORISED = 8
"""From so many documents on, numpy chooses faster than Python."""
SHORTEST = 2
"""Tokens. A shorter document has nothing to be split."""
DECIMALS = 6
_FRACTION = 2.0**-53
_MOST = 1 << 16
"""Steps in which the share of SPM is drawn: what a hash has left after two splits of the longest document that fits."""


class RearrangedSpan(ChunkSpan):
    """The chunk of a whole document that is shown with sentinels, in an order of its own."""

    __slots__ = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are inputs, sentinels included."""
        return self.end - self.start + NUM_SENTINELS


@dataclass(frozen=True)
class FimDocuments:
    """Which documents are rearranged.

    Raises:
        OptionError: a value is impossible.
    """

    rate: float
    """Their share; above 0, at most 1, of at most six decimals, as it is in names of indexes."""
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1 or round(self.rate, DECIMALS) != self.rate:
            raise OptionError(f"--fim-rate {self.rate}: give a number above 0, at most 1, of at most six decimals")
        if self.seed < 0:
            raise OptionError(f"--seed {self.seed}: give an integer >= 0")
        object.__setattr__(self, "rate", float(self.rate))
        object.__setattr__(self, "seed", int(self.seed))

    def __str__(self) -> str:
        """As in names of indexes: 0.5-1234."""
        return f"{self.rate:.{DECIMALS}f}".rstrip("0").rstrip(".") + f"-{self.seed}"

    def are_chosen(self, documents: np.ndarray) -> np.ndarray:
        """Which documents are rearranged if they fit.

        Args:
            documents: integers [n], counted in the whole dataset.

        Returns:
            bool [n].
        """
        return mixed_array(documents.astype(np.uint64), self._key_array) <= self._last_array

    def are_rearranged(self, documents: np.ndarray, lengths: np.ndarray, longest: int) -> np.ndarray:
        """Which documents are rearranged: chosen ones that have something to be split and fit.

        Args:
            documents: integers [n], counted in the whole dataset.
            lengths: integers [n], tokens.
            longest: as ``longest_rearranged`` gives it.

        Returns:
            bool [n].
        """
        return self.are_chosen(documents) & (lengths >= SHORTEST) & (lengths <= longest)

    def rearrange(
        self,
        chunks: list[ChunkSpan],
        documents: np.ndarray,
        document_spans: list[tuple[int, int]],
        longest: int,
        targets_only: bool,
    ) -> int:
        """Replace the chunks of rearranged documents in one sequence by a ``RearrangedSpan`` each.

        Args:
            chunks: as without fill-in-the-middle; changed in place.
            documents: integers [n], the document of each.
            document_spans: start and end of each document, tokens.
            longest: as ``longest_rearranged`` gives it.
            targets_only: the last token of a document is no input.

        Returns:
            How many there are.
        """
        if len(chunks) < VECTORISED:
            key, last = self._key, self._last
            chosen = [at for at, chunk in enumerate(chunks) if mixed(chunk[0], key) <= last]
        else:
            chosen = self.are_chosen(documents).nonzero()[0].tolist()
        new, number = tuple.__new__, 0
        for at in chosen:
            start, end = document_spans[at]
            if SHORTEST <= end - start <= longest:
                chunks[at] = new(RearrangedSpan, (chunks[at][0], start, end - targets_only, end))
                number += 1
        return number

    @cached_property
    def _key(self) -> int:
        return round_keys(self.seed, 0, "documents for fill-in-the-middle")[0]

    @cached_property
    def _last(self) -> int:
        """The largest hash of chosen documents."""
        return (math.ceil(self.rate / _FRACTION) << 11) - 1

    @cached_property
    def _key_array(self) -> np.ndarray:
        return np.array(self._key, np.uint64)

    @cached_property
    def _last_array(self) -> np.ndarray:
        return np.array(self._last, np.uint64)


def longest_rearranged(seq_length: int, targets_only: bool) -> int:
    """Tokens of the longest document that fits into a sequence with its sentinels."""
    return seq_length - NUM_SENTINELS + targets_only


class FimLengths:
    """Lengths of documents with the sentinels of those that are rearranged; slices are computed when they are read.

    Args:
        lengths: integers [documents], tokens; anything with a length whose slices are numpy arrays.
        fim: which documents are rearranged.
        longest: tokens; longer documents stay as they are.
        first_document: the number in the dataset of the first one.
    """

    def __init__(self, lengths: Any, fim: FimDocuments, longest: int, first_document: int) -> None:
        self._lengths, self._fim, self._longest, self._first_document = lengths, fim, longest, first_document

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, documents: slice) -> np.ndarray:
        """The lengths, in their dtype."""
        lengths = self._lengths[documents]
        first = self._first_document + (documents.start or 0)
        is_rearranged = self._fim.are_rearranged(np.arange(first, first + len(lengths)), lengths, self._longest)
        return lengths + is_rearranged.astype(lengths.dtype) * lengths.dtype.type(NUM_SENTINELS)


class FimTokens(NamedTuple):
    """Ids of the sentinels, and of the token that stays at a document's end."""

    prefix: int
    middle: int
    suffix: int
    eod: int | None


@dataclass(frozen=True, eq=False)
class FimForm:
    """How rearranged documents are shown."""

    tokens: FimTokens
    spm_rate: float = 0.5
    """The share of them that are shown as SPM."""

    def __post_init__(self) -> None:
        if not 0 <= self.spm_rate <= 1:
            raise OptionError(f"--fim-spm-rate {self.spm_rate}: give a number from 0 to 1")

    def check(self, dataset: IndexedDataset, vocab_size: int | None) -> None:
        """Refuse sentinels that samples of a dataset cannot hold, or for which a model has no embedding.

        Raises:
            OptionError: there is one.
        """
        ids = self.tokens.prefix, self.tokens.middle, self.tokens.suffix
        if max(ids) > np.iinfo(dataset.dtype).max:
            raise OptionError(
                f"{dataset.prefix}: its tokens are {dataset.dtype}, which does not hold all ids of the sentinels, "
                f"{', '.join(map(str, ids))}; write it with a tokenizer that has them"
            )
        if min(ids) < 0 or vocab_size is not None and max(ids) >= vocab_size:
            raise OptionError(f"not all sentinels, {', '.join(map(str, ids))}, are in the model's vocabulary")


class FimEpoch:
    """How documents are shown in one epoch.

    Args:
        form: how they are shown in any epoch.
        seed: that of the ``FimDocuments``.
        epoch: the epoch.
    """

    def __init__(self, form: FimForm, seed: int, epoch: int) -> None:
        self._ids, self._spm_limit = form.tokens, round(form.spm_rate * _MOST)
        self._key = round_keys(seed, epoch, "splits of fill-in-the-middle")[0]

    def _split(self, document: int, end: int) -> tuple[int, int, bool]:
        """Where prefix and middle of a document end, in its tokens, and whether it is shown as SPM.

        One hash gives all: its quotients by the number of places where the document can be split.

        Args:
            end: the end of its suffix: its tokens without EOD.
        """
        places = end + 1
        rest, first = divmod(mixed(document, self._key), places)
        rest, second = divmod(rest, places)
        is_spm = rest % _MOST < self._spm_limit
        return (first, second, is_spm) if first < second else (second, first, is_spm)

    def parts(self, document: int, tokens: np.ndarray) -> list[tuple[str, int, int]]:
        """Which part of a document is where among its tokens as ``write`` writes them: name, begin and end of each."""
        end = len(tokens) - int(tokens[-1] == self._ids.eod)
        first, second, is_spm = self._split(document, end)
        suffix = end - second
        if is_spm:
            middle = 3 + suffix + first
            return [("suffix", 2, 2 + suffix), ("prefix", 3 + suffix, middle), ("middle", middle, 3 + end)]
        middle = 3 + first + suffix
        return [("prefix", 1, 1 + first), ("suffix", 2 + first, middle - 1), ("middle", middle, 3 + end)]

    def write(self, document: int, tokens: memoryview, shown: memoryview) -> None:
        """Write the tokens of a document in the order of this epoch, with sentinels.

        Args:
            document: its number in the dataset.
            tokens: any integers [n], all of its tokens; n >= 1.
            shown: gets them, integers [n + 3].
        """
        prefix_id, middle_id, suffix_id, eod = self._ids
        end = len(tokens)
        if tokens[-1] == eod:
            shown[-1] = eod
            end -= 1
        first, second, is_spm = self._split(document, end)
        shown[0] = prefix_id
        if is_spm:
            shown[1] = suffix_id
            middle = 2 + end - second
            shown[2:middle] = tokens[second:end]
            shown[middle + 1 : 3 + end] = tokens[:second]
        else:
            shown[1 : 1 + first] = tokens[:first]
            shown[1 + first] = suffix_id
            middle = 2 + first + end - second
            shown[2 + first : middle] = tokens[second:end]
            shown[middle + 1 : 3 + end] = tokens[first:second]
        shown[middle] = middle_id
