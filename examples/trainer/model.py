"""megatron-core's GPTModel in the LLaMA architecture, with attention inside documents, on CPUs and GPUs."""

import argparse
import functools

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from megatron_bfp.megatron_core.attention import DocumentAttention, with_document_attention

from .arguments import padded_vocab_size


class CPURotaryEmbedding(RotaryEmbedding):
    """RotaryEmbedding that stays on the CPU; the original moves its frequencies to a GPU without asking for one."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Rotary angles of the positions from ``offset`` on, float32 [max_seq_len, 1, 1, head size]."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def transformer_config(options: argparse.Namespace) -> TransformerConfig:
    """The model's configuration; kernels that need CUDA or extra packages are off."""
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    recomputation = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=options.num_layers,
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        hidden_size=options.hidden_size,
        ffn_hidden_size=options.ffn_hidden_size,
        num_attention_heads=options.num_attention_heads,
        num_query_groups=options.num_query_groups if options.group_query_attention else None,
        normalization="RMSNorm",
        layernorm_epsilon=options.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=options.init_method_std,
        bf16=options.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        **(recomputation if options.recompute_granularity and torch.cuda.is_available() else {}),
    )


def build_model(options: argparse.Namespace, vocab_size: int) -> GPTModel:
    """A GPTModel whose forward takes ``packed_seq_params=document_boundaries(cu_seqlens)``.

    megatron-core's parallel state and random number tracker must be initialised.

    Args:
        vocab_size: of the tokenizer; the embedding is padded to a multiple of ``make_vocab_size_divisible_by``.
    """
    config = transformer_config(options)
    layer_spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config=config,
        transformer_layer_spec=with_document_attention(layer_spec, options.attention_kernel),
        vocab_size=padded_vocab_size(options, vocab_size),
        max_sequence_length=options.seq_length,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=options.rotary_base,
    )
    if not torch.cuda.is_available():
        model.rotary_pos_emb = CPURotaryEmbedding(
            config.kv_channels, rotary_percent=1.0, rotary_base=options.rotary_base, use_cpu_initialization=True
        )
        if options.recompute_granularity:
            _recompute_layers(model)
    return model


def attention_kernel(model: torch.nn.Module) -> str:
    """The name of the kernel that the model's attention runs."""
    return next(module.kernel_name for module in model.modules() if isinstance(module, DocumentAttention))


def _recompute_layers(model: GPTModel) -> None:
    """Keep only the layers' inputs for the backward pass. megatron-core's own recomputation needs a GPU, whose random
    number generators it saves; here there is no dropout, and nothing random to repeat."""
    for layer in model.decoder.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
