"""Published training configurations of Megatron-LM, reduced to a size that a CPU trains in a moment.

The options that say what a model computes are kept as they are published. Sizes are small, and what needs a GPU or
Transformer Engine is left out.
"""

import re
from pathlib import Path

YAML_LINE = re.compile(r"^ +(--[\w-]+): *([^#\n]*?) *(?:#.*)?$", re.MULTILINE)
SHELL_LINE = re.compile(r"^[ \t]+(--[\w-]+)(?: +([^\s#-][^\s#]*))? *(?:#.*)?$", re.MULTILINE)

KEPT = re.compile(
    "--(normalization|norm-epsilon|swiglu|quick-geglu|glu-linear-offset|activation-func-clamp-value|squared-relu"
    "|disable-bias-linear|untie-embeddings-and-output-weights|position-embedding-type|rope-type|rotary-.*"
    "|group-query-attention|qk-layernorm|multi-latent-attention|mscale.*|softmax-type|window-.*|moe-.*|mtp-.*)"
)
"""Options that say what a model computes."""

LEFT_OUT = re.compile("--moe-(grouped-gemm|permute-fusion|flex-dispatcher-backend|per-layer-logging)")
"""Those that need a GPU, or print more."""

SMALL = {
    "--num-layers": 2,
    "--num-query-groups": 2,
    "--num-experts": 4,
    "--window-size": "20,0",
    "--moe-layer-freq": "([0]*1+[1]*1)",
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--moe-router-topk": 2,
    "--moe-router-num-groups": 2,
    "--moe-router-group-topk": 1,
    "--q-lora-rank": 32,
    "--kv-lora-rank": 16,
    "--qk-head-dim": 16,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 16,
    "--hybrid-layer-pattern": "M-M*",
}
"""Sizes, for options that a configuration has."""

REPLACED = {"--moe-token-dispatcher-type": ("flex", "alltoall")}
"""Values that need a GPU, and what stands for them."""


def published(path: Path) -> dict[str, str]:
    """The options of a configuration of a functional test or of an example's script; "true" for flags."""
    text = path.read_text()
    if path.suffix == ".yaml":
        return dict(YAML_LINE.findall(text))
    return {option: value or "true" for option, value in SHELL_LINE.findall(text)}


def reduced(options: dict[str, str]) -> list[str]:
    """The command line of a small model of the same kind. Weights are large, so that attention matters from the first
    step on."""
    small = ["--init-method-std", "0.2", "--no-bias-gelu-fusion"]
    for option, value in options.items():
        if option in SMALL:
            value = str(SMALL[option])
        elif not KEPT.fullmatch(option) or LEFT_OUT.fullmatch(option):
            continue
        if REPLACED.get(option, ("",))[0] == value:
            value = REPLACED[option][1]
        small += [option] if value == "true" else [option, value]
    return small
