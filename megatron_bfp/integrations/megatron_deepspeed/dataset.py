"""Packed samples for Megatron-DeepSpeed, in the form that its batches have. numpy only.

Megatron-DeepSpeed has its own ``megatron`` package, in which megatron-core's dataset builder does not exist; blends,
their weights and caches are the code base's own, around the dataset of this module.
"""

import logging
import operator
from typing import Any

import numpy as np

from ...indexed_dataset.reader import IndexedDataset
from ...progress import log_progress
from ...samples.fill_in_the_middle import FimDocuments, FimForm
from ...samples.sample import build_sample
from ...sequence_index.key import SPLIT_NAMES
from ...sequence_index.split import PackedSplit

logger = logging.getLogger(__name__)


class PackedDataset:
    """Best-fit packed samples of a sequence index, epoch after epoch, each in another order.

    A sample is a dict of int64 arrays, as Megatron-DeepSpeed sends all of a batch in one dtype:

    - ``text`` [L + 1]: the tokens, and after them the last label. Megatron-DeepSpeed takes ``text[:-1]`` as tokens and
      ``text[1:]`` as labels, which is right wherever there is a target: the only chunks that their document goes on
      after are those of L tokens, and what follows such a chunk is the last label.
    - ``labels`` [L]: with targets only, where each chunk's last label is not in ``text``.
    - ``cu_seqlens`` [L + 1]: as in ``samples.Sample``.
    - ``loss_mask`` [L]: 1 where there is a target, else 0.

    Args:
        packed_split: the split that is shown; it has at least one sequence.
        num_samples: samples that will be asked for.
        seed: the run's seed.
        vocab_size: rows of the model's embedding: a sample with another id is an error. None takes any id.
        fim_form: how rearranged documents are shown, if the split has any.

    Attributes:
        sequence_index: the split's index.
        desc: what determines the samples, for Megatron-DeepSpeed's cache of blends.
    """

    def __init__(
        self,
        packed_split: PackedSplit,
        num_samples: int,
        seed: int,
        vocab_size: int | None = None,
        fim_form: FimForm | None = None,
    ) -> None:
        if fim_form is not None:
            fim_form.check(packed_split.dataset, vocab_size)
        self.fim_form = fim_form
        self.packed_split, self.sequence_index = packed_split, packed_split.index
        self.num_samples, self.seed, self.vocab_size = max(1, num_samples), seed, vocab_size
        index, prefix = packed_split.index, packed_split.dataset.prefix
        self.desc = f"megatron_bfp {prefix} {index.key.name} {index.idx_sha256} seed {seed}"

    def __len__(self) -> int:
        """Samples of as many whole epochs as are needed."""
        return self.packed_split.samples_in_whole_epochs(self.num_samples)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples that show each sequence once."""
        return len(self.packed_split)

    def work_of(self, samples: Any) -> np.ndarray:
        """The work of samples, without reading a document: the sum of the squared chunk lengths of each.

        Args:
            samples: integers in [0, len(self)) [n].

        Returns:
            int64 [n], tokens squared.
        """
        return self.packed_split.work_of(samples, self.seed)

    def __getitem__(self, idx: int) -> dict[str, np.ndarray]:
        """One sample.

        Raises:
            IndexError: there is no such sample.
            IndexedDatasetError: the data is damaged, or an id is not in the vocabulary.
        """
        idx, dataset = operator.index(idx), self.packed_split.dataset
        if not 0 <= idx < len(self):
            raise IndexError(f"{dataset.prefix}: sample {idx} is not in [0, {len(self)})")
        chunks = self.packed_split.chunk_spans(idx, self.seed)
        fim = self.packed_split.fim_epoch(idx, self.fim_form)
        sample = build_sample(dataset, chunks, self.sequence_index.key.seq_length, vocab_size=self.vocab_size, fim=fim)
        arrays = {
            "text": np.append(sample.tokens, sample.labels[-1]),
            "cu_seqlens": sample.cu_seqlens.astype(np.int64),
            "loss_mask": sample.loss_mask.astype(np.int64),
        }
        return arrays | {"labels": sample.labels} if self.sequence_index.key.targets_only else arrays


def build_splits(
    prefix: str,
    split: str,
    num_samples: list[int],
    seq_length: int,
    seed: int,
    max_documents_per_sequence: int | None = None,
    cache_path: str | None = None,
    is_in_blend: bool = False,
    vocab_size: int | None = None,
    even_sequences: bool = False,
    targets_only: bool = False,
    fim_rate: float | None = None,
    fim_form: FimForm | None = None,
) -> tuple[PackedDataset | None, PackedDataset | None, PackedDataset | None]:
    """The train, valid and test datasets of one prefix.

    Args:
        split: Megatron-DeepSpeed's ``--split``, its numbers separated by commas or slashes.
        num_samples: for each split.
        is_in_blend: a split without tokens is an error, as blends have a weight for every dataset.
        vocab_size: rows of the model's embedding; None to take any id.
        even_sequences: whether sequences get about equally many documents.
        targets_only: whether the last token of each document is left out of the inputs.
        fim_rate: the share of documents that are rearranged for fill-in-the-middle; None for none.
        fim_form: how they are shown.

    Returns:
        None for a split without a share or without tokens.

    Raises:
        OptionError: ``split`` is not a split, or a split of a blend's dataset has no tokens.
        SequenceIndexError, IndexedDatasetError: the data or its index cannot be used.
    """
    dataset, shares = IndexedDataset(prefix), split.replace("/", ",")
    datasets = []
    for name, wanted in zip(SPLIT_NAMES, num_samples, strict=True):
        packed_split = PackedSplit.open(
            dataset,
            seq_length,
            shares,
            name,
            max_documents_per_sequence,
            cache_path,
            even_sequences=even_sequences,
            targets_only=targets_only,
            fim=None if fim_rate is None else FimDocuments(fim_rate, seed),
            progress=log_progress(logger),
        )
        if is_in_blend and packed_split is not None and not len(packed_split):
            packed_split.refuse_in_blend()
        datasets.append(build_dataset(packed_split, wanted, seed, vocab_size, fim_form))
    train, valid, test = datasets
    return train, valid, test


def build_dataset(
    packed_split: PackedSplit | None,
    num_samples: int,
    seed: int,
    vocab_size: int | None = None,
    fim_form: FimForm | None = None,
) -> PackedDataset | None:
    """The samples of a split; None without tokens.

    Any number of processes may open a split and call this at once, and none has to wait for another that does not:
    Megatron-DeepSpeed builds datasets on the first rank of each tensor or sequence parallel group only.
    """
    if packed_split is None:
        return None
    if not len(packed_split):
        key = packed_split.index.key
        where = packed_split.dataset.prefix, key.first_document, key.end_document
        logger.warning("%s: documents %d to %d have no %s", *where, packed_split.packed_in_words)
        return None
    return PackedDataset(packed_split, num_samples, seed, vocab_size, fim_form)
