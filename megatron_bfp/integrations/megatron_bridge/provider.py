"""``BFPDatasetProvider``: the ``cfg.dataset`` of a Megatron-Bridge recipe, with best-fit packed samples."""

from argparse import Namespace
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from megatron.bridge.data.base import DataloaderConfig, DatasetBuildContext, DatasetProvider
from megatron.bridge.training.setup import _register_pre_wrap_hook
from megatron.core import num_microbatches_calculator
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list

from ...errors import BFPError, OptionError
from ...megatron_core.gpt_dataset import BFPGPTDataset, BFPGPTDatasetConfig
from ..balance import balanced, check_balance_batches, whole_blocks
from ..first_samples import read_first_samples
from ..refusals import raise_together
from . import options
from .batches import JoinedSamples
from .report import sum_up
from .split_rows import attend_by_rows


@dataclass
class BFPDatasetProvider(BFPGPTDatasetConfig, DatasetProvider):
    """Packed pre-training data, with the fields of Megatron-Bridge's ``GPTDatasetConfig`` and a few more.

    Blends, splits, caches, seeds and loaders are set as there. Nothing is checked or opened before Megatron-Bridge
    validates the recipe, so fields may be set later, also from the command line.

    Raises:
        OptionError: when the recipe is validated, something in it does not work with packed samples.
    """

    sequence_length: int = field(init=False, default=0)
    """megatron-core's name of ``seq_length``."""

    seq_length: int = field(kw_only=True)
    """Tokens of a sample."""

    dataloader_type: Any = field(default=None, kw_only=True)
    """None or ``single``: samples in the order of the dataset."""

    data_path: str | list[str] | None = None
    """Prefixes of the data, with weights before them or without; an alternative to ``blend``."""

    balance_batches: int = 1
    """1: order the samples of each global batch so that ranks need not wait for each other. 0: do not. More: compose so
    many global batches together; which samples share a batch then depends on their work."""

    skip_getting_attention_mask_from_dataset: ClassVar[bool] = False
    """If it is False, Megatron-Bridge lets middle pipeline stages read batches, too, which have the boundaries."""

    enable_in_batch_packing: bool = field(init=False, default=False)
    """Whether pipeline stages exchange shapes, which they must if several rows are joined."""

    _run: Namespace | None = field(init=False, default=None, repr=False)
    """What the order of samples depends on in this run, as ``integrations.balance`` takes it."""

    _splits_rows: bool = field(init=False, default=False, repr=False)
    """Whether the model is prepared for rows that are split over ranks."""

    _is_checked: bool = field(init=False, default=False, repr=False)
    """Whether boundaries were checked in a training step of this run."""

    @classmethod
    def of(
        cls,
        dataset: Any,
        *,
        max_documents_per_sequence: int | None = None,
        even_sequences: bool = False,
        targets_only: bool = False,
        fim_rate: float | None = None,
        fim_spm_rate: float = 0.5,
        fim_extra_tokens: dict[str, int] | None = None,
        balance_batches: int = 1,
    ) -> "BFPDatasetProvider":
        """The packed counterpart of a recipe's dataset.

        Args:
            dataset: Megatron-Bridge's ``GPTDatasetConfig``.
            max_documents_per_sequence: at most so many documents in a sequence; None for no limit.
            even_sequences: give every sequence about as many documents as the others.
            targets_only: leave the last token of each document out of the inputs, as nothing is learned from it.
            fim_rate: the share of documents that are rearranged for fill-in-the-middle; None for none.
            fim_spm_rate: the share of them that are shown as suffix, prefix and middle.
            fim_extra_tokens: ids of the sentinels, prefix, middle and suffix; needed with ``fim_rate``.
            balance_batches: as the field.

        Raises:
            OptionError: the dataset is of another kind.
        """
        options.check_kind(dataset)
        known = {of.name for of in fields(cls) if of.init}
        values: dict[str, Any] = {
            of.name: getattr(dataset, of.name, None) for of in fields(dataset) if of.name in known
        }
        values |= {
            "create_attention_mask": False,  # attention takes its boundaries from the batch
            "max_documents_per_sequence": max_documents_per_sequence,
            "even_sequences": even_sequences,
            "targets_only": targets_only,
            "fim_rate": fim_rate,
            "fim_spm_rate": fim_spm_rate,
            "fim_extra_tokens": fim_extra_tokens,
            "balance_batches": balance_batches,
        }
        return cls(**values)

    def __post_init__(self) -> None:
        """Nothing: fields may still be set. ``finalize`` does what megatron-core would do here."""

    def finalize(self) -> None:
        """Check all fields and derive some. Megatron-Bridge calls it while it validates the recipe.

        Raises:
            OptionError: a field has a value that is not supported.
        """
        self.sequence_length = self.seq_length
        self.dataloader_type = self.dataloader_type or "single"
        if self.data_path is not None and not self.blend:
            paths = self.data_path.split() if isinstance(self.data_path, str) else list(self.data_path)
            self.blend: Any = get_blend_from_list(paths)
        options.check_dataset(self)
        DataloaderConfig.finalize(self)

    def fit(self, cfg: Any) -> None:
        """Check the recipe, and take from it what batches depend on.

        Args:
            cfg: Megatron-Bridge's ``ConfigContainer`` with this dataset, before it is validated.

        Raises:
            OptionError: a setting does not work with packed samples.
        """
        options.check_run(cfg)
        check_balance_batches(Namespace(balance_batches=self.balance_batches, **vars(cfg.train)))
        if options.context_ranks(cfg) > 1 and not self._splits_rows:
            _register_pre_wrap_hook(cfg.model, attend_by_rows)
            self._splits_rows = True
        self.enable_in_batch_packing = cfg.train.micro_batch_size > 1
        model = getattr(cfg.model, "transformer", cfg.model)
        if self.enable_in_batch_packing and not getattr(model, "num_moe_experts", None):
            # megatron-core checks it even without experts: the default does not go with an exchange of shapes
            model.moe_token_dispatcher_type = "alltoall"

    def counts_by_rows(self, model: Any) -> bool:
        """Whether targets must be counted in whole rows: rows are split, and the loss of each is divided by its own.

        Args:
            model: Megatron-Bridge's configuration of it.
        """
        return self._splits_rows and not getattr(model, "calculate_per_token_loss", False)

    def begin(self, cfg: Any, train_state: Any, data_parallel_size: int, before: dict[str, Any]) -> None:
        """Take what is known when training is about to begin.

        Args:
            cfg: as ``fit``'s, validated.
            train_state: Megatron-Bridge's, with the samples consumed so far.
            data_parallel_size: ranks among which the samples of a global batch are divided.
            before: the recipe in the checkpoint that was loaded; empty without one.

        Raises:
            OptionError: the batches of before cannot be continued with these settings.
        """
        self._is_checked = False
        self.data_parallel_size = data_parallel_size
        self.model_vocab_size = rows_of_embedding(cfg.model)
        self._run = Namespace(
            data_impl="bfp",
            balance_batches=0 if cfg.validation.skip_train else self.balance_batches,
            global_batch_size=cfg.train.global_batch_size,
            micro_batch_size=cfg.train.micro_batch_size,
            data_parallel_size=data_parallel_size,
            consumed_train_samples=train_state.consumed_train_samples,
            consumed_valid_samples=train_state.consumed_valid_samples,
            is_per_token=getattr(cfg.model, "calculate_per_token_loss", False),
        )
        if before and train_state.consumed_train_samples:
            options.check_continuation(before, self._run)

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, Any, Any]:
        """Open the splits, or build the indexes that are missing, on all ranks; rank 0 prints a line on each.

        Returns:
            The train, valid and test split; None for one without samples.

        Raises:
            OptionError: the training split has no tokens, or was not asked for by Megatron-Bridge's own loaders.
            BFPError: the data or its index cannot be used; or the first samples. The same on all ranks.
        """
        run = self._run
        if run is None:
            raise OptionError("BFPDatasetProvider must be used by Megatron-Bridge's own loaders, in pretrain()")
        sizes = [whole_blocks(run, context.train_samples), context.valid_samples, context.test_samples]
        config = self._packed_config(context.tokenizer)
        splits = BlendedMegatronDatasetBuilder(BFPGPTDataset, sizes, lambda: True, config).build()
        error = None
        try:
            splits = [None if split is None or not len(split) else split for split in splits]
            if splits[0] is None and context.train_samples:
                raise OptionError("the train split has no tokens; change dataset.split or the data paths")
            splits[0] = balanced(splits[0], run, num_microbatches_calculator)
            for split, first in zip(splits, (run.consumed_train_samples, run.consumed_valid_samples, 0), strict=True):
                read_first_samples(split, first)
        except BFPError as own_error:
            error = own_error
        raise_together(error)
        sum_up(splits, run)
        train, valid, test = (split and JoinedSamples(split) for split in splits)
        return train, valid, test

    def _packed_config(self, tokenizer: Any) -> BFPGPTDatasetConfig:
        """megatron-core's part of the fields."""
        names = {of.name for of in fields(BFPGPTDatasetConfig) if of.init}
        values = {name: getattr(self, name) for name in names - {"sequences_per_dataset"}}
        return BFPGPTDatasetConfig(**values | {"tokenizer": tokenizer or self.tokenizer, "context_parallel_size": 1})


def rows_of_embedding(model: Any) -> int | None:
    """The rows of a model's embedding, on all tensor-parallel ranks together; None if they are not known yet.

    Args:
        model: Megatron-Bridge's configuration of it.
    """
    size = getattr(model, "vocab_size", None)
    if size is None or not getattr(model, "should_pad_vocab", False):
        return size
    multiple = getattr(model, "make_vocab_size_divisible_by", 128) * model.tensor_model_parallel_size
    return -(-size // multiple) * multiple
