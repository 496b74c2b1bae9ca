"""Options of ``pretrain_gpt.py``, under Megatron's names, checked before anything is built."""

import argparse
import math
import os
from collections.abc import Sequence

from data_path import blend

from megatron_bfp.attention_kernels import KERNELS
from megatron_bfp.command_line import Parser
from megatron_bfp.errors import OptionError
from megatron_bfp.packing import checked_cap, checked_count
from megatron_bfp.splits import split_fractions


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options.

    Raises:
        OptionError: one has a value that cannot be honoured.
    """
    parser = Parser(prog="pretrain_gpt", description="Pre-train a GPT model (LLaMA architecture) on packed documents.")
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_data(parser.add_argument_group("data"))
    _add_checkpoints(parser.add_argument_group("checkpoints and log"))
    options = parser.parse_args(argv)
    _check(options)
    if options.ffn_hidden_size is None:
        options.ffn_hidden_size = -(-8 * options.hidden_size // (3 * 256)) * 256  # as LLaMA's: 11008 for 4096
    return options


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-layers", type=int, required=True)
    group.add_argument("--hidden-size", type=int, required=True)
    group.add_argument("--ffn-hidden-size", type=int, help="default: 8/3 of the hidden size, as LLaMA's")
    group.add_argument("--num-attention-heads", type=int, required=True)
    group.add_argument("--group-query-attention", action="store_true")
    group.add_argument("--num-query-groups", type=int, default=1, help="with --group-query-attention")
    group.add_argument("--rotary-base", type=int, default=10000)
    group.add_argument("--norm-epsilon", type=float, default=1e-5)
    group.add_argument("--init-method-std", type=float, default=0.02)
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    group.add_argument("--attention-kernel", choices=tuple(KERNELS), help="default: the best that can be used")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--micro-batch-size", type=int, required=True)
    group.add_argument("--global-batch-size", type=int, help="default: micro-batch size times data-parallel size")
    group.add_argument("--train-iters", type=int, required=True)
    group.add_argument("--exit-interval", type=int, help="save and stop at a multiple of this iteration")
    group.add_argument("--exit-duration-in-mins", type=int, help="save and stop after the step that ends so late")
    group.add_argument("--exit-signal-handler", action="store_true", help="for existing scripts; always on with --save")
    group.add_argument("--lr", type=float, default=3e-4)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument("--lr-decay-style", choices=("cosine", "constant"), default="cosine")
    group.add_argument("--lr-decay-iters", type=int, help="default: --train-iters")
    group.add_argument("--lr-warmup-iters", type=int, default=0)
    group.add_argument("--weight-decay", type=float, default=0.1)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.95)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    group.add_argument("--clip-grad", type=float, default=1.0, help="largest norm of the gradient; 0 for no limit")
    group.add_argument("--bf16", action="store_true")
    group.add_argument(
        "--recompute-granularity", choices=("full",), help="full: keep only each layer's input for the backward pass"
    )
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--tensor-model-parallel-size", type=int, default=1, help="ranks that share each tensor")
    group.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), help="default: that of --deepspeed_config, or 0")
    group.add_argument("--deepspeed_config", metavar="FILE", help="DeepSpeed's JSON; batch sizes follow the options")
    group.add_argument("--deepspeed", action="store_true", help="accepted for existing scripts; always on")
    group.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="default: nccl on GPUs, else gloo")
    group.add_argument("--local_rank", "--local-rank", type=int, default=0, help="set by the launcher")


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data-impl", choices=("bfp", "mmap"), default="bfp", help="best-fit packing or concatenation")
    group.add_argument(
        "--dataloader-inter-document-masking",
        action="store_true",
        help="with --data-impl mmap: attention inside documents, also where they are concatenated",
    )
    group.add_argument("--data-path", nargs="+", required=True, metavar="[WEIGHT] PREFIX")
    group.add_argument("--split", default="969,30,1")
    group.add_argument("--data-cache-path", help="where indexes go that cannot stand beside the data")
    group.add_argument("--num-workers", type=int, default=2, help="processes that read samples, for each rank")
    group.add_argument("--num-dataset-builder-threads", type=int, default=1)
    group.add_argument("--seq-length", type=int, required=True)
    group.add_argument("--max-documents-per-sequence", type=int)
    group.add_argument("--eod-mask-loss", action="store_true")
    group.add_argument("--tokenizer-type", default="HuggingFaceTokenizer")
    group.add_argument("--tokenizer-model", required=True)
    group.add_argument("--eod-token")


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--save", metavar="FOLDER")
    group.add_argument("--load", metavar="FOLDER", help="resume from its latest complete checkpoint, if there is one")
    group.add_argument("--save-interval", type=int)
    group.add_argument("--log-interval", type=int, default=1)
    group.add_argument("--json-log", metavar="FILE", help="append a JSON object for each logged step and evaluation")
    group.add_argument("--tensorboard-dir", metavar="FOLDER")
    group.add_argument("--eval-interval", type=int, help="evaluate on the valid split every so many steps")
    group.add_argument("--eval-iters", type=int, help="global batches of an evaluation (default: the whole split)")
    group.add_argument(
        "--loss-spike-factor",
        type=float,
        default=3.0,
        help="stop at a loss so many times the mean of those before (default: 3; 0: never)",
    )


def _check(options: argparse.Namespace) -> None:
    at_least_one = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "micro_batch_size")
    at_least_one += ("train_iters", "seq_length", "log_interval", "num_dataset_builder_threads")
    at_least_one += ("make_vocab_size_divisible_by", "rotary_base", "tensor_model_parallel_size")
    for name in at_least_one:
        checked_count(f"--{name.replace('_', '-')}", getattr(options, name))
    for name in (
        "global_batch_size",
        "exit_interval",
        "exit_duration_in_mins",
        "lr_decay_iters",
        "save_interval",
        "ffn_hidden_size",
        "eval_interval",
        "eval_iters",
    ):
        if getattr(options, name) is not None:
            checked_count(f"--{name.replace('_', '-')}", getattr(options, name))
    checked_cap(options.max_documents_per_sequence)
    split_fractions(options.split)
    blend(options.data_path)
    for name in (
        "num_workers",
        "lr_warmup_iters",
        "lr",
        "min_lr",
        "weight_decay",
        "clip_grad",
        "init_method_std",
        "loss_spike_factor",
    ):
        if not 0 <= getattr(options, name) < math.inf:
            raise OptionError(f"--{name.replace('_', '-')} must not be negative, got {getattr(options, name)}")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(options, name) < 1:
            raise OptionError(
                f"--{name.replace('_', '-')} must be at least 0 and below 1, got {getattr(options, name)}"
            )
    if options.hidden_size % (2 * options.num_attention_heads):
        raise OptionError("--hidden-size must be a multiple of twice --num-attention-heads (RoPE turns pairs)")
    if options.group_query_attention and options.num_attention_heads % options.num_query_groups:
        raise OptionError("--num-attention-heads must be a multiple of --num-query-groups")
    groups = options.num_query_groups if options.group_query_attention else options.num_attention_heads
    if groups % options.tensor_model_parallel_size:
        raise OptionError("--tensor-model-parallel-size must divide the attention heads and --num-query-groups")
    for name in ("save_interval", "exit_interval", "exit_duration_in_mins", "exit_signal_handler"):
        if getattr(options, name) and not options.save:
            raise OptionError(f"--{name.replace('_', '-')} needs --save")
    if options.data_impl == "bfp" and options.dataloader_inter_document_masking:
        raise OptionError("--dataloader-inter-document-masking needs --data-impl mmap; bfp has it always")
    if options.data_impl == "mmap" and options.max_documents_per_sequence:
        raise OptionError("--max-documents-per-sequence needs --data-impl bfp")
    if options.load and os.path.exists(options.load) and not os.path.isdir(options.load):
        raise OptionError(f"--load {options.load}: not a folder")


def padded_vocab_size(options: argparse.Namespace, vocab_size: int) -> int:
    """Rows of the model's embedding, on all tensor-parallel ranks together.

    Args:
        vocab_size: of the tokenizer.
    """
    multiple = options.make_vocab_size_divisible_by * options.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple
