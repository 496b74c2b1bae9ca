"""A run's command line, read as its trainer reads it: for the plan, the memory estimate and preflight.

The launchers pass the same words that the trainer gets, including those after the recipe. The example trainer's are
parsed by its own parser, ``trainer.arguments``. Megatron-LM and Megatron-DeepSpeed have hundreds of options and are not
imported: a parser picks those that matter here, with Megatron's names, types and defaults.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from trainer.arguments import blend, parse_arguments
from trainer.config import TrainerConfig, flag, key_value_heads, not_negative

from megatron_bfp.arguments import checked_cap, checked_count
from megatron_bfp.commands.shared import SEED, Parser
from megatron_bfp.errors import InputError, OptionError
from megatron_bfp.sequence_index.key import SPLIT_NAMES, split_fractions

TOKENIZER_TYPES = {"GPTSentencePieceTokenizer": "SentencePieceTokenizer", "HFTokenizer": "HuggingFaceTokenizer"}
"""Megatron-DeepSpeed's names of tokenizers, and the names they have elsewhere."""
REPLACED = ("train_data_path", "valid_data_path", "test_data_path", "data_args_path", "per_split_data_args_path")
REPLACED += ("train_samples", "yaml_cfg", "encoder_seq_length", "batch_size", "model_parallel_size")
"""Options of Megatron that replace one that the launchers give: with both, Megatron stops or ignores one of them."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run trains, on which data, and how its batches are divided."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Heads of keys and of values."""
    has_experts: bool
    vocab_multiple: int
    """The embedding's rows are padded to a multiple of this and of the tensor-parallel ranks."""
    seq_length: int
    micro_batch_size: int
    global_batch_size: int | None
    """None: one micro-batch per data-parallel rank."""
    batch_size_grows: bool
    """From a smaller one (``--rampup-batch-size``)."""
    train_iters: int
    lr_warmup_iters: int
    tensor_parallel: int
    context_parallel: int
    """Ranks that share each sequence."""
    gathers_keys: bool
    """These ranks gather keys and values, even if they could exchange heads."""
    pipeline_parallel: int
    """Ranks that have other layers of the same model."""
    zero_stage: int
    half_precision: bool
    full_recomputation: bool
    data_impl: str
    """bfp or mmap."""
    data_path: tuple[str, ...]
    split: str
    used_splits: tuple[str, ...]
    """The splits that samples are drawn from, of train, valid and test."""
    max_documents_per_sequence: int | None
    even_sequences: bool
    targets_only: bool
    fim_rate: float | None
    """The share of documents that are rearranged for fill-in-the-middle; None for none."""
    seed: int
    balance_batches: int
    """Global batches whose samples are balanced together; 0: none."""
    data_cache_path: str | None
    tokenizer_type: str | None
    """A name of ``megatron_bfp.tokenizers``, or another one of Megatron's."""
    tokenizer_model: str | None
    eod_token: str | None
    needs_eod: bool
    """Whether the trainer needs a tokenizer with an EOD."""
    save: str | None


def run_options(trainer: str, words: Sequence[str]) -> RunOptions:
    """Read the options that a trainer gets.

    Args:
        trainer: pretrain_gpt, megatron_lm or megatron_deepspeed.
        words: its command line after the script.

    Raises:
        OptionError: the trainer is unknown, or would refuse the options.
        InputError: ``--deepspeed_config`` of the example trainer cannot be read.
    """
    if trainer not in READERS:
        raise OptionError(f"TRAINER={trainer}: give one of {', '.join(READERS)}")
    options = READERS[trainer](words)
    split_fractions(options.split)
    blend(options.data_path)
    return options


def trainer_and_words(words: list[str]) -> tuple[str, list[str]]:
    """The name of a trainer and its options, as ``--trainer`` gives them.

    Raises:
        OptionError: there is no name.
    """
    if not words:
        raise OptionError("--trainer: give the trainer's name, then its options")
    return words[0], words[1:]


def _of_the_example(words: Sequence[str]) -> RunOptions:
    config = parse_arguments(words)
    return _combined(
        config,
        num_query_groups=key_value_heads(config),
        has_experts=False,
        batch_size_grows=False,
        pipeline_parallel=1,
        gathers_keys=config.cp_comm_type == "all_gather",
        zero_stage=_zero_stage(config),
        half_precision=config.bf16,
        used_splits=SPLIT_NAMES[:2] if config.eval_interval else SPLIT_NAMES[:1],
        needs_eod=True,
    )


def _combined(options: TrainerConfig | argparse.Namespace, **others: Any) -> RunOptions:
    """The fields that have an option's name, those that have another name here, and those given."""
    values = {field.name: getattr(options, field.name) for field in fields(RunOptions) if hasattr(options, field.name)}
    values["vocab_multiple"] = options.make_vocab_size_divisible_by
    values["tensor_parallel"] = options.tensor_model_parallel_size
    values["context_parallel"] = options.context_parallel_size
    values["full_recomputation"] = options.recompute_granularity == "full"
    values["data_path"] = tuple(options.data_path)
    return RunOptions(**values | others)


def _zero_stage(config: TrainerConfig) -> int:
    """``--zero-stage``, or that of ``--deepspeed_config``, or 0.

    Raises:
        InputError: the file cannot be read.
    """
    if config.zero_stage is not None or config.deepspeed_config is None:
        return config.zero_stage or 0
    try:
        with open(config.deepspeed_config, encoding="utf-8") as file:
            return int(json.load(file).get("zero_optimization", {}).get("stage", 0))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InputError(f"--deepspeed_config {config.deepspeed_config}: {error}") from None


def _of_megatron_lm(words: Sequence[str]) -> RunOptions:
    return _of_megatron(_megatron_options(words), all_splits_are_opened=False)


def _of_megatron_deepspeed(words: Sequence[str]) -> RunOptions:
    options = _megatron_options(words)
    options.split = options.split.replace("/", ",")
    return _of_megatron(options, all_splits_are_opened=True)


def _of_megatron(options: argparse.Namespace, all_splits_are_opened: bool) -> RunOptions:
    grouped = options.num_key_value_heads or (options.num_query_groups if options.group_query_attention else None)
    return _combined(
        options,
        ffn_hidden_size=options.ffn_hidden_size or 4 * options.hidden_size,
        num_query_groups=grouped or options.num_attention_heads,
        has_experts=max(options.num_experts or [0]) > 1,
        batch_size_grows=options.rampup_batch_size is not None,
        context_parallel=options.context_parallel_size * options.ds_sequence_parallel_size,
        gathers_keys="all_gather" in (options.cp_comm_type or ()),
        pipeline_parallel=options.pipeline_model_parallel_size,
        zero_stage=options.zero_stage or int(options.use_distributed_optimizer),
        half_precision=options.bf16 or options.fp16,
        data_impl=options.data_impl[-1] if options.data_impl else "mmap",
        used_splits=SPLIT_NAMES if all_splits_are_opened or options.eval_iters > 0 else SPLIT_NAMES[:1],
        tokenizer_type=TOKENIZER_TYPES.get(options.tokenizer_type, options.tokenizer_type),
        eod_token=None,
        needs_eod=False,
    )


def _megatron_options(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="megatron", allow_abbrev=False)
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "train-iters"):
        parser.add_argument(f"--{name}", type=int, required=True)
    optional = {"ffn-hidden-size": None, "num-query-groups": 1, "num-key-value-heads": None}
    optional |= {"make-vocab-size-divisible-by": 128, "global-batch-size": None, "lr-warmup-iters": 0}
    optional |= {"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "context-parallel-size": 1}
    optional |= {"ds-sequence-parallel-size": 1, "zero-stage": 0, "eval-iters": 100}
    optional |= {"max-documents-per-sequence": None, "balance-batches": 1}
    for name, default in optional.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("group-query-attention", "bf16", "fp16", "use-distributed-optimizer"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("even-sequences", "targets-only"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("data-cache-path", "tokenizer-type", "tokenizer-model", "save", "recompute-granularity"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--split", default="969,30,1")
    parser.add_argument("--fim-rate", type=float)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--data-impl", choices=("bfp", "mmap"), action="append")
    parser.add_argument("--data-path", nargs="+", required=True)
    parser.add_argument("--rampup-batch-size", nargs="*")
    parser.add_argument("--num-experts", type=int, nargs="+")
    parser.add_argument("--cp-comm-type", nargs="+")
    for name in REPLACED:
        parser.add_argument(flag(name), nargs="*")
    options, _ = parser.parse_known_args(words)
    _check_megatron(options)
    return options


def _check_megatron(options: argparse.Namespace) -> None:
    for name in REPLACED:
        if getattr(options, name) is not None:
            raise OptionError(
                f"{flag(name)} cannot be used with the launchers, which give the option that it stands for; give that "
                "one after the recipe"
            )
    if len(set(options.data_impl or ())) > 1:
        values = " and ".join(options.data_impl)
        raise OptionError(f"--data-impl is given as {values}; set data_impl in a recipe of your own instead")
    counts = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "train_iters")
    counts += ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    for name in (*counts, "ds_sequence_parallel_size"):
        checked_count(flag(name), getattr(options, name))
    if options.global_batch_size is not None:
        checked_count("--global-batch-size", options.global_batch_size)
    checked_cap(options.max_documents_per_sequence)
    not_negative("--balance-batches", options.balance_batches)


READERS = {
    "pretrain_gpt": _of_the_example,
    "megatron_lm": _of_megatron_lm,
    "megatron_deepspeed": _of_megatron_deepspeed,
}
