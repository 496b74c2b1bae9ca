"""``--data-impl bfp`` in Megatron-DeepSpeed.

What is changed, in the order of a run: its options; the functions that make datasets; what a batch receives and the
masks made of it; rotary positions; attention and the layers on the way to it; the loss of a micro-batch without
targets. Its blends, samplers, parallelism and training loop stay as they are.
"""

import argparse
import inspect
import json
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from ...arguments import checked_seq_length
from ...errors import BFPError, OptionError, UnsupportedMegatronError
from ...samples.blends import check_weights
from ..first_samples import read_first_samples
from ..hooks import Hook, check_hooks, replace
from ..summary import is_news, summary

_OF_ANOTHER_KIND = "it is for samples of another kind; leave it out"

REFUSED = {
    "use_flash_attn_triton": ("--use-flash-attn-triton", "its kernel takes no boundaries; use --use-flash-attn-v2"),
    "use_flash_attn_builder": ("--use-flash-attn-builder", "its kernel takes no boundaries; use --use-flash-attn-v2"),
    "ds_sequence_parallel_fpdt": (
        "--ds-sequence-parallel-fpdt",
        "its attention takes no boundaries; use --ds-sequence-parallel-size alone, with --use-flash-attn-v2",
    ),
    "retro_add_retriever": ("--retro-add-retriever", "its neighbours are of other samples"),
    "retro_workdir": ("--retro-workdir", "its neighbours are of other samples"),
    "data_efficiency_curriculum_learning": (
        "--data-efficiency-curriculum-learning",
        "it shortens and reorders samples after they were packed",
    ),
    "random_ltd": ("--random-ltd", "it drops tokens between attention layers, and boundaries would no longer fit"),
    "train_data_exact_num_epochs": ("--train-data-exact-num-epochs", _OF_ANOTHER_KIND),
    "train_idx_path": ("--train-idx-path", _OF_ANOTHER_KIND),
    "train_desc_path": ("--train-desc-path", _OF_ANOTHER_KIND),
    "train_doc_idx_path": ("--train-doc-idx-path", _OF_ANOTHER_KIND),
    "train_sample_idx_path": ("--train-sample-idx-path", _OF_ANOTHER_KIND),
    "train_shuffle_idx_path": ("--train-shuffle-idx-path", _OF_ANOTHER_KIND),
    "return_data_index": ("--return-data-index", _OF_ANOTHER_KIND),
    "use_dataset_only": ("--use-dataset-only", "the model that takes the samples would not get their boundaries"),
    "mos": ("--mos", "the teacher's loss counts positions without a target"),
    "kd": ("--kd", "the teacher's loss counts positions without a target"),
    "enable_zbh1_pipeline": ("--enable-zbh1-pipeline", "its schedule was not tried with packed samples; leave it out"),
}
"""Attribute of the parsed options -> the option and why it cannot be used with packed samples."""


def _add_options(add_data_args: Callable) -> Callable:
    def add_data_args_and_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_data_args(parser)
        data_impl = next((action for action in parser._actions if "--data-impl" in action.option_strings), None)
        if data_impl is None:
            raise UnsupportedMegatronError("this Megatron-DeepSpeed has no --data-impl")
        data_impl.choices = [*(data_impl.choices or []), "bfp"]
        parser.add_argument_group(title="best-fit packing").add_argument(
            "--max-documents-per-sequence", type=int, help="with --data-impl bfp: a limit on a sequence's documents"
        )
        return parser

    return add_data_args_and_ours


def _check_options(validate_args: Callable) -> Callable:
    def validate_and_check_args(args: argparse.Namespace, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006
        args = validate_args(args, defaults)
        check(args)
        check_data_paths(args, most_corpora())
        check_hooks(HOOKS)
        return args

    return validate_and_check_args


def check(args: argparse.Namespace) -> None:
    """Refuse what packed samples cannot be trained with.

    Args:
        args: Megatron-DeepSpeed's options, validated.

    Raises:
        OptionError: an option cannot be honoured.
    """
    if getattr(args, "seq_length", None) is not None:
        checked_seq_length("--seq-length", args.seq_length)
    for attribute, (option, reason) in REFUSED.items():
        if getattr(args, attribute, None):
            raise OptionError(f"{option} cannot be used with --data-impl bfp: {reason}")
    if args.dataloader_type != "single":
        raise OptionError(
            f"--dataloader-type {args.dataloader_type} cannot be used with --data-impl bfp: the order of samples would "
            "depend on the data-parallel size; leave it out, packed samples are shuffled anyway"
        )
    if args.transformer_impl != "local":
        raise OptionError(
            f"--transformer-impl {args.transformer_impl} cannot be used with --data-impl bfp: its layers take no "
            "boundaries; use --transformer-impl local, with --use-flash-attn-v2"
        )
    if args.masked_softmax_fusion and (args.fp16 or args.bf16) and not args.use_flash_attn:
        raise OptionError(
            "--data-impl bfp needs --use-flash-attn-v2, or --no-masked-softmax-fusion: the fused softmax ignores masks"
        )
    if (args.ds_sequence_parallel_size > 1 or args.force_ds_sequence_parallel) and not args.use_flash_attn:
        raise OptionError(
            "DeepSpeed's sequence parallelism needs --use-flash-attn-v2 with --data-impl bfp: without it, it passes no "
            "mask on to attention"
        )
    if _saves_rotary_table(args):
        raise OptionError(
            "--use-rotary-position-embeddings with --recompute-granularity full needs "
            "--deepspeed-activation-checkpointing: Megatron-DeepSpeed's own recomputation cannot save its table"
        )
    if _has_curriculum(args):
        raise OptionError(
            f"{args.deepspeed_config}: curriculum_learning cannot be used with --data-impl bfp: it cuts samples after "
            "they were packed"
        )


def _saves_rotary_table(args: argparse.Namespace) -> bool:
    """Whether rotary positions would go through Megatron-DeepSpeed's own recomputation, which saves tensors alone."""
    return (
        getattr(args, "use_rotary_position_embeddings", False)
        and getattr(args, "recompute_granularity", None) == "full"
        and getattr(args, "no_pipeline_parallel", False)
        and not getattr(args, "deepspeed_activation_checkpointing", False)
    )


def most_corpora() -> int | None:
    """How many corpora this Megatron-DeepSpeed blends, as its own code says: by an assertion, or by the dtype of their
    numbers. None where it says neither."""
    from megatron.data.blendable_dataset import BlendableDataset

    source = inspect.getsource(BlendableDataset)
    asserted = re.search(r"assert num_datasets < (\d+)", source)
    if asserted:
        return int(asserted[1]) - 1
    dtype = re.search(r"dataset_index = np\.zeros\(self\.size, dtype=np\.(u?int\d+)\)", source)
    return int(np.iinfo(dtype[1]).max) if dtype else None


def check_data_paths(args: argparse.Namespace, most: int | None) -> None:
    """Refuse blends that Megatron-DeepSpeed would end with an assertion, after it has made the model.

    Args:
        args: Megatron-DeepSpeed's options.
        most: corpora in a blend; None for no limit.

    Raises:
        OptionError: a blend has too many corpora, a weight that is not above 0, or no weight for one of them.
    """
    for attribute in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        option, values = f"--{attribute.replace('_', '-')}", getattr(args, attribute, None) or []
        if len(values) < 2:
            continue
        try:
            weights = list(map(float, values[::2]))
        except ValueError:
            weights = []
        if len(values) % 2 or not weights:
            raise OptionError(f"{option} {' '.join(values[:4])} ...: give one prefix, or a weight before each prefix")
        if most is not None and len(weights) > most:
            raise OptionError(
                f"{option}: a blend of {len(weights):,} corpora, Megatron-DeepSpeed blends {most:,} at the most; join "
                "some of them with megatron-bfp-preprocess --merge"
            )
        check_weights(values[1::2], weights)


def _has_curriculum(args: argparse.Namespace) -> bool:
    """Whether DeepSpeed's configuration, which Megatron-DeepSpeed reads later, switches on its first curriculum."""
    if not args.deepspeed or not isinstance(args.deepspeed_config, str):
        return False
    try:
        with open(args.deepspeed_config, encoding="utf-8") as file:
            settings = json.load(file)
        return bool(settings.get("curriculum_learning", {}).get("enabled"))
    except (OSError, ValueError, AttributeError):
        return False  # Megatron-DeepSpeed says what is wrong with it


def _options() -> argparse.Namespace:
    from megatron import get_args

    return get_args()


def _build_packed_splits(_: Callable) -> Callable:
    def build_packed_splits(
        data_prefix: str,
        data_impl: str,
        splits_string: str,
        train_valid_test_num_samples: list[int],
        seq_length: int,
        seed: int,
        skip_warmup: bool,
        return_doc_ids: bool = False,
        *,
        data_cache_path: str | None = None,
    ) -> tuple:
        from .dataset import build_splits

        args = _options()
        return build_splits(
            data_prefix,
            splits_string,
            train_valid_test_num_samples,
            seq_length,
            seed,
            args.max_documents_per_sequence,
            data_cache_path,
            is_in_blend=len(args.data_path) > 1,
            vocab_size=args.padded_vocab_size,
        )

    return build_packed_splits


def _build_packed_split(_: Callable) -> Callable:
    def build_packed_split(
        dataset_name: str,
        data_prefix: str,
        data_impl: str,
        splits_string: str,
        num_samples: int,
        seq_length: int,
        seed: int,
        skip_warmup: bool,
        *,
        data_cache_path: str | None = None,
    ) -> Any:
        from ...indexed_dataset.reader import IndexedDataset
        from ...progress import log_progress
        from ...sequence_index.split import PackedSplit
        from .dataset import build_dataset, logger

        dataset = IndexedDataset(data_prefix)
        args = _options()
        cap = args.max_documents_per_sequence  # the dataset is a split by itself: all of its documents
        common: dict[str, Any] = {"cache_path": data_cache_path, "progress": log_progress(logger)}
        packed_split = PackedSplit.open(dataset, seq_length, None, max_documents_per_sequence=cap, **common)
        packed = build_dataset(packed_split, num_samples, seed, args.padded_vocab_size)
        if packed is None:
            raise OptionError(f"{data_prefix}: has no tokens; take it out of --{dataset_name}-data-path")
        return packed

    return build_packed_split


def _say_what_is_active(build: Callable) -> Callable:
    def build_and_say(*arguments: Any, **keywords: Any) -> tuple:
        from megatron import print_rank_0

        datasets, args = build(*arguments, **keywords), _options()
        consumed = (getattr(args, "consumed_train_samples", 0), getattr(args, "consumed_valid_samples", 0), 0)
        try:
            for dataset, first in zip(datasets, consumed, strict=True):
                read_first_samples(dataset, first)
        except BFPError as error:
            error.on_every_rank = True  # all that build datasets read the same samples, rank 0 among them
            raise
        if is_news([part for dataset in datasets if dataset is not None for part in _parts(dataset)]):
            for line in description(datasets):
                print_rank_0(line)
        return datasets

    return build_and_say


def description(datasets: tuple) -> list[str]:
    """A line for each split with its indexes, sequences and padding."""
    lines = []
    for name, dataset in zip(("train", "valid", "test"), datasets, strict=True):
        if dataset is not None:
            lines.append(f"best-fit packing: {name}: {summary(_parts(dataset))}")
    return lines


def _parts(dataset: Any) -> list[Any]:
    """The packed datasets of a split."""
    return getattr(dataset, "datasets", [dataset])


def _change_arguments(module: ModuleType) -> None:
    if not hasattr(module, "_add_zero_args"):
        raise UnsupportedMegatronError(
            "this Megatron-LM is too old for --data-impl bfp: it needs --dataloader-inter-document-masking, which came "
            "with megatron-core 0.19"
        )
    replace(module, "_add_data_args", "parser", _add_options)
    replace(module, "validate_args", "args, defaults", _check_options)


def _change_batches(module: ModuleType) -> None:
    if not hasattr(getattr(module, "data", None), "get_sequence_parallel_src_rank"):
        return  # Megatron-LM's module of this name; its batches carry boundaries
    from .model import broadcast_with_boundaries

    replace(module, "broadcast_data", "keys, data, datatype", broadcast_with_boundaries)


def _change_masks(module: ModuleType) -> None:
    from .model import masks_from_boundaries

    parameters = "data, eod_token, reset_position_ids, reset_attention_mask, eod_mask_loss, skip_mask"
    replace(module, "get_ltor_masks_and_position_ids", parameters, masks_from_boundaries)
    replace(module, "update_rotary_pos_emb", "seq_length", _keep_rotary_table)


def _keep_rotary_table(_: Callable) -> Callable:
    """What a pipeline's layers rotate by. Megatron-DeepSpeed's own function takes the pair for a tensor, and stops."""

    def update_rotary_pos_emb(seq_length: int) -> None:
        from megatron.model.rotary_pos_embedding import RotaryEmbedding

        args = _options()
        head_size = args.hidden_size // args.num_attention_heads if args.kv_channels is None else args.kv_channels
        cosines, sines = RotaryEmbedding(int(head_size * args.rotary_percent), theta=args.rope_theta)(seq_length)
        args.rotary_pos_emb = cosines.to(args.params_dtype), sines.to(args.params_dtype)

    return update_rotary_pos_emb


def _change_rotation(module: ModuleType) -> None:
    from .model import rotate_by_table

    replace(module, "apply_rotary_pos_emb", "t, freqs", rotate_by_table)


def _change_datasets(module: ModuleType) -> None:
    of_splits = (
        "data_prefix, data_impl, splits_string, train_valid_test_num_samples, seq_length, seed, skip_warmup, "
        "return_doc_ids, data_cache_path"
    )
    replace(module, "_build_train_valid_test_datasets", of_splits, _build_packed_splits)
    of_one = (
        "dataset_name, data_prefix, data_impl, splits_string, num_samples, seq_length, seed, skip_warmup, "
        "data_cache_path"
    )
    replace(module, "_build_dataset", of_one, _build_packed_split)
    of_all = (
        "data_prefix, data_impl, splits_string, train_valid_test_num_samples, seq_length, seed, skip_warmup, "
        "train_data_prefix, valid_data_prefix, test_data_prefix, return_doc_ids, data_cache_path"
    )
    replace(module, "build_train_valid_test_datasets", of_all, _say_what_is_active)


def _change_layers(module: ModuleType) -> None:
    from . import model

    of_attention = "self, hidden_states, attention_mask, encoder_output, inference_params, rotary_pos_emb"
    replace(module.ParallelAttention, "forward", of_attention, model.attend_inside_documents)
    replace(module.FlashSelfAttention, "forward", "self, q, k, v", model.attend_with_varlen_kernel)
    pass_on = model.pass_on_until_the_last_layer(lambda: _options().num_layers)
    replace(module.ParallelTransformerLayerPipe, "forward", "self, inputs, kwargs", pass_on)


def _change_embedding(module: ModuleType) -> None:
    from .model import embed_and_pass_on

    replace(module.EmbeddingPipe, "forward", "self, inputs, kwargs", embed_and_pass_on)


def _change_loss(module: ModuleType) -> None:
    from . import model

    of_model = (
        "self, input_ids, position_ids, attention_mask, retriever_input_ids, retriever_position_ids, "
        "retriever_attn_mask, labels, tokentype_ids, inference_params, curriculum_seqlen"
    )
    replace(module.GPTModel, "forward", of_model, model.no_loss_without_targets)
    replace(module, "CrossEntropy", "output, labels", model.no_pipeline_loss_without_targets)


def _change_training(module: ModuleType) -> None:
    if hasattr(module, "__path__"):
        return  # Megatron-LM's package of this name
    from .first_step import watch_first_step

    parameters = "forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config"
    replace(module, "train_step", parameters, watch_first_step)


HOOKS: dict[str, Hook] = {
    "megatron.arguments": _change_arguments,
    "megatron.core.tensor_parallel": _change_batches,
    "megatron.utils": _change_masks,
    "megatron.data.gpt_dataset": _change_datasets,
    "megatron.model.rotary_pos_embedding": _change_rotation,
    "megatron.model.transformer": _change_layers,
    "megatron.model.language_model": _change_embedding,
    "megatron.model.gpt_model": _change_loss,
    "megatron.training": _change_training,
}
