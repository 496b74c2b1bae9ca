"""A split of a dataset as a run trains on it: an open sequence index, its length, and the order of its samples.

Everything that needs to know which sequence index a run means asks here: datasets, tools, and the checks before a run.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from ..errors import OptionError
from ..indexed_dataset.reader import IndexedDataset
from ..packing.chunks import ChunkSpan
from ..progress import Progress, without_progress
from ..samples.fill_in_the_middle import FimDocuments, FimEpoch, FimForm
from ..samples.order import sequence_of_sample, sequences_of_samples
from .builder import open_or_build, open_or_refuse
from .key import IndexKey
from .reader import SequenceIndex


@dataclass(frozen=True, eq=False)
class PackedSplit:
    """The train, valid or test split of a dataset, packed. ``len(split)`` is its number of sequences."""

    index: SequenceIndex
    name: str
    """train, valid or test."""

    @classmethod
    def open(
        cls,
        dataset: IndexedDataset,
        seq_length: int,
        split: str | tuple[float, float] | None,
        name: str = "train",
        max_documents_per_sequence: int | None = None,
        cache_path: str | None = None,
        *,
        even_sequences: bool = False,
        targets_only: bool = False,
        fim: FimDocuments | None = None,
        builds: bool = True,
        progress: Progress = without_progress,
    ) -> "PackedSplit | None":
        """Open the index that a run's options mean, beside the dataset or under ``cache_path``.

        Args:
            seq_length: the run's ``--seq-length``.
            split: the run's ``--split``, such as "969,30,1"; or where this split begins and ends, an entry of
                megatron-core's ``config.split_matrix``; or None for all documents.
            name: which of the splits: train, valid or test.
            max_documents_per_sequence: the run's cap on documents.
            even_sequences: whether the run has ``--even-sequences``.
            targets_only: whether the run has ``--targets-only``.
            fim: the run's ``--fim-rate`` and ``--seed``; None without fill-in-the-middle.
            builds: build the index if it is missing; otherwise that is an error.

        Returns:
            None if ``split`` gives this split no share.

        Raises:
            OptionError: an argument is not what is described above.
            SequenceIndexError: the index is damaged, or it is missing and cannot be built.
        """
        rule = max_documents_per_sequence, even_sequences, targets_only, fim
        if isinstance(split, tuple):
            key = IndexKey.for_fractions(dataset.num_documents, seq_length, split, *rule)
        else:
            key = IndexKey.for_split(dataset.num_documents, seq_length, split, name, *rule)
        if key is None:
            return None
        if builds:
            return cls(open_or_build(dataset, key, cache_path, progress), name)
        return cls(open_or_refuse(dataset, key, cache_path, split if isinstance(split, str) else None), name)

    @property
    def dataset(self) -> IndexedDataset:
        """What the split is of."""
        return self.index.dataset

    @property
    def packed_in_words(self) -> str:
        """What sequences are made of, for messages: tokens or, with targets only, targets."""
        return "targets" if self.index.key.targets_only else "tokens"

    def __len__(self) -> int:
        return len(self.index)

    def samples_in_whole_epochs(self, num_samples: int) -> int:
        """Samples of as many whole epochs as ``num_samples`` need; 0 if the split has no sequences."""
        return -(-num_samples // len(self)) * len(self) if len(self) else 0

    def sequence_of(self, sample: int, seed: int) -> int:
        """The sequence that a sample shows in training, epoch after epoch.

        Args:
            sample: >= 0, counted over all epochs. The split must have sequences.
            seed: the run's ``--seed``.
        """
        return sequence_of_sample(sample, len(self.index), seed, self.index.identity)

    def work_of(self, samples: Any, seed: int) -> np.ndarray:
        """The work of samples, without reading a document; see ``SequenceIndex.work``.

        Args:
            samples: integers >= 0 [n], counted over all epochs.
            seed: the run's ``--seed``.

        Returns:
            int64 [n], tokens squared.
        """
        return self.index.work(sequences_of_samples(np.asarray(samples), len(self.index), seed, self.index.identity))

    def chunk_spans(self, sample: int, seed: int) -> list[ChunkSpan]:
        """The chunks of a sample, as ``SequenceIndex.chunk_spans`` gives them."""
        return self.index.chunk_spans(self.sequence_of(sample, seed))

    def fim_epoch(self, sample: int, form: FimForm | None) -> FimEpoch | None:
        """How rearranged documents are shown in the epoch of a sample; None without fill-in-the-middle.

        Args:
            sample: >= 0, counted over all epochs.
            form: the form that the run gives them.
        """
        fim = self.index.key.fim
        return None if fim is None or form is None else _fim_epoch(form, fim.seed, sample // len(self.index))

    def refuse_in_blend(self) -> NoReturn:
        """Refuse a split without sequences as part of a blend, which has a weight for each of its datasets."""
        key = self.index.key
        raise OptionError(
            f"{self.dataset.prefix}: the {self.name} split, documents {key.first_document} to {key.end_document} of "
            f"{self.dataset.num_documents}, has no {self.packed_in_words}; take it out of the blend, or change --split"
        )


_fim_epoch = lru_cache(maxsize=64)(FimEpoch)
"""All samples of an epoch ask for the same one."""
