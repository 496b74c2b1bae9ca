"""Samples to micro-batches: megatron-core's dataset builder, and a loader whose order depends on the seed alone."""

import argparse
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from pretrain_arguments import blend
from torch.utils.data import DataLoader, Dataset

from megatron_bfp import BFPGPTDataset, BFPGPTDatasetConfig
from megatron_bfp.errors import OptionError


def build_train_dataset(options: argparse.Namespace, tokenizer: Any) -> Dataset:
    """The training split as ``--data-impl`` and ``--data-path`` describe it. Call it on all ranks.

    Raises:
        BFPError: the data cannot be used, or the training split is empty.
    """
    common = {
        "random_seed": options.seed,
        "sequence_length": options.seq_length,
        "blend": blend(options.data_path),
        "split": options.split,
        "path_to_cache": options.data_cache_path,
        "num_dataset_builder_threads": options.num_dataset_builder_threads,
        "tokenizer": tokenizer,
        "reset_position_ids": options.reset_position_ids,
        "reset_attention_mask": False,
        "eod_mask_loss": options.eod_mask_loss,
        "create_attention_mask": False,
    }
    for prefix in common["blend"][0]:
        if not os.path.isfile(f"{prefix}.idx"):
            raise OptionError(f"--data-path {prefix}: no such dataset (no file {prefix}.idx)")
    if options.data_impl == "bfp":
        cap = options.max_documents_per_sequence
        dataset_class, config = BFPGPTDataset, BFPGPTDatasetConfig(**common, max_documents_per_sequence=cap)
    else:
        dataset_class, config = GPTDataset, GPTDatasetConfig(**common)
    num_samples = options.train_iters * options.global_batch_size
    builder = BlendedMegatronDatasetBuilder(dataset_class, [num_samples, 0, 0], lambda: True, config)
    train = builder.build()[0]
    if train is None or len(train) == 0:
        raise OptionError(f"--split {options.split}: the training split of {' '.join(options.data_path)} is empty")
    return train


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
    """Micro-batches on ``device``: tokens, labels, loss_mask, position_ids [b, L] and cu_seqlens [b, L + 1]."""
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, pin_memory=device.type == "cuda")
    for batch in loader:
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        batch.setdefault("cu_seqlens", _one_segment_a_row(batch["tokens"]))
        yield batch


def _one_segment_a_row(tokens: torch.Tensor) -> torch.Tensor:
    """Boundaries for concatenation, where attention crosses documents: each row is one segment."""
    rows, seq_length = tokens.shape
    cu_seqlens = torch.full((rows, seq_length + 1), seq_length, dtype=torch.int32, device=tokens.device)
    cu_seqlens[:, 0] = 0
    return cu_seqlens
