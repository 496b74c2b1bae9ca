"""Whether a row of Megatron-LM's table of options concerns a run, where one attribute of its options does not tell.

Each condition takes the options, before or after Megatron-LM validated them, and returns what was given, or None.
"""

import argparse


def other_loader(args: argparse.Namespace) -> str | None:
    """A loader that does not read samples one after another."""
    kind = getattr(args, "dataloader_type", None)
    return None if kind in (None, "single") else f"--dataloader-type {kind}"


def transformer_engine(args: argparse.Namespace) -> str | None:
    """Layers of Transformer Engine."""
    impl = getattr(args, "transformer_impl", "local")
    return None if impl == "local" else f"--transformer-impl {impl}"


def joins_rows_between_stages(args: argparse.Namespace) -> bool:
    """Whether pipeline stages pass on joined rows: those of the larger micro-batch, of training or of evaluation."""
    largest = max(getattr(args, name, None) or 1 for name in ("micro_batch_size", "eval_micro_batch_size"))
    return largest > 1 and (getattr(args, "pipeline_model_parallel_size", None) or 1) > 1


def joins_rows_for_allgather(args: argparse.Namespace) -> str | None:
    """Experts whose tokens are gathered, in a pipeline that passes on joined rows."""
    kind = getattr(args, "moe_token_dispatcher_type", None)
    if kind == "allgather" and getattr(args, "num_experts", None) and joins_rows_between_stages(args):
        return f"--moe-token-dispatcher-type {kind}"
    return None


CAPTURES_NO_ATTENTION = {"mlp", "moe", "moe_router", "moe_preprocess"}
"""Modules of ``--cuda-graph-modules`` that do not mix positions."""


def captures_attention(args: argparse.Namespace) -> str | None:
    """CUDA graphs with attention in them."""
    option, impl, names = _graphs(args)
    return option if impl == "full_iteration" or impl != "none" and not _is_without_attention(names) else None


def captures_other_modules(args: argparse.Namespace) -> str | None:
    """CUDA graphs of other modules alone."""
    option, impl, names = _graphs(args)
    return option if impl not in ("none", "full_iteration") and _is_without_attention(names) else None


def _is_without_attention(names: set[str]) -> bool:
    """Whether modules are named, and none of them holds attention."""
    return bool(names) and names <= CAPTURES_NO_ATTENTION


def _graphs(args: argparse.Namespace) -> tuple[str, str, set[str]]:
    """The option that asks for CUDA graphs, their kind or ``none``, and the modules that are captured; none are all.

    Args:
        args: with old or new spellings, which Megatron-LM replaces by each other.
    """
    modules = getattr(args, "cuda_graph_scope_deprecated", None) or getattr(args, "cuda_graph_modules", None) or []
    if not isinstance(modules, list | tuple):
        modules = str(getattr(modules, "name", modules)).split(",")
    names = {getattr(module, "name", str(module)) for module in modules}
    for old in ("external_cuda_graph", "enable_cuda_graph"):
        if getattr(args, old, False):
            return f"--{old.replace('_', '-')}", old, names
    impl = getattr(args, "cuda_graph_impl", None) or "none"
    if impl == "none" and "full_iteration" in names:
        return "--cuda-graph-scope full_iteration", "full_iteration", names
    return f"--cuda-graph-impl {impl}", impl, names
