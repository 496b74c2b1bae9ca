"""Starting from the weights of a Hugging Face LLaMA model, which all ranks read, each its own part."""

from typing import Any

import torch
from megatron.core import parallel_state

from megatron_bfp.errors import OptionError
from megatron_bfp.huggingface.pretrained import OPTION, PretrainedLlama

from .config import TrainerConfig, flag, key_value_heads, padded_vocab_size
from .ranks import log

SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
GROUPS = "--group-query-attention --num-query-groups"


def open_pretrained(config: TrainerConfig, vocab_size: int) -> PretrainedLlama | None:
    """The model of ``--pretrained-checkpoint``; None without that option.

    Args:
        vocab_size: of the tokenizer.

    Raises:
        OptionError: it is not a LLaMA model, or not of the shape that the options say.
    """
    if config.pretrained_checkpoint is None:
        return None
    pretrained = PretrainedLlama(config.pretrained_checkpoint)
    wanted: dict[str, Any] = {flag(name): getattr(config, name) for name in SIZES}
    wanted |= {GROUPS: key_value_heads(config), "--rotary-base": config.rotary_base}
    wanted["--norm-epsilon"] = config.norm_epsilon
    given: dict[str, Any] = {flag(name): getattr(pretrained.shape, name) for name in SIZES}
    given |= {GROUPS: pretrained.shape.num_query_groups, "--rotary-base": pretrained.rotary_base}
    given["--norm-epsilon"] = pretrained.norm_epsilon
    different = [f"{name} {given[name]:.9g}, not {wanted[name]:.9g}" for name in wanted if given[name] != wanted[name]]
    if different:
        raise OptionError(f"{OPTION} {pretrained.folder}: it has {', '.join(different)}; give the model's own")
    if pretrained.shape.vocab_size < vocab_size:
        raise OptionError(
            f"{OPTION} {pretrained.folder}: its vocabulary has {pretrained.shape.vocab_size} tokens, that of "
            f"--tokenizer-model {vocab_size}; give the model's own tokenizer"
        )
    return pretrained


def load_pretrained(
    model: torch.nn.Module, pretrained: PretrainedLlama, config: TrainerConfig, vocab_size: int
) -> None:
    """Give a model the weights. Call it on all ranks, before DeepSpeed has the model.

    Rows of the vocabulary that the folder lacks, which are padding, are 0.

    Raises:
        OptionError: the folder lacks a parameter.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    rows = padded_vocab_size(config, vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(pretrained.part(name, rank, config.tensor_model_parallel_size, rows))
    tied = "; its embedding is also its output layer, and here they are trained apart" if pretrained.is_tied else ""
    log(f"started from the weights of {pretrained.folder}{tied}")
