"""Packed samples in megatron-core's dataset builder: ``BFPGPTDataset`` where ``GPTDataset`` was.

    BlendedMegatronDatasetBuilder(BFPGPTDataset, sizes, is_built_on_rank, BFPGPTDatasetConfig(...)).build()

The builder, blends, splits and caches are megatron-core's own. What changes is a dataset's samples: they come from a
sequence index, which is opened, or built where it is missing, when the dataset is made.
"""

import logging
import operator
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

try:
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
except ModuleNotFoundError as error:
    from ..optional import not_installed

    raise not_installed(error, __name__) from None
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank

from ..arguments import checked_cap, checked_seq_length
from ..errors import OptionError
from ..indexed_dataset.reader import IndexedDataset
from ..progress import log_progress
from ..samples.blends import check_weights
from ..samples.fill_in_the_middle import FimDocuments, FimForm, FimTokens
from ..samples.sample import build_sample, dense_attention_mask
from ..sequence_index.key import split_fractions
from ..sequence_index.split import PackedSplit
from .sample_tensors import SampleTensors

FIM_TOKENS = ("prefix", "middle", "suffix")
FIM_FIELDS = ("fim_rate", "fim_spm_rate", "fim_extra_tokens")

MOST_CORPORA = 32766
"""In a blend of megatron-core, which numbers them in int16 and leaves one out."""

logger = logging.getLogger(__name__)


@dataclass
class BFPGPTDatasetConfig(GPTDatasetConfig):
    """``GPTDatasetConfig`` and some fields more.

    ``create_attention_mask`` is off unless asked for: the mask is quadratic in the sequence, and attention takes its
    boundaries from ``cu_seqlens``.

    Raises:
        OptionError: an option cannot be honoured.
    """

    create_attention_mask: bool = False

    max_documents_per_sequence: int | None = None
    """At most so many documents in a sequence; None for no limit."""

    even_sequences: bool = False
    """Spread short documents over all sequences, so that none holds many times the mean; see ``pack``."""

    targets_only: bool = False
    """Leave the last token of each document out of the inputs, as nothing is learned from it; see ``pack``."""

    fim_rate: float | None = None
    """The share of documents that are rearranged for fill-in-the-middle; None for none. The seed chooses them."""

    fim_spm_rate: float = 0.5
    """The share of them that are shown as suffix, prefix and middle; the others as prefix, suffix and middle."""

    fim_extra_tokens: dict[str, int] | None = None
    """Ids of the sentinels: prefix, middle and suffix; needed with ``fim_rate``."""

    model_vocab_size: int | None = None
    """Rows of the model's embedding, on all tensor-parallel ranks together: a sample with another id is an error that
    names its document. None takes any id."""

    def __post_init__(self) -> None:
        if self.split is not None:
            split_fractions(self.split)
        checked_seq_length("sequence_length", self.sequence_length)
        self._check_blends()
        super().__post_init__()
        self.max_documents_per_sequence = checked_cap(self.max_documents_per_sequence)
        refused = {
            "mock data": self.mock,
            "hybrid context parallelism": self.hybrid_context_parallel,
            "context parallelism above 1": (self.context_parallel_size or 1) > 1,
        }
        for what, is_on in refused.items():
            if is_on:
                raise OptionError(f"{what} cannot be used with --data-impl bfp")
        if self.fim_rate is not None:
            self._check_fim()
        self._warn_of_repeated_corpora()

    @property
    def fim_documents(self) -> FimDocuments | None:
        """Which documents are rearranged; None without fill-in-the-middle."""
        return None if self.fim_rate is None else FimDocuments(self.fim_rate, self.random_seed)

    @property
    def fim_form(self) -> FimForm | None:
        """How they are shown; None without fill-in-the-middle."""
        ids = self.fim_extra_tokens
        if self.fim_rate is None or ids is None:
            return None
        return FimForm(FimTokens(ids["prefix"], ids["middle"], ids["suffix"], self.tokenizer.eod), self.fim_spm_rate)

    def _check_fim(self) -> None:
        ids = list((self.fim_extra_tokens or {}).values())
        if set(self.fim_extra_tokens or {}) != set(FIM_TOKENS) or len({*ids, self.tokenizer.eod}) < len(ids) + 1:
            raise OptionError(f"fim_extra_tokens: give an id of its own for each of {', '.join(FIM_TOKENS)}")
        _ = self.fim_documents, self.fim_form  # they refuse impossible values

    def _check_blends(self) -> None:
        """Refuse blends that megatron-core would end with an assertion."""
        for blend in (self.blend, *(self.blend_per_split or ())):
            if blend is None:
                continue
            prefixes, weights = blend
            if len(prefixes) > MOST_CORPORA:
                raise OptionError(
                    f"a blend of {len(prefixes):,} corpora: megatron-core blends {MOST_CORPORA:,} at the most; "
                    "join some of them with megatron-bfp merge"
                )
            if weights is not None and len(weights) == len(prefixes):
                check_weights(prefixes, weights)

    def _warn_of_repeated_corpora(self) -> None:
        """A corpus that a blend names twice has one order: each batch would hold its sequences twice."""
        for blend in (self.blend, *(self.blend_per_split or ())):
            times = Counter(os.path.abspath(prefix) for prefix in blend[0]) if blend is not None else {}
            for prefix, number in times.items():
                if number > 1:
                    log_single_rank(
                        logger,
                        logging.WARNING,
                        f"{prefix}: is {number} times in the blend, so the same sequences come {number} times in a "
                        "batch; give it once, with the sum of its weights",
                    )


class BFPGPTDataset(GPTDataset):
    """Best-fit packed samples of a range of documents, epoch after epoch, each in another order.

    Sample i belongs to epoch i // S, with S the number of sequences; inside an epoch a seeded bijection gives the
    sequence. So the order depends on the seed and the index's identity alone: no two corpora of a blend share one.

    A sample is a dict of the tensors in ``samples.Sample``, and ``attention_mask``, bool [1, L, L], if
    ``create_attention_mask`` is on.

    Documents are the .idx file's documents, where GPTDataset splits by the sequences of that format. The range of a
    split comes from ``config.split_matrix`` and not from ``indexed_indices``, an array of all documents that the
    builder would make on every rank in int32: ``numel_low_level_dataset`` says 1 to keep it small.

    Args:
        indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config: as GPTDataset's.

    Raises:
        OptionError: the split has no documents, and the dataset is part of a blend.
        SequenceIndexError, IndexedDatasetError: the data or its index cannot be used.
    """

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """1, whatever the dataset holds; see the class."""
        return 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        """Open PREFIX.bin and PREFIX.idx."""
        if is_object_storage_path(dataset_path):
            raise OptionError(f"{dataset_path}: object storage cannot be used with --data-impl bfp; copy it to disk")
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return GPTDataset._key_config_attributes() + [
            "max_documents_per_sequence",
            "even_sequences",
            "targets_only",
            *FIM_FIELDS,
        ]

    def _build_document_sample_shuffle_indices(self) -> tuple[None, None, None]:
        """Called by GPTDataset's constructor instead of building its own three indices."""
        self.fim_form = self.config.fim_form
        self.packed_split = self._open_split()
        self.sequence_index = None if self.packed_split is None else self.packed_split.index
        self.masked_input = self.config.tokenizer.eod if self.config.eod_mask_loss else None
        if self.packed_split:  # a blend's cache is keyed by this: it must change with the data
            self.unique_identifiers["idx_sha256"] = self.packed_split.index.idx_sha256
        return None, None, None

    def _open_split(self) -> PackedSplit | None:
        """The packed split; None if nothing is to be drawn from it."""
        config, split = self.config, self.index_split
        fractions = config.split_matrix[split.value] if config.split_matrix else (0.0, 1.0)
        if fractions is None or self.num_samples == 0:
            return None
        if self.fim_form is not None:
            self.fim_form.check(self.dataset, config.model_vocab_size)
        packed_split = PackedSplit.open(
            self.dataset,
            config.sequence_length,
            fractions,
            split.name,
            config.max_documents_per_sequence,
            config.path_to_cache,
            even_sequences=config.even_sequences,
            targets_only=config.targets_only,
            fim=config.fim_documents,
            progress=log_progress(logger),
        )
        if packed_split is not None and not len(packed_split):
            if self._is_in_blend():
                packed_split.refuse_in_blend()
            content = packed_split.packed_in_words
            log_single_rank(logger, logging.WARNING, f"{self.dataset_path}: the {split.name} split has no {content}")
        return packed_split

    def _is_in_blend(self) -> bool:
        config = self.config
        if config.blend:
            prefixes, weights = config.blend
            return len(prefixes) > 1 or weights is not None
        separate = config.multiple_validation_sets and self.index_split == Split.valid
        return len(config.blend_per_split[self.index_split.value][0]) > 1 and not separate

    def __len__(self) -> int:
        if not self.packed_split:
            return 0
        if self.num_samples is None:
            return len(self.packed_split)
        return self.packed_split.samples_in_whole_epochs(self.num_samples)

    def sequence_of(self, idx: int) -> int:
        """The sequence that sample ``idx`` shows.

        Raises:
            IndexError: there is no such sample.
        """
        packed_split, sample = self._checked(idx)
        return packed_split.sequence_of(sample, self.config.random_seed)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples that show each sequence once."""
        return len(self.packed_split) if self.packed_split else 0

    def work_of(self, samples: Any) -> np.ndarray:
        """The work of samples, without reading a document: the sum of the squared chunk lengths of each.

        Args:
            samples: integers in [0, len(self)) [n].

        Returns:
            int64 [n], tokens squared.

        Raises:
            IndexError: there is no such sample.
        """
        if self.packed_split is None:
            raise IndexError(f"{self.dataset_path}: has no samples")
        return self.packed_split.work_of(samples, self.config.random_seed)

    def _checked(self, idx: int) -> tuple[PackedSplit, int]:
        """The split, and ``idx`` as an int."""
        idx = operator.index(idx)
        if self.packed_split is None or not 0 <= idx < len(self):
            raise IndexError(f"{self.dataset_path}: sample {idx} is not in [0, {len(self)})")
        return self.packed_split, idx

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """One sample. ``None`` gives Megatron's batch padding: sample 0 without loss.

        Raises:
            IndexError: there is no such sample.
        """
        packed_split, number = self._checked(0 if idx is None else idx)
        sample = build_sample(
            self.dataset,
            packed_split.chunk_spans(number, self.config.random_seed),
            self.config.sequence_length,
            bool(self.config.reset_position_ids),
            self.masked_input,
            self.config.model_vocab_size,
            packed_split.fim_epoch(number, self.fim_form),
        )
        tensors = SampleTensors(zip(sample._fields, map(torch.from_numpy, sample)))
        if idx is None:
            tensors["loss_mask"].zero_()
        if self.config.create_attention_mask:
            tensors["attention_mask"] = torch.from_numpy(dense_attention_mask(sample.cu_seqlens))
        return tensors

    def __getstate__(self) -> dict[str, Any]:
        """Everything but megatron-core's ``indices``, which are not used; large parts pickle as paths."""
        return self.__dict__ | {"indices": None}
