"""LLaMA's parameters in megatron-core and in transformers: names, shapes, and how one is made from the other.

megatron-core fuses matrices that have the same input, and splits them over tensor-parallel ranks:

- ``linear_qkv``: for each query group its heads of queries, its key head and its value head. Ranks have whole ones.
- ``linear_fc1``: the gate, then the up-projection. Each rank has its part of the one, then its part of the other.
- ``linear_proj`` and ``linear_fc2`` are split by columns; embedding and output layer by rows, of which those after the
  tokenizer's vocabulary are padding.

Both rotate the first half of a head's dimensions against the second (half-split), so no head is permuted.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALONE = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
"""megatron-core's parameters outside layers -> those of transformers that it is made from."""
OF_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
"""The same inside a layer."""
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
SPLIT_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class LlamaShape:
    """What decides the shapes of a model's parameters."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    """Of the tokenizer, without padding."""

    @property
    def head_size(self) -> int:
        """Dimensions of an attention head."""
        return self.hidden_size // self.num_attention_heads

    def parameter_names(self) -> list[str]:
        """megatron-core's names of all parameters, in the order of the forward pass."""
        layers = [f"decoder.layers.{layer}.{name}" for layer in range(self.num_layers) for name in OF_LAYER]
        embedding, *last = ALONE
        return [embedding, *layers, *last]

    def size_of(self, name: str) -> int:
        """The number of elements of a parameter, by megatron-core's name, without padding of the vocabulary."""
        if name in PADDED:
            return self.vocab_size * self.hidden_size
        rows = {
            "linear_qkv.weight": (self.num_attention_heads + 2 * self.num_query_groups) * self.head_size,
            "linear_proj.weight": self.hidden_size,
            "linear_fc1.weight": 2 * self.ffn_hidden_size,
            "linear_fc2.weight": self.ffn_hidden_size,
        }
        return rows.get(".".join(name.split(".")[-2:]), 1) * self.hidden_size


def huggingface_names(name: str) -> tuple[str, ...]:
    """Transformers' names of what is in a parameter of megatron-core.

    Raises:
        KeyError: LLaMA has no such parameter.
    """
    match = LAYER.fullmatch(name)
    return tuple(f"model.layers.{match[1]}.{part}" for part in OF_LAYER[match[2]]) if match else ALONE[name]


def to_huggingface(shape: LlamaShape, name: str, parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Transformers' parameters that are in one of megatron-core, by their names.

    Args:
        parts: the parameter on each tensor-parallel rank.
    """
    names = huggingface_names(name)
    if name.endswith("linear_qkv.weight"):
        heads = torch.cat(tuple(parts)).view(shape.num_query_groups, -1, shape.head_size, shape.hidden_size)
        queries = shape.num_attention_heads // shape.num_query_groups
        tensors = [part.reshape(-1, shape.hidden_size) for part in heads.split([queries, 1, 1], dim=1)]
    elif name.endswith("linear_fc1.weight"):
        halves = [part.chunk(2) for part in parts]
        tensors = [torch.cat(of_all) for of_all in zip(*halves, strict=True)]
    elif parts[0].dim() == 1:
        tensors = [parts[0]]
    else:
        whole = torch.cat(tuple(parts), dim=1 if name.endswith(SPLIT_BY_COLUMNS) else 0)
        tensors = [whole[: shape.vocab_size] if name in PADDED else whole]
    return dict(zip(names, tensors, strict=True))


def from_huggingface(shape: LlamaShape, name: str, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
    """A tensor-parallel rank's part of a parameter of megatron-core.

    Args:
        tensors: transformers' parameters of ``huggingface_names``. If the vocabulary is padded, so are they.
    """
    if name.endswith("linear_qkv.weight"):
        grouped = [tensor.view(shape.num_query_groups, -1, shape.hidden_size) for tensor in tensors]
        return torch.cat(grouped, dim=1).chunk(ranks)[rank].reshape(-1, shape.hidden_size)
    if tensors[0].dim() == 1:
        return tensors[0]
    columns = 1 if name.endswith(SPLIT_BY_COLUMNS) else 0
    return torch.cat([tensor.chunk(ranks, dim=columns)[rank] for tensor in tensors])
