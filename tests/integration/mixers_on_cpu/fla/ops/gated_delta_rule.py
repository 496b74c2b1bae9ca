"""The gated delta rule (https://arxiv.org/abs/2412.06464, equation 10), one position after another."""

import torch


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens=None
):  # fmt: skip
    """q and k [1, t, heads, key size], v [1, t, heads, value size], g and beta [1, t, heads] -> as v, and no state."""
    assert initial_state is None and not output_final_state and not use_qk_l2norm_in_kernel
    starts = set([0] if cu_seqlens is None else cu_seqlens.tolist())
    outputs = []
    for position in range(q.shape[1]):
        query, key, value = (tensor[:, position].float() for tensor in (q, k, v))
        if position in starts:
            state = query.new_zeros(*key.shape, value.shape[-1])
        state = state * g[:, position, :, None, None].exp()
        correction = (value - (key[..., None] * state).sum(-2)) * beta[:, position, :, None]
        state = state + key[..., None] * correction[..., None, :]
        outputs.append((query[..., None] * state).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).to(v.dtype), None


def fused_recurrent_gated_delta_rule(*_, **__):
    raise NotImplementedError  # of inference
