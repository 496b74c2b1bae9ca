"""Options of ``pretrain_gpt.py``, under Megatron's names, checked before anything is built."""

import argparse
import math
import os
from collections.abc import Sequence

from megatron_bfp.arguments import checked_cap, checked_count, checked_seq_length
from megatron_bfp.commands.shared import Parser
from megatron_bfp.errors import OptionError
from megatron_bfp.sequence_index.key import split_fractions

ATTENTION_KERNELS = ("flash-attn-3", "flash-attn-4", "flash-attn", "torch-varlen", "transformer-engine", "sdpa")
"""The names in ``megatron_bfp.attention_kernels.KERNELS``, which needs torch; a test compares them."""


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help with the default of each option that has one and does not tell it itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        tells = action.help is None or "default" in action.help or action.required or action.nargs == 0
        return action.help if tells or action.default is None else super()._get_help_string(action)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options.

    Raises:
        OptionError: one has a value that cannot be honoured.
    """
    parser = Parser(
        prog="pretrain_gpt",
        description="Pre-train a GPT model (LLaMA architecture) on packed documents. Options have Megatron's names.",
        formatter_class=Help,
    )
    _add_model(parser.add_argument_group("model"))
    _add_data(parser.add_argument_group("data"))
    _add_batches(parser.add_argument_group("batches and length of the run"))
    _add_optimizer(parser.add_argument_group("optimizer"))
    _add_parallelism(parser.add_argument_group("precision, memory and parallelism"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    _add_log(parser.add_argument_group("log and evaluation"))
    options = parser.parse_args(argv)
    _check(options)
    if options.ffn_hidden_size is None:
        options.ffn_hidden_size = -(-8 * options.hidden_size // (3 * 256)) * 256  # as LLaMA's: 11008 for 4096
    return options


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-layers", type=int, metavar="N", required=True, help="transformer layers (required)")
    group.add_argument("--hidden-size", type=int, metavar="N", required=True, help="width of the model (required)")
    group.add_argument(
        "--ffn-hidden-size",
        type=int,
        metavar="N",
        help="width of the MLP (default: 8/3 of the hidden size, as LLaMA's)",
    )
    group.add_argument("--num-attention-heads", type=int, metavar="N", required=True, help="query heads (required)")
    group.add_argument(
        "--group-query-attention", action="store_true", help="let query heads share keys and values (default: off)"
    )
    group.add_argument(
        "--num-query-groups", type=int, metavar="N", default=1, help="key and value heads, with --group-query-attention"
    )
    group.add_argument("--rotary-base", type=int, metavar="N", default=10000, help="base of the rotary positions")
    group.add_argument("--norm-epsilon", type=float, metavar="X", default=1e-5, help="epsilon of RMSNorm")
    group.add_argument(
        "--init-method-std", type=float, metavar="X", default=0.02, help="standard deviation of the initial weights"
    )
    group.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        metavar="N",
        default=128,
        help="the embedding has a multiple of so many rows for each tensor-parallel rank",
    )
    group.add_argument(
        "--attention-kernel", choices=ATTENTION_KERNELS, help="kernel (default: the fastest that can be used)"
    )


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data-path",
        nargs="+",
        required=True,
        metavar="[WEIGHT] PREFIX",
        help="datasets, each without .bin and .idx, and with a weight before each if there are several (required)",
    )
    group.add_argument("--data-impl", choices=("bfp", "mmap"), default="bfp", help="best-fit packing or concatenation")
    group.add_argument(
        "--dataloader-inter-document-masking",
        action="store_true",
        help="with --data-impl mmap: attention inside documents, also where they are concatenated (default: off)",
    )
    group.add_argument("--split", metavar="N,N,N", default="969,30,1", help="shares of training, validation and test")
    group.add_argument("--seq-length", type=int, metavar="N", required=True, help="tokens of a sequence (required)")
    group.add_argument(
        "--max-documents-per-sequence", type=int, metavar="N", help="with --data-impl bfp (default: no limit)"
    )
    group.add_argument(
        "--eod-mask-loss", action="store_true", help="no loss where the input is the end of a document (default: off)"
    )
    group.add_argument("--tokenizer-type", metavar="TYPE", default="HuggingFaceTokenizer", help="as of preprocessing")
    group.add_argument("--tokenizer-model", metavar="FILE", required=True, help="as of preprocessing (required)")
    group.add_argument("--eod-token", metavar="TEXT", help="token between documents (default: the tokenizer's own)")
    group.add_argument(
        "--data-cache-path", metavar="FOLDER", help="for indexes (default: beside the data, where that can be written)"
    )
    group.add_argument(
        "--num-workers", type=int, metavar="N", default=2, help="processes of each rank that read samples"
    )
    group.add_argument(
        "--num-dataset-builder-threads", type=int, metavar="N", default=1, help="threads that open the datasets"
    )


def _add_batches(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--micro-batch-size",
        type=int,
        metavar="N",
        required=True,
        help="sequences that a rank has at a time (required)",
    )
    group.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="sequences of a step (default: micro-batch size times data-parallel ranks)",
    )
    group.add_argument("--train-iters", type=int, metavar="N", required=True, help="steps of the whole run (required)")
    group.add_argument(
        "--exit-interval",
        type=int,
        metavar="N",
        help="save and stop after a multiple of so many steps (default: never)",
    )
    group.add_argument(
        "--exit-duration-in-mins", type=int, metavar="N", help="save and stop after so many minutes (default: never)"
    )
    group.add_argument(
        "--exit-signal-handler",
        action="store_true",
        help="save and stop on SIGTERM; for existing scripts (default: on with --save)",
    )
    group.add_argument("--seed", type=int, metavar="N", default=1234, help="of the weights and of the order of samples")


def _add_optimizer(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--lr", type=float, metavar="X", default=3e-4, help="largest learning rate")
    group.add_argument("--min-lr", type=float, metavar="X", default=0.0, help="learning rate at the end of the decay")
    group.add_argument(
        "--lr-decay-style", choices=("cosine", "constant"), default="cosine", help="how the learning rate falls"
    )
    group.add_argument("--lr-decay-iters", type=int, metavar="N", help="step of --min-lr (default: --train-iters)")
    group.add_argument("--lr-warmup-iters", type=int, metavar="N", default=0, help="steps in which it rises from 0")
    group.add_argument(
        "--weight-decay", type=float, metavar="X", default=0.1, help="of AdamW; norms and biases are not decayed"
    )
    group.add_argument("--adam-beta1", type=float, metavar="X", default=0.9, help="decay of the mean of gradients")
    group.add_argument("--adam-beta2", type=float, metavar="X", default=0.95, help="decay of the mean of their squares")
    group.add_argument("--adam-eps", type=float, metavar="X", default=1e-8, help="epsilon of AdamW")
    group.add_argument("--clip-grad", type=float, metavar="X", default=1.0, help="largest norm of the gradient; 0: any")


def _add_parallelism(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--bf16", action="store_true", help="train in bf16, with weights in fp32 (default: in fp32)")
    group.add_argument(
        "--recompute-granularity",
        choices=("full",),
        help="full: keep only each layer's input for the backward pass (default: keep all)",
    )
    group.add_argument(
        "--tensor-model-parallel-size", type=int, metavar="N", default=1, help="ranks that share each tensor"
    )
    group.add_argument(
        "--zero-stage", type=int, choices=(0, 1, 2, 3), help="of DeepSpeed (default: that of --deepspeed_config, or 0)"
    )
    group.add_argument(
        "--deepspeed_config",
        metavar="FILE",
        help="DeepSpeed's JSON; batch sizes follow the options (default: what the options say)",
    )
    group.add_argument("--deepspeed", action="store_true", help="for existing scripts (default: always on)")
    group.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="(default: nccl on GPUs, else gloo)")
    group.add_argument(
        "--local_rank", "--local-rank", type=int, metavar="N", default=0, help="set by the launcher (default: 0)"
    )


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--save", metavar="FOLDER", help="save checkpoints there, at the end and as told below (default: save none)"
    )
    group.add_argument(
        "--load",
        metavar="FOLDER",
        help="resume from its latest complete checkpoint, if there is one (default: start from the beginning)",
    )
    group.add_argument("--save-interval", type=int, metavar="N", help="save every so many steps (default: at the end)")
    group.add_argument(
        "--keep-last",
        type=int,
        metavar="N",
        help="after each save, remove complete checkpoints before the last so many (default: keep all)",
    )
    group.add_argument(
        "--override-checkpoint-args",
        action="store_true",
        help="resume although data or model options are others than the checkpoint's; some samples may then be seen "
        "twice and others never (default: stop and name them)",
    )


def _add_log(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--log-interval", type=int, metavar="N", default=1, help="print a line every so many steps")
    group.add_argument(
        "--json-log", metavar="FILE", help="append an object for each step and evaluation printed (default: none)"
    )
    group.add_argument("--tensorboard-dir", metavar="FOLDER", help="write TensorBoard's events there (default: none)")
    group.add_argument(
        "--eval-interval",
        type=int,
        metavar="N",
        help="evaluate on the valid split every so many steps (default: never)",
    )
    group.add_argument(
        "--eval-iters", type=int, metavar="N", help="global batches of an evaluation (default: the whole split)"
    )
    group.add_argument(
        "--loss-spike-factor",
        type=float,
        metavar="X",
        default=3.0,
        help="stop at a loss so many times the mean of those before; 0: never",
    )


def _check(options: argparse.Namespace) -> None:
    checked_seq_length("--seq-length", options.seq_length)
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
        "keep_last",
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
    for name in ("save_interval", "keep_last", "exit_interval", "exit_duration_in_mins", "exit_signal_handler"):
        if getattr(options, name) and not options.save:
            raise OptionError(f"--{name.replace('_', '-')} needs --save")
    if options.override_checkpoint_args and not options.load:
        raise OptionError("--override-checkpoint-args needs --load")
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


def blend(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Megatron's ``--data-path``: prefixes alone, or each after its weight.

    Returns:
        Prefixes, and weights or None.

    Raises:
        OptionError: it is neither.
    """

    def weight(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    weights = [weight(text) for text in data_path[::2]]
    if weights[0] is None or len(data_path) == 1:
        return list(data_path), None
    if len(data_path) % 2 or any(found is None or not 0 < found < float("inf") for found in weights):
        raise OptionError(f"--data-path {' '.join(data_path)}: give prefixes, or a weight above 0 before each prefix")
    return list(data_path[1::2]), weights
