"""Whether a row of Megatron-LM's table of options concerns a run, where one attribute of its options does not tell.

Each condition takes the options, before or after Megatron-LM validated them, and returns what was given, or None.
"""

import argparse


def external_loader(args: argparse.Namespace) -> str | None:
    """A loader of the script's own."""
    return "--dataloader-type external" if getattr(args, "dataloader_type", None) == "external" else None


def other_order(args: argparse.Namespace) -> str | None:
    """A loader that does not read samples one after another."""
    kind = getattr(args, "dataloader_type", None)
    return None if kind in (None, "single", "external") else f"--dataloader-type {kind}"


def transformer_engine(args: argparse.Namespace) -> str | None:
    """Layers of Transformer Engine."""
    impl = getattr(args, "transformer_impl", "local")
    return None if impl == "local" else f"--transformer-impl {impl}"


def multimodal_positions(args: argparse.Namespace) -> str | None:
    """Rotary positions in three dimensions; multi-latent attention has its own instead."""
    kind = getattr(args, "position_embedding_type", None)
    has_others = getattr(args, "multi_latent_attention", False)
    return f"--position-embedding-type {kind}" if kind == "mrope" and not has_others else None


def fused_projection(args: argparse.Namespace) -> str | None:
    """Rotation in one kernel with the split of queries, keys and values, which no option asks for, but a file may."""
    return "fused_single_qkv_rope" if getattr(args, "fused_single_qkv_rope", False) else None


GATED_DELTA_NETS = {"gdn", "gdn2", "gated_delta_net"}
"""Values of ``--experimental-attention-variant``."""


def gated_delta_net(args: argparse.Namespace) -> str | None:
    """Gated delta nets in a GPT model."""
    variant = getattr(args, "experimental_attention_variant", None)
    return f"--experimental-attention-variant {variant}" if variant in GATED_DELTA_NETS else None


def deterministic_gdn2(args: argparse.Namespace) -> str | None:
    """The second kind of gated delta nets, by operations that are deterministic."""
    is_gdn2 = getattr(args, "experimental_attention_variant", None) == "gdn2"
    return "--deterministic-mode" if is_gdn2 and getattr(args, "deterministic_mode", False) else None


def sparse_attention(args: argparse.Namespace) -> str | None:
    """DeepSeek's sparse attention."""
    variant = getattr(args, "experimental_attention_variant", None)
    return f"--experimental-attention-variant {variant}" if variant == "dsa" else None


def learned_sinks_of_split_rows(args: argparse.Namespace) -> str | None:
    """A softmax with sinks, and rows that are split over ranks."""
    kind = getattr(args, "softmax_type", None) or "vanilla"
    is_split = (getattr(args, "context_parallel_size", None) or 1) > 1
    return f"--softmax-type {kind}" if is_split and kind != "vanilla" else None


CAPTURES_NO_ATTENTION = {
    "local": {"moe_router", "moe_preprocess"},
    "transformer_engine": {"mlp", "moe", "moe_router", "moe_preprocess"},
}
"""``--cuda-graph-impl`` -> modules of ``--cuda-graph-modules`` for which graphs hold no attention. Megatron-LM's local
graphs of ``mlp`` and ``moe`` hold the whole layer."""


def captures_attention(args: argparse.Namespace) -> str | None:
    """CUDA graphs with attention in them."""
    option, impl, names = _graphs(args)
    return option if impl != "none" and not _is_without_attention(impl, names) else None


def captures_other_modules(args: argparse.Namespace) -> str | None:
    """CUDA graphs of other modules alone."""
    option, impl, names = _graphs(args)
    return option if impl != "none" and _is_without_attention(impl, names) else None


def _is_without_attention(impl: str, names: set[str]) -> bool:
    """Whether modules are named, and the graphs of none of them hold attention."""
    return bool(names) and names <= CAPTURES_NO_ATTENTION.get(impl, set())


def _graphs(args: argparse.Namespace) -> tuple[str, str, set[str]]:
    """The option that asks for CUDA graphs, their kind or ``none``, and the modules that are captured; none are all.

    Args:
        args: with old or new spellings, which Megatron-LM replaces by each other.
    """
    modules = getattr(args, "cuda_graph_scope_deprecated", None) or getattr(args, "cuda_graph_modules", None) or []
    if not isinstance(modules, list | tuple):
        modules = str(getattr(modules, "name", modules)).split(",")
    names = {getattr(module, "name", str(module)) for module in modules}
    for old, kind in (("external_cuda_graph", "transformer_engine"), ("enable_cuda_graph", "local")):
        if getattr(args, old, False):
            return f"--{old.replace('_', '-')}", kind, names
    impl = getattr(args, "cuda_graph_impl", None) or "none"
    if impl == "none" and "full_iteration" in names:
        return "--cuda-graph-scope full_iteration", "full_iteration", names
    return f"--cuda-graph-impl {impl}", impl, names
