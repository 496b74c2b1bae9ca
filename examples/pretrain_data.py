"""Samples to micro-batches: megatron-core's dataset builder, and a loader whose order depends on the seed alone."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from pretrain_arguments import blend
from torch import distributed
from torch.utils.data import DataLoader, Dataset

from megatron_bfp import BFPGPTDataset, BFPGPTDatasetConfig
from megatron_bfp.errors import BFPError, OptionError
from megatron_bfp.index_format import document_range
from megatron_bfp.indexed_dataset import IndexedDataset


def build_train_dataset(options: argparse.Namespace, tokenizer: Any) -> Dataset:
    """The training split as ``--data-impl`` and ``--data-path`` describe it. Call it on all ranks.

    Raises:
        OptionError: the data cannot be used.
    """
    common = {
        "random_seed": options.seed,
        "sequence_length": options.seq_length,
        "blend": blend(options.data_path),
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
        dataset_class, config = BFPGPTDataset, BFPGPTDatasetConfig(**common, max_documents_per_sequence=cap)
    else:
        dataset_class, config = GPTDataset, GPTDatasetConfig(**common)
    config.split_matrix[1:] = [None, None]  # megatron-core would build the other splits even for no samples
    num_samples = options.train_iters * options.global_batch_size
    _check_on_first_rank(lambda: _check_data(dataset_class, config))
    train = BlendedMegatronDatasetBuilder(dataset_class, [num_samples, 0, 0], lambda: True, config).build()[0]
    if len(train) < num_samples:  # without weights, megatron-core blends one epoch
        raise OptionError(
            f"--data-path {' '.join(options.data_path)}: has {len(train)} samples, {num_samples} are wanted; give a "
            "weight before each prefix to go through them more than once"
        )
    return train


def _check_data(dataset_class: type[GPTDataset], config: GPTDatasetConfig) -> None:
    """Open every dataset, and open or build its index.

    Raises:
        BFPError: one cannot be used.
    """
    if config.split_matrix[0] is None:
        raise OptionError(f"--split {config.split}: the training split is empty")
    for prefix in config.blend[0]:
        dataset = IndexedDataset(prefix)
        first, end = document_range(config.split_matrix[0], dataset.num_documents)
        starts, ends = dataset.spans(np.array([first, end - 1])) if first < end else ([0], [0])
        if starts[0] == ends[-1]:
            raise OptionError(f"--split {config.split}: the training split of {prefix} has no tokens")
        if dataset_class is BFPGPTDataset:
            BFPGPTDataset(dataset, prefix, None, None, Split.train, config)


def _check_on_first_rank(check: Callable[[], None]) -> None:
    """Run a check on rank 0 and raise its error on all ranks: while rank 0 builds, the others wait for it in a barrier.

    Raises:
        OptionError: the check found something.
    """
    message = [None]
    if distributed.get_rank() == 0:
        try:
            check()
        except BFPError as error:
            message = [str(error)]
    distributed.broadcast_object_list(message)
    if message[0] is not None:
        raise OptionError(message[0])


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
    dataset: Dataset, sampler: GlobalOrderSampler, num_workers: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches: tokens, labels, loss_mask, position_ids [b, L] on ``device``; cu_seqlens [b, L + 1] on the host,
    where attention reads it."""
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, pin_memory=device.type == "cuda")
    for batch in loader:
        cu_seqlens = batch.pop("cu_seqlens", None)
        if cu_seqlens is None:
            cu_seqlens = _one_segment_a_row(batch["tokens"])
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        yield moved | {"cu_seqlens": cu_seqlens}


def _one_segment_a_row(tokens: torch.Tensor) -> torch.Tensor:
    """Boundaries for concatenation, where attention crosses documents: each row is one segment."""
    rows, seq_length = tokens.shape
    cu_seqlens = torch.full((rows, seq_length + 1), seq_length, dtype=torch.int32)
    cu_seqlens[:, 0] = 0
    return cu_seqlens
