"""Which modules of a model mix the positions of a sequence, and which of them keep to document boundaries.

Classes are recognized by their names and those of their base classes, so that megatron-core and Megatron-DeepSpeed need
not be imported. A module that seems to mix positions and is not known is reported, never trusted.
"""

import re

from torch import nn

TAKE_BOUNDARIES = {
    "DocumentAttention",
    "TEDotProductAttention",
    "DSAttention",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProductMixer",
    "MambaMixer",
    "MultiTokenPredictionLayer",
    "ParallelAttention",
}
"""Classes that mix positions and keep to the boundaries they get. ``ParallelAttention`` is Megatron-DeepSpeed's."""

JOINED_ROWS_ONLY = TAKE_BOUNDARIES - {"DocumentAttention", "MultiTokenPredictionLayer", "ParallelAttention"}
"""Classes that look at boundaries only if rows are joined, ``qkv_format="thd"``. ``MambaMixer`` goes by ``seq_idx``
alone if there is one."""

LAYERS = {"TransformerLayer", "MambaLayer", "MLPLayer", "MultiTokenPredictionLayer", "ParallelTransformerLayer"}
"""Base classes of layers whose slots are known."""

SLOTS = ("self_attention", "core_attention", "mixer")
"""Names under which layers hold what mixes positions."""

CROSS_SLOTS = ("cross_attention", "inter_attention")
"""Names under which layers hold attention to another sequence, for which there are no boundaries."""

POSITION_WISE = re.compile(r"Identity|Linear|^Noop")
"""Classes that may fill a slot and mix nothing, as in heterogeneous models."""

SEEMS_TO_MIX = re.compile(
    r"attention|attn|mamba|mixer|conv[123]d|delta_?(net|rule|product)|ssm|state_?space|lstm|^gru|rnn|recurren|retention"
    r"|hyena|rwkv|transformerencoder|transformerdecoder|tokenshift|engram",
    re.IGNORECASE,
)
"""Names of classes that are likely to mix positions."""


def mixers_of(model: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
    """The modules of a model that mix positions and take boundaries, by name; and a line for each unknown one."""
    mixers: dict[str, nn.Module] = {}
    unknown: list[str] = []
    inside: tuple[str, ...] = ()  # prefixes of names: the insides of these modules are their own affair
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        slot = name.rpartition(".")[2]
        if slot not in CROSS_SLOTS and has_class(module, TAKE_BOUNDARIES):
            mixers[name] = module
            if not has_class(module, {"MultiTokenPredictionLayer"}):
                inside += (name + ".",)
        elif _mixes_unknown(module, slot) or _is_unknown_layer(name, module):
            kind = f"{name or 'the model'} ({type(module).__name__})"
            unknown.append(f"{kind} is not known to keep to document boundaries")
            inside += (name + ".",) if name else ()
    return mixers, unknown


def _mixes_unknown(module: nn.Module, slot: str) -> bool:
    name = type(module).__name__
    if slot in SLOTS + CROSS_SLOTS and POSITION_WISE.search(name):
        return False
    if slot not in CROSS_SLOTS and has_class(module, {"Attention"}) and hasattr(module, "core_attention"):
        return False  # core_attention, which comes next, does the mixing
    if slot in SLOTS + CROSS_SLOTS or isinstance(module, nn.RNNBase | nn.modules.conv._ConvNd):
        return True
    return bool(SEEMS_TO_MIX.search(name)) and not has_class(module, LAYERS)


def _is_unknown_layer(name: str, module: nn.Module) -> bool:
    """Whether it is an element of a ``layers`` list, and neither of a known class nor made of known attention."""
    owner, _, number = name.rpartition(".")
    if not number.isdigit() or owner.rpartition(".")[2] != "layers" or has_class(module, LAYERS):
        return False
    if type(module).__module__.startswith("torch.nn") or POSITION_WISE.search(type(module).__name__):
        return False
    return not any(has_class(child, TAKE_BOUNDARIES) for child in module.modules())


def has_class(module: nn.Module, names: set[str]) -> bool:
    """Whether the module's class, or one of its base classes, has one of these names."""
    return any(base.__name__ in names for base in type(module).__mro__)


def kind_of(module: nn.Module) -> str:
    """A module's class, and its kernel if it has chosen one."""
    kernel = getattr(module, "kernel_name", None)
    if has_class(module, {"ParallelAttention"}):
        uses_flash = getattr(module, "use_flash_attn", False)
        kernel = "flash-attn's varlen kernel" if uses_flash else "torch's softmax with a mask"
    return type(module).__name__ + (f" by {kernel}" if kernel else "")
