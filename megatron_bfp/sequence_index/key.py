"""Which index a run means: from its split, sequence length and cap to a directory's name, and what to do if it is bad.

``--split`` is parsed strictly: "969,30,1" to the fractions at which train, valid and test begin and end.
"""

import operator
import os
import re
import shlex
from dataclasses import dataclass

import numpy as np

from ..arguments import checked_cap, checked_seq_length
from ..errors import OptionError, SequenceIndexError
from ..indexed_dataset.reader import IndexedDataset
from ..samples.fill_in_the_middle import FimDocuments
from .fingerprints import sampled_fingerprint

NAME = re.compile(
    r"s([1-9][0-9]*)-d(0|[1-9][0-9]*)-(0|[1-9][0-9]*)(?:-m([1-9][0-9]*))?(-e)?(-t)?(?:-fim(0\.[0-9]*[1-9]|1)-(0|[1-9][0-9]*))?"
)
SPLIT_NAMES = ("train", "valid", "test")


@dataclass(frozen=True)
class IndexKey:
    """What an index is for. Two indexes of a dataset with the same key are the same bytes."""

    seq_length: int
    first_document: int
    end_document: int
    """Exclusive."""
    max_documents_per_sequence: int | None = None
    even_sequences: bool = False
    targets_only: bool = False
    """Whether only tokens with a target are inputs, all but the last of each document."""
    fim: FimDocuments | None = None
    """Which documents are rearranged for fill-in-the-middle; None for none."""

    def __post_init__(self) -> None:
        checked: dict[str, int | None] = {"seq_length": checked_seq_length("seq_length", self.seq_length)}
        checked["max_documents_per_sequence"] = checked_cap(self.max_documents_per_sequence)
        checked |= {name: operator.index(getattr(self, name)) for name in ("first_document", "end_document")}
        checked |= {name: bool(getattr(self, name)) for name in ("even_sequences", "targets_only")}
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not 0 <= self.first_document <= self.end_document:
            raise OptionError(f"documents {self.first_document} to {self.end_document} are not a range")

    @property
    def name(self) -> str:
        """The directory's name."""
        cap = "" if self.max_documents_per_sequence is None else f"-m{self.max_documents_per_sequence}"
        flags = "-e" * self.even_sequences + "-t" * self.targets_only
        fim = "" if self.fim is None else f"-fim{self.fim}"
        return f"s{self.seq_length}-d{self.first_document}-{self.end_document}{cap}{flags}{fim}"

    @classmethod
    def for_split(
        cls,
        num_documents: int,
        seq_length: int,
        split: str | None,
        split_name: str = "train",
        max_documents_per_sequence: int | None = None,
        even_sequences: bool = False,
        targets_only: bool = False,
        fim: FimDocuments | None = None,
    ) -> "IndexKey | None":
        """The index that a run's options mean: the one answer for datasets, tools and checks before a run.

        Args:
            num_documents: documents of the dataset.
            seq_length: the run's ``--seq-length``.
            split: the run's ``--split``, such as "969,30,1"; None for all documents, whatever ``split_name`` is.
            split_name: which of the splits: train, valid or test.
            max_documents_per_sequence: the run's cap on documents.
            even_sequences: whether the run has ``--even-sequences``.
            targets_only: whether the run has ``--targets-only``.
            fim: the run's ``--fim-rate`` and ``--seed``; None without fill-in-the-middle.

        Returns:
            None if ``split`` gives this split no share.

        Raises:
            OptionError: an argument is not what is described above.
        """
        documents, rule = split_range(num_documents, split, split_name), (max_documents_per_sequence, even_sequences)
        return None if documents is None else cls(seq_length, *documents, *rule, targets_only, fim)

    @classmethod
    def for_fractions(
        cls,
        num_documents: int,
        seq_length: int,
        fractions: tuple[float, float] | None,
        max_documents_per_sequence: int | None = None,
        even_sequences: bool = False,
        targets_only: bool = False,
        fim: FimDocuments | None = None,
    ) -> "IndexKey | None":
        """As ``for_split``, for one entry of megatron-core's ``config.split_matrix``: where a split begins and ends."""
        if fractions is None:
            return None
        documents, rule = document_range(fractions, num_documents), (max_documents_per_sequence, even_sequences)
        return cls(seq_length, *documents, *rule, targets_only, fim)

    @classmethod
    def from_name(cls, name: str) -> "IndexKey | None":
        """The key that a directory's name stands for; None if it is no index's name."""
        match = NAME.fullmatch(name)
        if match is None:
            return None
        seq_length, first, end, cap, *flags, rate, seed = match.groups()
        is_even, is_targets_only = (flag is not None for flag in flags)
        try:
            fim = None if rate is None else FimDocuments(float(rate), int(seed))
            most = None if cap is None else int(cap)
            return cls(int(seq_length), int(first), int(end), most, is_even, is_targets_only, fim)
        except OptionError:
            return None


def split_fractions(split: str) -> list[tuple[float, float] | None]:
    """Where each split begins and ends, the same floats as megatron-core's ``split_matrix``.

    megatron-core's own parser picks whatever looks like a number out of the text, so that "-1,1,0" or "90,abc5,5" pass.

    Args:
        split: one to three numbers >= 0 with commas between, not all 0.

    Returns:
        For train, valid and test a pair of fractions, or None for a split without a share.

    Raises:
        OptionError: ``split`` is something else.
    """
    parts = [part.strip() for part in split.split(",")]
    if len(parts) > len(SPLIT_NAMES) or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", part, re.ASCII) for part in parts):
        raise OptionError(f"--split {split!r}: give one to three numbers >= 0 with commas between, such as 969,30,1")
    shares = np.array([float(part) for part in parts] + [0.0] * (len(SPLIT_NAMES) - len(parts)))
    total = shares.sum()
    if not 0 < total < np.inf:
        raise OptionError(f"--split {split!r}: the numbers must add up to more than 0")
    ends = [0.0]
    for share in (shares / total).tolist():
        ends.append(ends[-1] + share)
    return [(first, end) if end > first else None for first, end in zip(ends, ends[1:])]


def document_range(fractions: tuple[float, float], num_documents: int) -> tuple[int, int]:
    """First and end document of a split, rounded as megatron-core's BlendedMegatronDatasetBuilder rounds.

    Args:
        fractions: where the split begins and ends, as in ``config.split_matrix``.
    """
    first, end = (int(round(fraction * float(num_documents))) for fraction in fractions)
    return first, end


def split_range(num_documents: int, split: str | None, split_name: str = "train") -> tuple[int, int] | None:
    """First and end document of a split, given as ``--split`` gives it; None if the split has no share.

    Args:
        split: such as "969,30,1"; None for all documents.
        split_name: train, valid or test.

    Raises:
        OptionError: there is no such split.
    """
    if split_name not in SPLIT_NAMES:
        raise OptionError(f"there is no split {split_name!r}; splits are {', '.join(SPLIT_NAMES)}")
    fractions = (0.0, 1.0) if split is None else split_fractions(split)[SPLIT_NAMES.index(split_name)]
    return None if fractions is None else document_range(fractions, num_documents)


def index_directory(prefix: str) -> str:
    """The directory that holds a dataset's indexes, PREFIX.bfp."""
    return prefix + ".bfp"


def cached_index_directory(dataset: IndexedDataset, cache_path: str) -> str:
    """Where a dataset's indexes go if its folder is read-only: a folder named after it and the content of its .idx."""
    sampled = sampled_fingerprint(dataset.idx_content)["sampled_sha256"]
    return os.path.join(cache_path, f"{os.path.basename(dataset.prefix)}-{sampled[:16]}.bfp")


def index_directories(dataset: IndexedDataset, cache_path: str | None = None) -> list[str]:
    """The directories where a dataset's indexes may be, in the order in which they are looked for."""
    beside = index_directory(dataset.prefix)
    return [beside, cached_index_directory(dataset, cache_path)] if cache_path else [beside]


def damaged(path: str, dataset: IndexedDataset, reason: str) -> SequenceIndexError:
    """The error for an index that is not what was built; says how to mend it."""
    return SequenceIndexError(f"{path}: the sequence index is damaged: {reason}. Rebuild it: {remedy(path, dataset)}")


def remedy(path: str, dataset: IndexedDataset) -> str:
    """What to do about an index that cannot be used."""
    path = os.path.normpath(path)
    key = IndexKey.from_name(os.path.basename(path))
    if key is None or os.path.dirname(path) != os.path.normpath(index_directory(dataset.prefix)):
        return f"remove {path}; the next start builds it"
    return f"{build_command(dataset, key)} --overwrite"


def build_command(dataset: IndexedDataset, key: IndexKey, split: str | None = None) -> str:
    """The command line that builds an index beside its dataset, quoted for a shell.

    Args:
        split: the --split that the key comes from, if it is known. Else one that has the key's documents as one of its
            parts is given.
    """
    words = ["megatron-bfp", "index", dataset.prefix, "--seq-length", str(key.seq_length)]
    if key.max_documents_per_sequence is not None:
        words += ["--max-documents-per-sequence", str(key.max_documents_per_sequence)]
    words += ["--even-sequences"] * key.even_sequences + ["--targets-only"] * key.targets_only
    words += [] if key.fim is None else ["--fim-rate", str(key.fim).split("-")[0], "--seed", str(key.fim.seed)]
    if (key.first_document, key.end_document) != (0, dataset.num_documents):
        words += ["--split", split or _split_with(key, dataset.num_documents)]
    return shlex.join(words)


def _split_with(key: IndexKey, num_documents: int) -> str:
    """A --split of a dataset that has the documents of an index as one of its parts."""
    share = key.end_document - key.first_document or 0.001  # rounded to no document, but a share
    shares = [key.first_document, share, num_documents - key.end_document]
    return ",".join(map(str, shares[1:] if key.first_document == 0 else shares))
