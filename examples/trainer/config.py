"""The trainer's configuration: each option is defined here once, with its type, default, bounds and help text.

Fields have the names of Megatron's options, and mean the same. ``arguments.parse_arguments`` makes the command line
from their definitions: ``num_layers`` is ``--num-layers``, a bool is a flag, and the text of a field documents it here
and in ``--help``.

Imports no torch: wrong options are reported before it is loaded, and preflight and the plan read the same definitions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

from megatron_bfp.arguments import checked_count
from megatron_bfp.errors import OptionError

ATTENTION_KERNELS = ("flash-attn-3", "flash-attn-4", "flash-attn", "torch-varlen", "transformer-engine", "sdpa")
"""The names in ``megatron_bfp.attention.kernels.KERNELS``, which needs torch; a test compares them."""


def option(
    help: str,
    default: Any = MISSING,
    *,
    metavar: str | None = None,
    choices: Sequence[Any] | None = None,
    check: Callable[[str, Any], object] | None = None,
    flags: Sequence[str] = (),
) -> Any:
    """A field of the configuration, which is also an option of the command line.

    Args:
        help: the help text. It names the default where that is not simply the value.
        default: left out if the option is required.
        metavar: what stands for the value in ``--help``; by default N for an int and X for a float.
        check: called with the option's flag and its value, unless that is None. Raises an OptionError.
        flags: the option's flags, if not the field's name with dashes.
    """
    metadata = {"help": help, "metavar": metavar, "choices": choices, "check": check, "flags": tuple(flags)}
    return field(default=default, metadata=metadata)


def not_negative(flag: str, value: float) -> None:
    """Check that a value is finite and at least 0.

    Raises:
        OptionError: it is not.
    """
    if not 0 <= value < math.inf:
        raise OptionError(f"{flag} must not be negative, got {value}")


def below_one(flag: str, value: float) -> None:
    """Check that a value is at least 0 and below 1.

    Raises:
        OptionError: it is not.
    """
    if not 0 <= value < 1:
        raise OptionError(f"{flag} must be at least 0 and below 1, got {value}")


def profiled_steps(text: str) -> tuple[int, int]:
    """The first and the last step that ``--profile-steps`` names.

    Raises:
        OptionError: it is not A:B.
    """
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise OptionError(f"--profile-steps {text}: give the first and the last step as A:B, such as 11:12")
    return int(parts[0]), int(parts[1])


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model: LLaMA's architecture."""

    num_layers: int = option("number of transformer layers", check=checked_count)
    hidden_size: int = option("transformer hidden size", check=checked_count)
    ffn_hidden_size: int = option(
        "hidden size of the feed-forward network (default: 8/3 of the hidden size, as LLaMA's)",
        None,
        check=checked_count,
    )
    num_attention_heads: int = option("number of attention heads", check=checked_count)
    group_query_attention: bool = option("use group-query attention", False)
    num_query_groups: int = option("number of query groups, with --group-query-attention", 1, check=checked_count)
    rotary_base: int = option("base of the rotary position embeddings", 10000, check=checked_count)
    norm_epsilon: float = option("epsilon of RMSNorm", 1e-5)
    init_method_std: float = option("standard deviation of the initial weights", 0.02, check=not_negative)
    make_vocab_size_divisible_by: int = option(
        "pad the vocabulary size of each tensor-parallel rank to a multiple of this", 128, check=checked_count
    )
    attention_kernel: str | None = option(
        "attention kernel (default: the fastest available)", None, choices=ATTENTION_KERNELS
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is trained on."""

    data_path: tuple[str, ...] = option(
        "paths of the datasets without .bin and .idx; to blend several, a weight before each",
        metavar="[WEIGHT] PREFIX",
    )
    data_impl: str = option("bfp: best-fit packing; mmap: concatenation", "bfp", choices=("bfp", "mmap"))
    dataloader_inter_document_masking: bool = option(
        "with --data-impl mmap: attention inside documents, as packed sequences have it", False
    )
    split: str = option("shares of the training, validation and test splits", "969,30,1", metavar="N,N,N")
    seq_length: int = option("tokens per sequence")
    eod_mask_loss: bool = option("mask the loss of end-of-document tokens", False)
    tokenizer_type: str = option("as in preprocessing", "HuggingFaceTokenizer", metavar="TYPE")
    tokenizer_model: str = option("as in preprocessing", metavar="FILE")
    eod_token: str | None = option("end-of-document token (default: the tokenizer's own)", None, metavar="TEXT")
    data_cache_path: str | None = option(
        "folder for indexes (default: beside the data, if that can be written)", None, metavar="FOLDER"
    )
    num_workers: int = option("dataloader processes per rank", 2, check=not_negative)
    num_dataset_builder_threads: int = option("threads that open the datasets", 1, check=checked_count)


@dataclass(frozen=True, kw_only=True)
class PackingOptions:
    """How documents are packed, with ``--data-impl bfp``."""

    max_documents_per_sequence: int | None = option("most documents in a sequence (default: no limit)", None)
    even_sequences: bool = option(
        "spread short documents over all sequences, so that none holds many times the mean", False
    )
    targets_only: bool = option(
        "leave the last token of each document out of the inputs, as nothing is learned from it", False
    )
    fim_rate: float | None = option(
        "share of the documents that are rearranged for fill-in-the-middle (default: none)", None
    )
    fim_spm_rate: float = option("share of them that are shown as suffix, prefix and middle", 0.5)
    fim_prefix_token: str = option("the token before a prefix", "<fim_prefix>", metavar="TEXT")
    fim_middle_token: str = option("the token before a middle", "<fim_middle>", metavar="TEXT")
    fim_suffix_token: str = option("the token before a suffix", "<fim_suffix>", metavar="TEXT")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How many samples a step has, and how long the run is."""

    micro_batch_size: int = option("sequences per rank and forward pass", check=checked_count)
    global_batch_size: int | None = option(
        "sequences per step (default: micro-batch size times data-parallel ranks)", None, check=checked_count
    )
    balance_batches: int = option(
        "with --data-impl bfp: order the samples of each global batch by their attention work, so that ranks wait less "
        "for each other. 0: the order without it; above 1: of so many global batches together, which changes what is "
        "in a batch",
        1,
        check=not_negative,
    )
    train_iters: int = option("number of steps of the whole run", check=checked_count)
    exit_interval: int | None = option(
        "save and exit after a step divisible by this (default: never)", None, check=checked_count
    )
    exit_duration_in_mins: int | None = option(
        "save and exit after this many minutes (default: never)", None, check=checked_count
    )
    exit_signal_handler: bool = option(
        "save and exit on SIGTERM; accepted for existing scripts (default: on with --save)", False
    )
    seed: int = option("seed of the weights and of the order of samples", 1234)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW and its learning rate."""

    lr: float = option("peak learning rate", 3e-4, check=not_negative)
    min_lr: float = option("learning rate at the end of the decay", 0.0, check=not_negative)
    lr_decay_style: str = option("decay of the learning rate", "cosine", choices=("cosine", "constant"))
    lr_decay_iters: int | None = option(
        "step at which --min-lr is reached (default: --train-iters)", None, check=checked_count
    )
    lr_warmup_iters: int = option("steps of linear warm-up of the learning rate", 0, check=not_negative)
    weight_decay: float = option("weight decay; norms and biases have none", 0.1, check=not_negative)
    adam_beta1: float = option("AdamW's coefficient for the running mean of gradients", 0.9, check=below_one)
    adam_beta2: float = option("AdamW's coefficient for the running mean of their squares", 0.95, check=below_one)
    adam_eps: float = option("AdamW's term for numerical stability", 1e-8)
    clip_grad: float = option("clip gradients to this global norm; 0: never", 1.0, check=not_negative)


@dataclass(frozen=True, kw_only=True)
class ParallelismOptions:
    """Precision, memory, and how the model is spread over ranks."""

    bf16: bool = option("train in bf16, with fp32 master weights (default: train in fp32)", False)
    recompute_granularity: str | None = option(
        "full: recompute each layer in the backward pass (default: keep all activations)", None, choices=("full",)
    )
    tensor_model_parallel_size: int = option("degree of tensor model parallelism", 1, check=checked_count)
    context_parallel_size: int = option(
        "degree of context parallelism: ranks that share each sequence", 1, check=checked_count
    )
    cp_comm_type: str | None = option(
        "how these ranks attend: a2a exchanges heads, all_gather gathers keys and values (default: a2a if the size "
        "divides the heads)",
        None,
        choices=("a2a", "all_gather"),
    )
    zero_stage: int | None = option(
        "DeepSpeed's ZeRO stage (default: that of --deepspeed_config, or 0)", None, choices=(0, 1, 2, 3)
    )
    deepspeed_config: str | None = option(
        "DeepSpeed's JSON file; batch sizes come from the options (default: made from the options)",
        None,
        metavar="FILE",
        flags=("--deepspeed_config",),
    )
    deepspeed: bool = option("accepted for existing scripts (default: always on)", False)
    distributed_backend: str | None = option(
        "backend of the process groups (default: nccl on GPUs, else gloo)", None, choices=("nccl", "gloo")
    )
    local_rank: int = option("set by the launcher", 0, flags=("--local_rank", "--local-rank"))


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Where checkpoints are saved and resumed from."""

    save: str | None = option(
        "folder to save checkpoints to, at the end and as below (default: none are saved)", None, metavar="FOLDER"
    )
    load: str | None = option(
        "folder to resume from: its latest complete checkpoint, if it has one (default: start from step 0)",
        None,
        metavar="FOLDER",
    )
    pretrained_checkpoint: str | None = option(
        "folder of a Hugging Face LLaMA model whose weights a run starts from, if --load has no checkpoint (default: "
        "random weights)",
        None,
        metavar="FOLDER",
    )
    save_interval: int | None = option(
        "steps between checkpoints (default: only at the end)", None, check=checked_count
    )
    keep_last: int | None = option(
        "after each save, remove all but this many complete checkpoints (default: keep all, or with "
        "--save-retain-interval 1)",
        None,
        check=checked_count,
    )
    save_retain_interval: int | None = option(
        "never remove checkpoints of steps divisible by this (default: none)",
        None,
        check=checked_count,
    )
    override_checkpoint_args: bool = option(
        "resume even if options of data or model differ from the checkpoint's; some samples may then be seen twice and "
        "others never (default: stop and name them)",
        False,
    )


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What is reported, how often, and when a loss stops the run."""

    log_interval: int = option("steps between lines of the log", 1, check=checked_count)
    json_log: str | None = option(
        "file that gets a JSON line for each step and evaluation reported (default: none)", None, metavar="FILE"
    )
    tensorboard_dir: str | None = option("folder for TensorBoard events (default: none)", None, metavar="FOLDER")
    eval_interval: int | None = option(
        "steps between evaluations on the validation split (default: never)", None, check=checked_count
    )
    eval_iters: int | None = option(
        "global batches per evaluation (default: the whole split)", None, check=checked_count
    )
    profile_steps: str | None = option(
        "profile rank 0 from step A to step B (default: none)",
        None,
        metavar="A:B",
        check=lambda _, steps: profiled_steps(steps),
    )
    profile_dir: str = option("folder for the trace of --profile-steps", "profile", metavar="FOLDER")
    loss_spike_factor: float = option(
        "stop at a loss above this times the mean of the losses before it; 0: never", 3.0, check=not_negative
    )


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """Experiment trackers, beside ``--tensorboard-dir``."""

    wandb_project: str | None = option(
        "log to this project of Weights & Biases; WANDB_MODE=offline needs no network (default: do not)",
        None,
        metavar="NAME",
    )
    wandb_exp_name: str | None = option(
        "name of the run there (default: that of --save's folder)", None, metavar="NAME"
    )
    wandb_save_dir: str | None = option("folder for its files (default: SAVE/wandb)", None, metavar="FOLDER")
    wandb_entity: str | None = option("team or user that owns the project (default: your own)", None, metavar="NAME")
    mlflow_experiment: str | None = option("log to this experiment of MLflow (default: do not)", None, metavar="NAME")
    mlflow_run_name: str | None = option(
        "name of the run there (default: that of --save's folder)", None, metavar="NAME"
    )
    mlflow_tracking_uri: str | None = option(
        "MLflow's server, or a folder (default: MLFLOW_TRACKING_URI, or SAVE/mlruns)", None, metavar="URI"
    )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(
    ModelOptions,
    DataOptions,
    PackingOptions,
    BatchOptions,
    OptimizerOptions,
    ParallelismOptions,
    CheckpointOptions,
    LogOptions,
    TrackerOptions,
):
    """All options of a run. ``ffn_hidden_size`` is LLaMA's if it is not given: 11008 for a hidden size of 4096.

    Two values depend on the launch: ``global_batch_size`` and ``zero_stage`` are None until ``training.main`` has
    completed them.
    """

    def __post_init__(self) -> None:
        if self.ffn_hidden_size is None:
            object.__setattr__(self, "ffn_hidden_size", -(-8 * self.hidden_size // (3 * 256)) * 256)


GROUPS = {
    "model": ModelOptions,
    "data": DataOptions,
    "packing, with --data-impl bfp": PackingOptions,
    "batches and length of the run": BatchOptions,
    "optimizer": OptimizerOptions,
    "precision, memory and parallelism": ParallelismOptions,
    "checkpoints": CheckpointOptions,
    "log and evaluation": LogOptions,
    "experiment trackers": TrackerOptions,
}
"""Titles of the groups in ``--help``, in its order."""


def flag(name: str) -> str:
    """The usual flag of a field: ``--num-layers`` for num_layers."""
    return f"--{name.replace('_', '-')}"


def flags_of(field: Field) -> Sequence[str]:
    """All flags of a field."""
    return field.metadata["flags"] or (flag(field.name),)


def key_value_heads(config: ModelOptions) -> int:
    """Heads of keys and of values: one for each query group, or for each attention head."""
    return config.num_query_groups if config.group_query_attention else config.num_attention_heads


def padded_vocab_size(config: TrainerConfig, vocab_size: int) -> int:
    """Rows of the model's embedding, over all tensor-parallel ranks.

    Args:
        vocab_size: of the tokenizer.
    """
    multiple = config.make_vocab_size_divisible_by * config.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple
