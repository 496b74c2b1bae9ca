"""The convolution and the scan of Mamba 2 as Megatron-LM calls them in training, written out by the recurrence
(https://arxiv.org/abs/2405.21060, section 3): state and convolution begin anew where ``seq_idx`` changes."""

import torch
from torch.nn.functional import silu, softplus


def mamba_chunk_scan_combined(*_, **__):
    raise NotImplementedError  # of inference


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, seq_idx=None, activation="silu", headdim=None,
    ngroups=1, norm_before_gate=True,
):  # fmt: skip
    """[b, t, z + x + B + C + dt] -> [b, t, heads * head size].

    Args:
        conv1d_weight: [channels of x, B and C, width].
        A, D, dt_bias: [heads].
        seq_idx: int32 [b, t] or None.
    """
    batch, length, _ = zxbcdt.shape
    heads = len(dt_bias)
    inner = heads * headdim
    states = (conv1d_weight.shape[0] - inner) // (2 * ngroups)
    z, mixed, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    if seq_idx is None:
        seq_idx = torch.zeros(batch, length, dtype=torch.int32)
    mixed = silu(_convolution(mixed, conv1d_weight, conv1d_bias, seq_idx))
    x, b, c = mixed.split([inner, ngroups * states, ngroups * states], dim=-1)
    x = x.reshape(batch, length, heads, headdim)
    b, c = (part.reshape(batch, length, ngroups, states).repeat_interleave(heads // ngroups, dim=2) for part in (b, c))
    dt = softplus(dt.float() + dt_bias)
    state = x.new_zeros(batch, heads, headdim, states)
    outputs = []
    for position in range(length):
        if position:
            goes_on = seq_idx[:, position] == seq_idx[:, position - 1]
            state = state * goes_on[:, None, None, None]
        step = dt[:, position, :, None, None]
        added = x[:, position, :, :, None] * b[:, position, :, None, :]
        state = state * torch.exp(step * A[:, None, None]) + step * added
        outputs.append((state * c[:, position, :, None, :]).sum(-1) + D[:, None] * x[:, position])
    return torch.stack(outputs, dim=1).reshape(batch, length, inner) * silu(z)


def _convolution(mixed, weight, bias, seq_idx):
    """Causal, of each channel by itself: a position sees those before it that have the same number."""
    result = bias.expand_as(mixed)
    for back in range(weight.shape[1]):
        earlier = mixed.roll(back, dims=1)
        same = seq_idx == seq_idx.roll(back, dims=1)
        same[:, :back] = False
        result = result + torch.where(same[..., None], earlier, 0.0) * weight[:, -1 - back]
    return result
