"""Packed samples for Megatron-DeepSpeed, in the form that its batches have. numpy only.

Megatron-DeepSpeed has its own ``megatron`` package, in which megatron-core's dataset builder does not exist; blends,
their weights and caches are the code base's own, around the dataset of this module.
"""

import logging
import operator

import numpy as np

from ...errors import OptionError
from ...indexed_dataset.reader import IndexedDataset
from ...progress import log_progress
from ...samples.sample import build_sample
from ...sequence_index.builder import open_or_build
from ...sequence_index.key import SPLIT_NAMES, IndexKey
from ...sequence_index.reader import SequenceIndex

logger = logging.getLogger(__name__)


class PackedDataset:
    """Best-fit packed samples of a sequence index, epoch after epoch, each in another order.

    A sample is a dict of int64 arrays, as Megatron-DeepSpeed sends all of a batch in one dtype:

    - ``text`` [L + 1]: the tokens, and after them the last label. Megatron-DeepSpeed takes ``text[:-1]`` as tokens and
      ``text[1:]`` as labels, which is right wherever there is a target: the only chunks that their document goes on
      after are those of L tokens, and what follows such a chunk is the last label.
    - ``cu_seqlens`` [L + 1]: as in ``samples.Sample``.
    - ``loss_mask`` [L]: 1 where there is a target, else 0.

    Args:
        dataset: what the index was built from.
        sequence_index: its sequences; at least one.
        num_samples: samples that will be asked for.
        seed: the run's seed.
        vocab_size: rows of the model's embedding: a sample with another id is an error. None takes any id.

    Attributes:
        desc: what determines the samples, for Megatron-DeepSpeed's cache of blends.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        sequence_index: SequenceIndex,
        num_samples: int,
        seed: int,
        vocab_size: int | None = None,
    ) -> None:
        self.dataset, self.sequence_index, self.seed, self.vocab_size = dataset, sequence_index, seed, vocab_size
        self.num_samples = max(1, num_samples)
        self.desc = f"megatron_bfp {dataset.prefix} {sequence_index.key.name} {sequence_index.idx_sha256} seed {seed}"

    def __len__(self) -> int:
        """Samples of as many whole epochs as are needed."""
        num_sequences = len(self.sequence_index)
        return -(-self.num_samples // num_sequences) * num_sequences

    def __getitem__(self, idx: int) -> dict[str, np.ndarray]:
        """One sample.

        Raises:
            IndexError: there is no such sample.
            IndexedDatasetError: the data is damaged, or an id is not in the vocabulary.
        """
        idx = operator.index(idx)
        if not 0 <= idx < len(self):
            raise IndexError(f"{self.dataset.prefix}: sample {idx} is not in [0, {len(self)})")
        sequence = self.sequence_index.sequence_of(idx, self.seed)
        chunks = self.sequence_index.chunk_spans(sequence)
        sample = build_sample(self.dataset, chunks, self.sequence_index.key.seq_length, vocab_size=self.vocab_size)
        return {
            "text": np.append(sample.tokens, sample.labels[-1]),
            "cu_seqlens": sample.cu_seqlens.astype(np.int64),
            "loss_mask": sample.loss_mask.astype(np.int64),
        }


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
) -> tuple[PackedDataset | None, PackedDataset | None, PackedDataset | None]:
    """The train, valid and test datasets of one prefix.

    Args:
        split: Megatron-DeepSpeed's ``--split``, its numbers separated by commas or slashes.
        num_samples: for each split.
        is_in_blend: a split without tokens is an error, as blends have a weight for every dataset.
        vocab_size: rows of the model's embedding; None to take any id.

    Returns:
        None for a split without a share or without tokens.

    Raises:
        OptionError: ``split`` is not a split, or a split of a blend's dataset has no tokens.
        SequenceIndexError, IndexedDatasetError: the data or its index cannot be used.
    """
    dataset = IndexedDataset(prefix)
    datasets = []
    for name, wanted in zip(SPLIT_NAMES, num_samples, strict=True):
        packed, shares = None, split.replace("/", ",")
        key = IndexKey.for_split(dataset.num_documents, seq_length, shares, name, max_documents_per_sequence)
        if key is not None:
            packed = build_dataset(dataset, key, wanted, seed, cache_path, vocab_size)
            if packed is None and is_in_blend:
                raise OptionError(
                    f"{prefix}: the {name} split, documents {key.first_document} to {key.end_document} of "
                    f"{dataset.num_documents}, has no tokens; take it out of the blend, or change --split"
                )
        datasets.append(packed)
    return tuple(datasets)


def build_dataset(
    dataset: IndexedDataset,
    key: IndexKey,
    num_samples: int,
    seed: int,
    cache_path: str | None = None,
    vocab_size: int | None = None,
) -> PackedDataset | None:
    """The samples of a range of documents, whose index is opened, or built where it is missing; None without tokens.

    Any number of processes may call this at once, and none has to wait for another that does not: Megatron-DeepSpeed
    builds datasets on the first rank of each tensor or sequence parallel group only.

    Raises:
        SequenceIndexError, IndexedDatasetError: as ``build_splits``.
    """
    index = open_or_build(dataset, key, cache_path, log_progress(logger))
    if not len(index):
        logger.warning("%s: documents %d to %d have no tokens", dataset.prefix, key.first_document, key.end_document)
        return None
    return PackedDataset(dataset, index, num_samples, seed, vocab_size)
