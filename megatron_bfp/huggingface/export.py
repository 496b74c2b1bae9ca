"""Writing a checkpoint as a folder that transformers loads: configurations, safetensors in shards, tokenizer.

The folder appears whole or not at all, and the same checkpoint gives the same bytes. In memory is one shard at a time.
"""

import json
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..errors import OptionError
from ..files import whole_folder
from ..optional import not_installed
from ..progress import Progress, without_progress
from ..tokenizers.interface import Tokenizer
from .checkpoint import VOCABULARY, TrainerCheckpoint
from .llama import LlamaShape, to_huggingface
from .tokenizer_files import write_tokenizer


class Exported(NamedTuple):
    """What was written."""

    num_parameters: int
    num_bytes: int
    """Of the weights."""
    num_shards: int
    dtype: str


def export(
    checkpoint: TrainerCheckpoint,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    output: str,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    progress: Progress = without_progress,
) -> Exported:
    """Write a checkpoint as a Hugging Face LLaMA model.

    Args:
        tokenizer: of the run.
        tokenizer_path: that it was loaded from, a file or a folder.
        output: the folder to write.
        dtype: of the weights, "float32" or "bfloat16"; None for that of the forward pass in training.
        max_shard_bytes: most bytes of a file of weights, unless a single fused parameter has more.
        overwrite: replace a folder that holds a model.

    Raises:
        OptionError: the tokenizer is not the run's, or the folder exists.
        InputError: the checkpoint cannot be read.
    """
    check_tokenizer(checkpoint, tokenizer)
    if overwrite and os.path.isdir(output) and "config.json" not in (os.listdir(output) or ["config.json"]):
        raise OptionError(f"{output}: holds other files than a model's, which are not overwritten; give another folder")
    wanted = getattr(torch, dtype) if dtype else checkpoint.dtype
    name = str(wanted).removeprefix("torch.")
    shards = list(shards_of(checkpoint.shape, wanted.itemsize, max_shard_bytes))
    with whole_folder(output, overwrite) as folder:
        write_tokenizer(tokenizer, tokenizer_path, folder, checkpoint.options["--seq-length"])
        _write_json(os.path.join(folder, "config.json"), configuration(checkpoint, tokenizer, name))
        _write_json(os.path.join(folder, "generation_config.json"), _generation(tokenizer))
        _write_weights(checkpoint, folder, wanted, shards, progress)
    size = sum(map(checkpoint.shape.size_of, checkpoint.shape.parameter_names()))
    return Exported(size, size * wanted.itemsize, len(shards), name)


def check_tokenizer(checkpoint: TrainerCheckpoint, tokenizer: Tokenizer) -> None:
    """Check that a tokenizer can be the one of a run.

    Raises:
        OptionError: it has another size or EOD.
    """
    for option, value in ((VOCABULARY, tokenizer.vocab_size), ("--eod-token (its id)", tokenizer.eod)):
        if checkpoint.options[option] != value:
            raise OptionError(
                f"--tokenizer-model {tokenizer.path}: {checkpoint.path} was saved with {option} "
                f"{checkpoint.options[option]}, not {value}; give the tokenizer of its run"
            )


def shards_of(shape: LlamaShape, itemsize: int, max_shard_bytes: int) -> Iterable[list[str]]:
    """Names of megatron-core's parameters for each file of weights.

    Args:
        itemsize: bytes of an element.
    """
    shard: list[str] = []
    total = 0
    for name in shape.parameter_names():
        size = shape.size_of(name) * itemsize
        if shard and total + size > max_shard_bytes:
            yield shard
            shard, total = [], 0
        shard.append(name)
        total += size
    yield shard


def configuration(checkpoint: TrainerCheckpoint, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``. Its names are those that transformers 4 and 5 read alike."""
    shape = checkpoint.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": checkpoint.options["--seq-length"],
        "rms_norm_eps": checkpoint.options["--norm-epsilon"],
        "rope_theta": float(checkpoint.options["--rotary-base"]),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eod,
        "pad_token_id": None,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _generation(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of ``generation_config.json``. There is no padding token; rows of a batch are filled with the EOD."""
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.eod}
    return {name: number for name, number in ids.items() if number is not None}


def _write_weights(
    checkpoint: TrainerCheckpoint, folder: str, dtype: torch.dtype, shards: list[list[str]], progress: Progress
) -> None:
    """Write the files of weights, and their index if there are several."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise not_installed(error, "the export of models") from None
    names = iter(progress(checkpoint.shape.parameter_names(), sum(map(len, shards)), "exporting"))
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in (next(names) for _ in shard):
            for key, tensor in to_huggingface(checkpoint.shape, name, checkpoint.parts(name)).items():
                tensors[key] = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
        try:
            save_file(tensors, os.path.join(folder, file), metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from None
        files |= dict.fromkeys(tensors, file)
    next(names, None)  # ends the progress
    if len(shards) > 1:
        size = sum(map(checkpoint.shape.size_of, checkpoint.shape.parameter_names())) * dtype.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        _write_json(os.path.join(folder, "model.safetensors.index.json"), index)


def _write_json(path: str, content: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
