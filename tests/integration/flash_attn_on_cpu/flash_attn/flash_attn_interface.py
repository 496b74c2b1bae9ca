"""The varlen functions of flash-attn 1 and 2 as Megatron-DeepSpeed calls them, computed by torch."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    """[t, heads, head size], with the documents' boundaries as int32."""
    assert q.dtype in (torch.float16, torch.bfloat16) and cu_seqlens_q.dtype == torch.int32 and causal
    assert cu_seqlens_k is None or torch.equal(cu_seqlens_q, cu_seqlens_k)  # None from Megatron-DeepSpeed on a CPU
    assert cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == len(q)
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    bounds = cu_seqlens_q.tolist()
    parts = [
        scaled_dot_product_attention(
            *(tensor[start:end].transpose(0, 1) for tensor in (q, k, v)),
            dropout_p=dropout_p,
            is_causal=True,
            scale=softmax_scale,
        ).transpose(0, 1)
        for start, end in zip(bounds, bounds[1:])
    ]
    return torch.cat(parts)


flash_attn_unpadded_func = flash_attn_varlen_func
