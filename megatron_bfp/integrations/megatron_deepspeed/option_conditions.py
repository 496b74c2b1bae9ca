"""Whether a row of Megatron-DeepSpeed's table of options concerns a run, where one attribute does not tell.

Each condition takes the options that Megatron-DeepSpeed validated, and returns what was given, or None.
"""

import argparse
import json


def other_loader(args: argparse.Namespace) -> str | None:
    """A loader that does not read samples one after another; None before Megatron-DeepSpeed chose one."""
    return None if args.dataloader_type in (None, "single") else f"--dataloader-type {args.dataloader_type}"


def other_layers(args: argparse.Namespace) -> str | None:
    """Layers that are not Megatron-DeepSpeed's own."""
    return None if args.transformer_impl == "local" else f"--transformer-impl {args.transformer_impl}"


def fuses_softmax(args: argparse.Namespace) -> bool:
    """Whether attention would use the fused softmax: in half precision, without flash attention."""
    return args.masked_softmax_fusion and (args.fp16 or args.bf16) and not args.use_flash_attn


def ulysses_without_flash(args: argparse.Namespace) -> str | None:
    """DeepSpeed's sequence parallelism around attention that is not flash attention."""
    is_on = args.ds_sequence_parallel_size > 1 or args.force_ds_sequence_parallel
    return "DeepSpeed's sequence parallelism" if is_on and not args.use_flash_attn else None


def saves_rotary_table(args: argparse.Namespace) -> str | None:
    """Rotary positions that would go through Megatron-DeepSpeed's own recomputation, which saves only tensors."""
    if (
        getattr(args, "use_rotary_position_embeddings", False)
        and getattr(args, "recompute_granularity", None) == "full"
        and getattr(args, "no_pipeline_parallel", False)
        and not getattr(args, "deepspeed_activation_checkpointing", False)
    ):
        return "--use-rotary-position-embeddings with --recompute-granularity full"
    return None


def curriculum(args: argparse.Namespace) -> str | None:
    """The first curriculum of DeepSpeed's configuration, which Megatron-DeepSpeed reads later."""
    if not args.deepspeed or not isinstance(args.deepspeed_config, str):
        return None
    try:
        with open(args.deepspeed_config, encoding="utf-8") as file:
            is_on = json.load(file).get("curriculum_learning", {}).get("enabled")
    except (OSError, ValueError, AttributeError):
        return None  # Megatron-DeepSpeed will report it
    return f"{args.deepspeed_config}: curriculum_learning" if is_on else None
