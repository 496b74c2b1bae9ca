"""megatron-core's GPTModel in LLaMA's architecture, with attention inside documents, on GPUs and CPUs."""

import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from megatron_bfp.attention.context_parallel import Shards, ulysses
from megatron_bfp.megatron_core.attention import DocumentAttention, with_document_attention

from .config import TrainerConfig, padded_vocab_size


class CPURotaryEmbedding(RotaryEmbedding):
    """RotaryEmbedding for the CPU; megatron-core's always moves its frequencies, and the positions of a
    context-parallel rank, to a GPU."""

    def forward(self, max_seq_len: int, *_: Any, **__: Any) -> torch.Tensor:
        """Rotary angles of this rank's positions of a row, float32 [positions, 1, 1, head size].

        Args:
            max_seq_len: positions of the whole row.
        """
        ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        angles = self.get_emb(max_seq_len)
        return angles if ranks == 1 else angles[Shards(ranks, 1, max_seq_len).positions(rank)]

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Rotary angles of the positions from ``offset`` on, float32 [max_seq_len, 1, 1, head size]."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def transformer_config(config: TrainerConfig) -> TransformerConfig:
    """megatron-core's configuration of the model; fusions that need CUDA or extra packages are off."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    recomputation = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=config.num_layers,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        cp_comm_type=config.cp_comm_type,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups if config.group_query_attention else None,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=config.init_method_std,
        bf16=config.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        **(recomputation if config.recompute_granularity and torch.cuda.is_available() else {}),
    )


def build_model(config: TrainerConfig, vocab_size: int) -> GPTModel:
    """A GPTModel whose forward takes ``packed_seq_params=document_boundaries(cu_seqlens)``.

    megatron-core's parallel state and random number tracker must be initialised.

    Args:
        vocab_size: of the tokenizer; the embedding is padded to a multiple of ``make_vocab_size_divisible_by``.
    """
    model_config = transformer_config(config)
    layer_spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config=model_config,
        transformer_layer_spec=with_document_attention(layer_spec, config.attention_kernel),
        vocab_size=padded_vocab_size(config, vocab_size),
        max_sequence_length=config.seq_length,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=config.rotary_base,
    )
    if not torch.cuda.is_available():
        model.rotary_pos_emb = CPURotaryEmbedding(
            model_config.kv_channels, rotary_percent=1.0, rotary_base=config.rotary_base, use_cpu_initialization=True
        )
        if config.recompute_granularity:
            _recompute_layers(model)
    return model


def attention_kernel(model: torch.nn.Module) -> str:
    """The name of the kernel that the model's attention runs."""
    return next(module.kernel_name for module in model.modules() if isinstance(module, DocumentAttention))


def way_to_share(model: torch.nn.Module) -> str:
    """What the ranks of a context-parallel group do to attend to each other's positions, in words."""
    split = next(module.split for module in model.modules() if isinstance(module, DocumentAttention))
    return "attention heads are exchanged" if split is ulysses else "keys and values are gathered"


def _recompute_layers(model: GPTModel) -> None:
    """Keep only each layer's input for the backward pass. megatron-core's own recomputation needs a GPU, as it restores
    the GPU's random number generators; without dropout nothing is random."""
    for layer in model.decoder.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
