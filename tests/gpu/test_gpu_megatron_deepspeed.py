"""Megatron-DeepSpeed's flash attention, with the boundaries in flash-attn's own kernel, against the documents alone."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
flash_attn_interface = pytest.importorskip("flash_attn.flash_attn_interface", reason="flash-attn 1 or 2 is not there")

from megatron_bfp.attention.kernels import KERNELS
from megatron_bfp.integrations.megatron_deepspeed import model

ROWS = [[600, 200, 7, 1], [2048], [1, 1000, 1000], [64] * 32]
LENGTH, HEADS, HEAD_SIZE = 2048, 4, 64
FUNCTION = (
    getattr(flash_attn_interface, "flash_attn_varlen_func", None) or flash_attn_interface.flash_attn_unpadded_func
)


def boundaries():
    rows = []
    for lengths in ROWS:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        rows.append([0, *ends, *([LENGTH] * (LENGTH - len(ends))), 1])
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def inputs(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (LENGTH, len(ROWS), HEADS * HEAD_SIZE)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()


def attention(kernel):
    """ParallelAttention's forward around one kernel of [b, s, heads, head size]."""

    def forward(self, hidden_states, mask, *rest):
        assert mask is None
        query = hidden_states.unflatten(-1, (HEADS, HEAD_SIZE)).transpose(0, 1).contiguous()
        return kernel(query, query, query).transpose(0, 1).flatten(2), None

    return model.attend_inside_documents(forward)


def flash():
    holder = SimpleNamespace(softmax_scale=None, dropout_p=0.0, causal=True, training=True, flash_attn_func=FUNCTION)
    forward = model.attend_with_varlen_kernel(None)
    return lambda *tensors: forward(holder, *tensors)


def documents_alone(query, key, value):
    joined_boundaries = model.micro_batch_of(boundaries()).joined
    joined = (tensor.flatten(0, 1) for tensor in (query, key, value))
    outputs = KERNELS["sdpa"].attend(*joined, joined_boundaries, HEAD_SIZE**-0.5, 0.0)
    return outputs.unflatten(0, query.shape[:2])


def run(kernel, tensor):
    states = inputs(3)
    output, _ = attention(kernel)(SimpleNamespace(use_flash_attn=True), states, tensor)
    output.float().square().sum().backward()
    return output.float(), states.grad.float()


def test_flash_attention_is_that_of_the_documents_alone():
    expected = run(documents_alone, boundaries())
    one_document = torch.zeros_like(boundaries()) + LENGTH
    one_document[:, 0], one_document[:, -1] = 0, 1
    inside, crossing = run(flash(), boundaries()), run(flash(), one_document)
    for values, crossing_values, alone in zip(inside, crossing, expected, strict=True):
        scale = alone.abs().max()
        error, crossing_error = ((other - alone).abs().max() / scale for other in (values, crossing_values))
        print(f"{error:.1e}, across documents {crossing_error:.1e}")
        assert error < 3e-2 and crossing_error > 6e-2
