"""Samples to micro-batches: megatron-core's dataset builder, and a loader whose order depends on the seed alone."""

import argparse
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from torch.utils.data import DataLoader, Dataset

from megatron_bfp import BFPGPTDataset, BFPGPTDatasetConfig
from megatron_bfp.errors import BFPError, OptionError
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.integrations.first_samples import read_first_samples
from megatron_bfp.samples.vocabulary import check_sampled_ids
from megatron_bfp.sequence_index.key import document_range

from .arguments import blend, padded_vocab_size
from .ranks import leave_signals_to_the_trainer, on_first_rank


def build_train_dataset(options: argparse.Namespace, tokenizer: Any) -> Dataset:
    """The training split as ``--data-impl`` and ``--data-path`` describe it. Call it on all ranks.

    Raises:
        OptionError: the data cannot be used.
    """
    dataset_class, config = _configure(options, tokenizer, Split.train, blend(options.data_path))
    num_samples = options.train_iters * options.global_batch_size
    vocab_size = padded_vocab_size(options, tokenizer.vocab_size)
    on_first_rank(lambda: _check_data(dataset_class, config, Split.train, vocab_size))
    train = BlendedMegatronDatasetBuilder(dataset_class, [num_samples, 0, 0], lambda: True, config).build()[0]
    if len(train) < num_samples:  # without weights, megatron-core blends one epoch
        raise OptionError(
            f"--data-path {' '.join(options.data_path)}: has {len(train)} samples, {num_samples} are wanted; give a "
            "weight before each prefix to go through them more than once"
        )
    on_first_rank(lambda: read_first_samples(train))
    return train


def build_valid_dataset(options: argparse.Namespace, tokenizer: Any) -> "WholeSplits":
    """One epoch of the valid split of every dataset, whatever their weights in training. Call it on all ranks.

    Raises:
        OptionError: a dataset cannot be used, or its valid split has no tokens.
    """
    found = []
    for prefix in blend(options.data_path)[0]:
        dataset_class, config = _configure(options, tokenizer, Split.valid, ([prefix], None))
        vocab_size = padded_vocab_size(options, tokenizer.vocab_size)
        on_first_rank(functools.partial(_check_data, dataset_class, config, Split.valid, vocab_size))
        found.append(BlendedMegatronDatasetBuilder(dataset_class, [None] * 3, lambda: True, config).build()[1])
    return WholeSplits(found)


def _configure(
    options: argparse.Namespace, tokenizer: Any, split: Split, sources: tuple[list[str], list[float] | None]
) -> tuple[type[GPTDataset], GPTDatasetConfig]:
    """The dataset's class and configuration, for one split alone: megatron-core would build the others even for no
    samples."""
    common = {
        "random_seed": options.seed,
        "sequence_length": options.seq_length,
        "blend": sources,
        "split": options.split,
        "path_to_cache": options.data_cache_path,
        "num_dataset_builder_threads": options.num_dataset_builder_threads,
        "tokenizer": tokenizer,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": options.eod_mask_loss,
        "create_attention_mask": False,
    }
    if options.data_impl == "bfp":
        cap = options.max_documents_per_sequence
        common["model_vocab_size"] = padded_vocab_size(options, tokenizer.vocab_size)
        dataset_class, config = BFPGPTDataset, BFPGPTDatasetConfig(**common, max_documents_per_sequence=cap)
    else:
        masked = options.dataloader_inter_document_masking
        dataset_class, config = InterDocumentGPTDataset if masked else GPTDataset, GPTDatasetConfig(**common)
    for other in set(Split) - {split}:
        config.split_matrix[other.value] = None
    return dataset_class, config


class WholeSplits(Dataset):
    """Datasets one after another; ``None`` gives a sample without loss."""

    def __init__(self, datasets: list[GPTDataset]) -> None:
        self.datasets = datasets
        self._ends = np.cumsum([len(dataset) for dataset in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        if index is None:
            return self.datasets[0][None]
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self.datasets[which][index - int(self._ends[which]) + len(self.datasets[which])]


@dataclasses.dataclass(frozen=True)
class EvaluationSampler:
    """The sample numbers of each micro-batch of one rank, over all of a dataset once. All ranks have equally many
    micro-batches, as ZeRO 3 needs: those that are left over hold ``None``, samples without loss."""

    total_samples: int
    micro_batch_size: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[list[int | None]]:
        stride = self.micro_batch_size * self.world_size
        for first in range(0, self.total_samples, stride):
            mine = range(first + self.rank * self.micro_batch_size, first + (self.rank + 1) * self.micro_batch_size)
            yield [number if number < self.total_samples else None for number in mine]

    def __len__(self) -> int:
        return -(-self.total_samples // (self.micro_batch_size * self.world_size))


class Origin(NamedTuple):
    """Where a sample comes from."""

    prefix: str
    sequence: int | None
    """Of the dataset's sequence index; None for concatenation."""
    documents: list[int]


def origin_of(dataset: Any, sample: int) -> Origin:
    """Trace a sample of the training set back to its documents.

    Args:
        dataset: as ``build_train_dataset`` gives it.
    """
    if hasattr(dataset, "dataset_index"):  # megatron-core's blend
        which, sample = int(dataset.dataset_index[sample]), int(dataset.dataset_sample_index[sample])
        dataset = dataset.datasets[which]
    if isinstance(dataset, BFPGPTDataset):
        sequence = dataset.sequence_of(sample)
        chunks = dataset.sequence_index.chunk_spans(sequence)
        return Origin(dataset.dataset_path, sequence, [chunk.document for chunk in chunks])
    dataset[sample]  # it opens its indices at the first read
    place = dataset.shuffle_index[sample]
    first, last = (int(dataset.sample_index[place + end][0]) for end in (0, 1))
    return Origin(dataset.dataset_path, None, [int(number) for number in dataset.document_index[first : last + 1]])


def _check_data(dataset_class: type[GPTDataset], config: GPTDatasetConfig, split: Split, vocab_size: int) -> None:
    """Open every dataset, look at some of its ids, and open or build its index.

    Raises:
        BFPError: one cannot be used.
    """
    fractions = config.split_matrix[split.value]
    if fractions is None:
        raise OptionError(f"--split {config.split}: the {split.name} split is empty")
    for prefix in config.blend[0]:
        dataset = IndexedDataset(prefix)
        first, end = document_range(fractions, dataset.num_documents)
        spans = dataset.spans(np.array([first, end - 1])) if first < end else [(0, 0)]
        if spans[0][0] == spans[-1][1]:
            raise OptionError(f"--split {config.split}: the {split.name} split of {prefix} has no tokens")
        check_sampled_ids(dataset, vocab_size)
        if dataset_class is BFPGPTDataset:
            BFPGPTDataset(dataset, prefix, None, None, split, config)


@dataclasses.dataclass(frozen=True)
class GlobalOrderSampler:
    """The sample numbers of each micro-batch of one rank, so that each global batch holds the same samples for any
    number of ranks: global batch g is samples g * global batch size and on, dealt out a micro-batch at a time."""

    consumed_samples: int
    total_samples: int
    micro_batch_size: int
    global_batch_size: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[list[int]]:
        stride = self.micro_batch_size * self.world_size
        for batch in range(self.consumed_samples, self.total_samples, self.global_batch_size):
            for first in range(batch + self.rank * self.micro_batch_size, batch + self.global_batch_size, stride):
                yield list(range(first, first + self.micro_batch_size))

    def __len__(self) -> int:
        global_batches = (self.total_samples - self.consumed_samples) // self.global_batch_size
        return global_batches * (self.global_batch_size // (self.micro_batch_size * self.world_size))


def micro_batches(
    dataset: Dataset, sampler: Iterable[list], num_workers: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches: tokens, labels, loss_mask, position_ids [b, L] on ``device``; cu_seqlens [b, L + 1] on the host,
    where attention reads it.

    Raises:
        BFPError: a dataset cannot be read, also in a worker.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=leave_signals_to_the_trainer,
    )
    for batch in _one_line_errors(loader):
        cu_seqlens = batch.pop("cu_seqlens", None)
        if cu_seqlens is None:
            cu_seqlens = _one_segment_a_row(batch["tokens"])
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        yield moved | {"cu_seqlens": cu_seqlens}


def _one_line_errors(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """The loader's batches. It makes tracebacks the messages of errors in workers; of ours, the message is enough.

    The workers end with the batches: an error keeps the frames that it came through, and so the loader's iterator, and
    a worker that is left would be waited for when Python ends.
    """
    batches = iter(loader)
    try:
        yield from batches
    except BFPError as error:
        lines = str(error).strip().splitlines()
        if len(lines) == 1:
            raise
        raise type(error)(lines[-1].split(": ", 1)[-1]) from None
    finally:
        if loader.num_workers:
            batches._shutdown_workers()  # torch has no public name for it


def _one_segment_a_row(tokens: torch.Tensor) -> torch.Tensor:
    """Boundaries for concatenation, where attention crosses documents: each row is one segment."""
    rows, seq_length = tokens.shape
    cu_seqlens = torch.full((rows, seq_length + 1), seq_length, dtype=torch.int32)
    cu_seqlens[:, 0] = 0
    return cu_seqlens


class InterDocumentGPTDataset(GPTDataset):
    """``GPTDataset`` with the boundaries of the documents in each sample.

    Samples, labels and loss mask are GPTDataset's. ``cu_seqlens``, int32 [L + 1], is what megatron-core gives with
    ``inter_document_masking`` since 0.17, but works with versions before it: it comes from the dataset's own indices of
    documents and samples. Positions are not restarted: RoPE is relative.
    """

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """One sample; None gives Megatron's batch padding."""
        sample = super().__getitem__(idx)
        sample["cu_seqlens"] = torch.from_numpy(self._boundaries(0 if idx is None else idx))
        return sample

    def _boundaries(self, idx: int) -> np.ndarray:
        """int32 [L + 1]: 0, the end of each document's part of the inputs, then L to the end."""
        seq_length = self.config.sequence_length
        place = self.shuffle_index[idx]
        (first, first_offset), (last, last_offset) = self.sample_index[place : place + 2].astype(np.int64)
        documents = self.document_index[first : last + 1]
        ends = np.cumsum(self.dataset.sequence_lengths[documents], dtype=np.int64) - first_offset
        ends[-1] = min(seq_length, ends[-1])  # a sample takes one token more as its last label
        boundaries = np.full(seq_length + 1, seq_length, dtype=np.int32)
        boundaries[0] = 0
        inside = ends[ends < seq_length]
        boundaries[1 : len(inside) + 1] = inside
        return boundaries
