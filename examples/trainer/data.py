"""Data from datasets on disk to micro-batches on the device.

Datasets are made by megatron-core's builder, samplers decide which samples a rank gets, and ``micro_batches`` reads
them. The order of samples depends on the seed, the global batch size and the micro-batch size alone. Each global batch
holds the same samples for any number of ranks and any micro-batch size; only batches that are composed by cost
(``--balance-batches`` above 1) depend on these.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from torch.utils.data import DataLoader, Dataset

from megatron_bfp import BalancedDataset, BFPGPTDataset, BFPGPTDatasetConfig
from megatron_bfp.attention.context_parallel import Shards
from megatron_bfp.errors import BFPError, OptionError
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.integrations.fill_in_the_middle import sentinel_ids
from megatron_bfp.integrations.first_samples import read_first_samples
from megatron_bfp.samples.vocabulary import check_sampled_ids
from megatron_bfp.sequence_index.key import document_range

from .arguments import blend
from .baseline import InterDocumentGPTDataset
from .config import TrainerConfig, padded_vocab_size
from .ranks import leave_signals_to_the_trainer, log, on_first_rank


def build_train_dataset(config: TrainerConfig, tokenizer: Any) -> Dataset:
    """The training split, as ``--data-impl``, ``--data-path`` and ``--balance-batches`` say. Call it on all ranks.

    Raises:
        OptionError: the data cannot be used.
    """
    dataset_class, settings = _configure(config, tokenizer, Split.train, blend(config.data_path))
    num_samples = config.train_iters * config.global_batch_size
    vocab_size = padded_vocab_size(config, tokenizer.vocab_size)
    on_first_rank(lambda: _check_data(dataset_class, settings, Split.train, vocab_size))
    train = BlendedMegatronDatasetBuilder(dataset_class, [num_samples, 0, 0], lambda: True, settings).build()[0]
    if len(train) < num_samples:  # without weights, megatron-core blends one epoch
        raise OptionError(
            f"--data-path {' '.join(config.data_path)}: has {len(train)} samples, {num_samples} are needed; give a "
            "weight before each prefix to go through them more than once"
        )
    train = _balance(config, train)
    on_first_rank(lambda: read_first_samples(train))
    return train


def _balance(config: TrainerConfig, train: Dataset) -> Dataset:
    """The training split in the order of ``--balance-batches``; concatenation does not know the work of a sample."""
    if config.data_impl != "bfp" or config.balance_batches == 0:
        return train
    samples_at_once = parallel_state.get_data_parallel_world_size() * config.micro_batch_size
    if config.balance_batches > 1:
        log(
            f"batches are composed by cost: {config.balance_batches} global batches of {config.global_batch_size} "
            f"samples are balanced together, for {samples_at_once} samples at once (--balance-batches)"
        )
    sizes = config.global_batch_size, config.balance_batches, samples_at_once, config.micro_batch_size
    return BalancedDataset(train, *sizes)


def build_valid_dataset(config: TrainerConfig, tokenizer: Any) -> "WholeSplits":
    """One epoch of the valid split of every dataset, regardless of their weights in training. Call it on all ranks.

    Raises:
        OptionError: a dataset cannot be used, or its valid split has no tokens.
    """
    datasets = []
    for prefix in blend(config.data_path)[0]:
        dataset_class, settings = _configure(config, tokenizer, Split.valid, ([prefix], None))
        vocab_size = padded_vocab_size(config, tokenizer.vocab_size)
        on_first_rank(functools.partial(_check_data, dataset_class, settings, Split.valid, vocab_size))
        datasets.append(BlendedMegatronDatasetBuilder(dataset_class, [None] * 3, lambda: True, settings).build()[1])
    return WholeSplits(datasets)


def _configure(
    config: TrainerConfig, tokenizer: Any, split: Split, sources: tuple[list[str], list[float] | None]
) -> tuple[type[GPTDataset], GPTDatasetConfig]:
    """The dataset's class and configuration, for one split only: megatron-core builds every split that it is given,
    even for 0 samples."""
    common = {
        "random_seed": config.seed,
        "sequence_length": config.seq_length,
        "blend": sources,
        "split": config.split,
        "path_to_cache": config.data_cache_path,
        "num_dataset_builder_threads": config.num_dataset_builder_threads,
        "tokenizer": tokenizer,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": config.eod_mask_loss,
        "create_attention_mask": False,
    }
    if config.data_impl == "bfp":
        for name in ("max_documents_per_sequence", "even_sequences", "targets_only"):
            common[name] = getattr(config, name)
        for name in ("fim_rate", "fim_spm_rate"):
            common[name] = getattr(config, name)
        common["fim_extra_tokens"] = sentinel_ids(config, lambda texts: [tokenizer.token_id(text) for text in texts])
        common["model_vocab_size"] = padded_vocab_size(config, tokenizer.vocab_size)
        dataset_class, settings = BFPGPTDataset, BFPGPTDatasetConfig(**common)
    else:
        masked = config.dataloader_inter_document_masking
        dataset_class, settings = InterDocumentGPTDataset if masked else GPTDataset, GPTDatasetConfig(**common)
    for other in set(Split) - {split}:
        settings.split_matrix[other.value] = None
    return dataset_class, settings


def _check_data(dataset_class: type[GPTDataset], settings: GPTDatasetConfig, split: Split, vocab_size: int) -> None:
    """Open every dataset, check a sample of its token ids, and open or build its index.

    Raises:
        BFPError: one cannot be used.
    """
    fractions = settings.split_matrix[split.value]
    if fractions is None:
        raise OptionError(f"--split {settings.split}: the {split.name} split is empty")
    for prefix in settings.blend[0]:
        dataset = IndexedDataset(prefix)
        first, end = document_range(fractions, dataset.num_documents)
        spans = dataset.spans(np.array([first, end - 1])) if first < end else [(0, 0)]
        if spans[0][0] == spans[-1][1]:
            raise OptionError(f"--split {settings.split}: the {split.name} split of {prefix} has no tokens")
        check_sampled_ids(dataset, vocab_size)
        if dataset_class is BFPGPTDataset:
            BFPGPTDataset(dataset, prefix, None, None, split, settings)


class WholeSplits(Dataset):
    """Datasets one after another. ``None`` as an index gives a sample without loss."""

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
    if isinstance(dataset, BalancedDataset):
        dataset, sample = dataset.dataset, dataset.sample_of(sample)
    if hasattr(dataset, "dataset_index"):  # megatron-core's blend
        which, sample = int(dataset.dataset_index[sample]), int(dataset.dataset_sample_index[sample])
        dataset = dataset.datasets[which]
    if isinstance(dataset, BFPGPTDataset):
        sequence = dataset.sequence_of(sample)
        chunks = dataset.sequence_index.chunk_spans(sequence)
        return Origin(dataset.dataset_path, sequence, [chunk.document for chunk in chunks])
    dataset[sample]  # the first read opens its indices
    position = dataset.shuffle_index[sample]
    first, last = (int(dataset.sample_index[position + end][0]) for end in (0, 1))
    return Origin(dataset.dataset_path, None, [int(number) for number in dataset.document_index[first : last + 1]])


@dataclasses.dataclass(frozen=True)
class GlobalOrderSampler:
    """The sample numbers of each micro-batch of one rank. Each global batch holds the same samples for any number of
    ranks.

    Global batch g starts at sample g * ``global_batch_size``. Its micro-batches go to the ranks in turn: with 8
    samples, micro-batches of 2 and 2 ranks, rank 0 gets [0, 1], [4, 5] and rank 1 gets [2, 3], [6, 7].
    """

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


@dataclasses.dataclass(frozen=True)
class EvaluationSampler:
    """The sample numbers of each micro-batch of one rank, one epoch of a dataset.

    All ranks get equally many micro-batches, as ZeRO 3 needs; the last ones are filled up with ``None``, samples
    without loss.
    """

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


def micro_batches(
    dataset: Dataset, sampler: Iterable[list], num_workers: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches: tokens, labels, loss_mask, position_ids [b, L] on ``device``; cu_seqlens int32 [b, L + 1] on the
    host, where attention reads it. With context parallelism, all but cu_seqlens are this rank's positions of the rows.

    Raises:
        BFPError: a dataset cannot be read, here or in a worker.
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
            cu_seqlens = _boundaries_of_whole_rows(batch["tokens"])
        moved = {name: _own_positions(tensor).to(device, non_blocking=True) for name, tensor in batch.items()}
        yield moved | {"cu_seqlens": cu_seqlens}


def _own_positions(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of rows, [b, L] to [b, L / context-parallel size], as megatron-core divides them."""
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if ranks == 1 or tensor.dim() < 2:
        return tensor
    return tensor[:, Shards(ranks, 1, tensor.shape[1]).positions(rank)]


def _one_line_errors(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """The loader's batches. An error in a worker comes with the worker's traceback as its message; of our own errors,
    only the message is kept.

    The workers end with the batches. An error would otherwise keep the loader's iterator alive through its frames, and
    Python would wait for the workers when it exits.
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


def _boundaries_of_whole_rows(tokens: torch.Tensor) -> torch.Tensor:
    """Boundaries for concatenation, where attention crosses documents: none inside a row, int32 [b, L + 1]."""
    rows, seq_length = tokens.shape
    cu_seqlens = torch.full((rows, seq_length + 1), seq_length, dtype=torch.int32)
    cu_seqlens[:, 0] = 0
    return cu_seqlens
