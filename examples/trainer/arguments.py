"""The trainer's command line: a parser made from the fields of the configuration, and the checks that need several.

Imports no torch: ``--help`` and wrong options are answered at once.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args, get_type_hints

from megatron_bfp.arguments import checked_cap, checked_seq_length
from megatron_bfp.commands.shared import Parser
from megatron_bfp.errors import OptionError
from megatron_bfp.samples.fill_in_the_middle import FimDocuments
from megatron_bfp.sequence_index.key import split_fractions

from .config import GROUPS, TrainerConfig, flag, flags_of, key_value_heads
from .config_file import config_text, read_config

NAME = "pretrain_gpt"
METAVARS = {int: "N", float: "X"}
NEED_SAVE = (
    "save_interval",
    "keep_last",
    "save_retain_interval",
    "exit_interval",
    "exit_duration_in_mins",
    "exit_signal_handler",
)
NEED_A_TRACKER = {
    "wandb_project": ("wandb_exp_name", "wandb_save_dir", "wandb_entity"),
    "mlflow_experiment": ("mlflow_run_name", "mlflow_tracking_uri"),
}


def parse_arguments(argv: Sequence[str] | None = None) -> TrainerConfig:
    """The configuration that a command line gives.

    Args:
        argv: the options, by default those of this process.

    With ``--print-config`` the configuration is printed, and the process ends.

    Raises:
        OptionError: an option is unknown, missing, or has a value that cannot be used.
        InputError: the file of ``--config`` cannot be read.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    of_file = Parser(prog=NAME, add_help=False, allow_abbrev=False)
    _add_file_options(of_file)
    given, _ = of_file.parse_known_args(words)
    if given.config:
        words = [*read_config(given.config), *words]
    parser = Parser(
        prog=NAME,
        description="Pre-train a GPT model (LLaMA architecture) on packed documents. Options have Megatron's names.",
        formatter_class=Help,
    )
    _add_file_options(parser.add_argument_group("all options in a file"))
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        types = get_type_hints(options)
        for field in dataclasses.fields(options):
            group.add_argument(*flags_of(field), **_settings(field, types[field.name]))
    values = vars(parser.parse_args(words))
    del values["config"], values["print_config"]
    config = TrainerConfig(**values | {"data_path": tuple(values["data_path"])})
    _check(config)
    if given.print_config:
        sys.stdout.write(config_text(config))
        sys.exit(0)
    return config


def _add_file_options(parser: Any) -> None:
    """Declare the options that are no part of a configuration."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file of options, with underscores in their names; those of the command line win (default: none)",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print such a file with all options of this run, and exit"
    )


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help that ends each text with "(required)" or the default, unless the text names the default itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.required:
            return f"{action.help} (required)"
        if isinstance(action, argparse._StoreTrueAction) and "default" not in (action.help or ""):
            return f"{action.help} (default: off)"
        if action.default is None or action.nargs == 0:
            return action.help
        return super()._get_help_string(action)


def _settings(field: dataclasses.Field, kind: Any) -> dict[str, Any]:
    """What ``add_argument`` is told of a field.

    Args:
        kind: the field's type: bool, int, float, str, one of them or None, or a tuple of strings.
    """
    settings = {"help": field.metadata["help"], "dest": field.name}
    if kind is bool:
        return settings | {"action": "store_true"}
    if field.default is dataclasses.MISSING:
        settings["required"] = True
    else:
        settings["default"] = field.default
    if kind == tuple[str, ...]:
        return settings | {"nargs": "+", "metavar": field.metadata["metavar"]}
    value_type = next((part for part in get_args(kind) if part is not NoneType), kind)
    if field.metadata["choices"]:
        return settings | {"type": value_type, "choices": field.metadata["choices"]}
    return settings | {"type": value_type, "metavar": field.metadata["metavar"] or METAVARS[value_type]}


def _check(config: TrainerConfig) -> None:
    checked_seq_length("--seq-length", config.seq_length)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata["check"] and value is not None:
            field.metadata["check"](flag(field.name), value)
    checked_cap(config.max_documents_per_sequence)
    if config.fim_rate is not None:
        FimDocuments(config.fim_rate, config.seed)  # refuses impossible values
    split_fractions(config.split)
    blend(config.data_path)
    _check_shape(config)
    _check_checkpoints(config)
    for needed, names in NEED_A_TRACKER.items():
        for name in names:
            if getattr(config, name) and not getattr(config, needed):
                raise OptionError(f"{flag(name)} needs {flag(needed)}")
    if config.data_impl == "bfp" and config.dataloader_inter_document_masking:
        raise OptionError("--dataloader-inter-document-masking needs --data-impl mmap; bfp has it always")
    needs_bfp = {
        "--max-documents-per-sequence": config.max_documents_per_sequence,
        "--even-sequences": config.even_sequences,
        "--targets-only": config.targets_only,
        "--fim-rate": config.fim_rate is not None,
        "--balance-batches above 1": config.balance_batches > 1,
    }
    for name, is_given in needs_bfp.items():
        if config.data_impl == "mmap" and is_given:
            raise OptionError(f"{name} needs --data-impl bfp")


def _check_shape(config: TrainerConfig) -> None:
    if config.hidden_size % (2 * config.num_attention_heads):
        raise OptionError("--hidden-size must be a multiple of twice --num-attention-heads (RoPE turns pairs)")
    if config.group_query_attention and config.num_attention_heads % config.num_query_groups:
        raise OptionError("--num-attention-heads must be a multiple of --num-query-groups")
    if key_value_heads(config) % config.tensor_model_parallel_size:
        raise OptionError("--tensor-model-parallel-size must divide the attention heads and --num-query-groups")
    if config.context_parallel_size > 1 and config.seq_length % (2 * config.context_parallel_size):
        raise OptionError("--seq-length must be a multiple of twice --context-parallel-size")


def _check_checkpoints(config: TrainerConfig) -> None:
    for name in NEED_SAVE:
        if getattr(config, name) and not config.save:
            raise OptionError(f"{flag(name)} needs --save")
    if config.override_checkpoint_args and not config.load:
        raise OptionError("--override-checkpoint-args needs --load")
    if config.load and os.path.exists(config.load) and not os.path.isdir(config.load):
        raise OptionError(f"--load {config.load}: not a folder")


def blend(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Megatron's ``--data-path``: prefixes alone, or each after its weight.

    Returns:
        Prefixes, and weights or None.

    Raises:
        OptionError: it is neither.
    """
    if len(data_path) == 1 or _weight(data_path[0]) is None:
        return list(data_path), None
    weights = [weight for text in data_path[::2] if (weight := _weight(text)) and 0 < weight < float("inf")]
    if 2 * len(weights) != len(data_path):
        raise OptionError(f"--data-path {' '.join(data_path)}: give prefixes, or a weight above 0 before each prefix")
    return list(data_path[1::2]), weights


def _weight(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
