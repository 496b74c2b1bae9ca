"""Starting a training run from a Hugging Face LLaMA model: the folder that ``save_pretrained`` writes.

Weights are read a parameter at a time, and each rank keeps its own part.
"""

import os
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError
from ..files import read_json_object
from ..optional import not_installed
from .llama import PADDED, LlamaShape, from_huggingface, huggingface_names

OPTION = "--pretrained-checkpoint"
ARCHITECTURE = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}
"""Entries of config.json -> their values in models that the trainer has. One that is missing has the first of them."""


class PretrainedLlama:
    """A folder with a LLaMA model.

    Args:
        folder: with ``config.json`` and safetensors files.

    Attributes:
        shape: of its parameters; its vocabulary is that of its embedding.
        rotary_base: base of its rotary position embeddings.
        norm_epsilon: epsilon of its RMSNorm.
        is_tied: whether its output layer is its embedding.

    Raises:
        OptionError: it cannot be read, or is another architecture than the trainer's.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        config = self._read_json("config.json")
        self._check_architecture(config)
        try:
            heads = config["num_attention_heads"]
            groups = config.get("num_key_value_heads") or heads
            self.shape = LlamaShape(
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=int(config["hidden_size"]),
                ffn_hidden_size=int(config["intermediate_size"]),
                num_attention_heads=int(heads),
                num_query_groups=int(groups),
                vocab_size=int(config["vocab_size"]),
            )
            self.norm_epsilon = float(config["rms_norm_eps"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._error(f"config.json: {error!r}") from None
        self.rotary_base = self._rotary_base(config)
        if config.get("head_dim") not in (None, self.shape.head_size):
            raise self._error(
                f"its head_dim is {config['head_dim']}; the trainer's heads have hidden_size / num_attention_heads, "
                f"{self.shape.head_size}"
            )
        self.is_tied = bool(config.get("tie_word_embeddings"))
        self._files = self._open()

    def part(self, name: str, rank: int, ranks: int, padded_vocab_size: int) -> Tensor:
        """A tensor-parallel rank's part of a parameter.

        Args:
            name: megatron-core's.
            padded_vocab_size: rows of the embedding and of the output layer. Those that the folder lacks are 0.

        Raises:
            OptionError: the folder has no such parameter, or of another shape.
        """
        tensors = [self._tensor(key) for key in huggingface_names(name)]
        size, expected = sum(tensor.numel() for tensor in tensors), self.shape.size_of(name)
        if size != expected:
            keys = " and ".join(huggingface_names(name))
            raise self._error(f"{keys}: {size} elements, where config.json says {expected}")
        if name in PADDED:
            rows = tensors[0][:padded_vocab_size]
            padding = rows.new_zeros(padded_vocab_size - len(rows), self.shape.hidden_size)
            tensors = [torch.cat([rows, padding])]
        return from_huggingface(self.shape, name, tensors, rank, ranks)

    def _tensor(self, name: str) -> Tensor:
        if name == "lm_head.weight" and self.is_tied:
            name = "model.embed_tokens.weight"
        if name not in self._files:
            raise self._error(f"has no {name}")
        return self._files[name].get_tensor(name)

    def _check_architecture(self, config: dict[str, Any]) -> None:
        for name, values in ARCHITECTURE.items():
            value = config.get(name, values[0])
            if value not in values:
                raise self._error(f"its {name} is {value}; the trainer's models have {values[0]}")

    def _rotary_base(self, config: dict[str, Any]) -> float:
        """From the entries of transformers 5, or of earlier versions."""
        settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind != "default":
            raise self._error(f"its rope_type is {kind}; the trainer's rotary position embeddings are not scaled")
        return float(settings.get("rope_theta") or config.get("rope_theta") or 10000.0)

    def _open(self) -> dict[str, Any]:
        """The open file of each parameter."""
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError as error:
            raise not_installed(error, OPTION) from None
        index = os.path.join(self.folder, "model.safetensors.index.json")
        names = ["model.safetensors"]
        if os.path.exists(index):
            names = sorted(set(self._read_json("model.safetensors.index.json").get("weight_map", {}).values()))
        try:
            files = [safe_open(os.path.join(self.folder, name), framework="pt") for name in names]
        except (OSError, SafetensorError) as error:
            raise self._error(f"{error}; the weights must be in safetensors files, as save_pretrained writes") from None
        return {key: file for file in files for key in file.keys()}

    def _read_json(self, name: str) -> dict[str, Any]:
        content = read_json_object(os.path.join(self.folder, name))
        if content is None:
            raise self._error(f"holds no {name} of a Hugging Face model")
        return content

    def _error(self, text: str) -> OptionError:
        return OptionError(f"{OPTION} {self.folder}: {text}")
