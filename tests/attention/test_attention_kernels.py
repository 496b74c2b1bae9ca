"""Kernels: the reference against plain softmax attention, and the choice among the available kernels.

The fused kernels run in tests/gpu. Here each is called with a stand-in for its library, which computes by the reference
what its arguments ask for, so that a wrong argument or a lost boundary shows.
"""

import copy
import pickle
import sys
import types

import pytest

pytest.importorskip("torch")

import torch

from megatron_bfp import OptionError
from megatron_bfp.attention import kernels
from megatron_bfp.attention.boundaries import Boundaries

CU_SEQLENS = torch.tensor([[0, 5, 6] + [12] * 10, [0, 12] + [12] * 11], dtype=torch.int32)
BF16 = kernels.Needs(torch.bfloat16, 128, 0.0)


@pytest.fixture
def joined():
    torch.manual_seed(0)
    return [torch.randn(24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]


def plain_attention(query, key, value, offsets, scale, window=None, sinks=None):
    """Softmax attention, written out for each document, position and head."""
    out = torch.empty_like(query)
    for start, end in zip(offsets, offsets[1:]):
        for position in range(start, end):
            first = start if window is None else max(start, position - window)
            for head in range(query.shape[1]):
                keys, values = (t[first : position + 1, head * key.shape[1] // query.shape[1]] for t in (key, value))
                scores = keys @ query[position, head] * scale
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                out[position, head] = torch.softmax(scores, dim=0)[: len(values)] @ values
    return out


def test_the_reference_equals_plain_softmax_attention(joined):
    boundaries = Boundaries.of_rows(CU_SEQLENS)
    output = kernels.sdpa_per_document(*joined, boundaries, 0.3, 0.0)
    assert torch.allclose(output, plain_attention(*joined, boundaries.offsets, 0.3))


@pytest.mark.parametrize("window", [None, 0, 2, 40])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_and_sinks_equal_plain_softmax_attention(joined, window, with_sinks):
    """Outputs and gradients."""
    sinks = torch.randn(4, dtype=torch.float64) if with_sinks else None
    inputs = [tensor.requires_grad_() for tensor in [*joined, *([sinks] if with_sinks else [])]]
    boundaries = Boundaries.of_rows(CU_SEQLENS)
    name, attend = kernels.choose_kernel("sdpa", kernels.Needs(torch.float64, 8, 0.0, window, with_sinks))
    output = attend(*joined, boundaries, 0.3, 0.0, **({"sinks": sinks} if with_sinks else {}))
    expected = plain_attention(*joined, boundaries.offsets, 0.3, window, sinks)
    assert torch.allclose(output, expected)
    weights = torch.randn_like(output)
    gradients, others = (torch.autograd.grad((result * weights).sum(), inputs) for result in (output, expected))
    assert all(torch.allclose(gradient, other) for gradient, other in zip(gradients, others, strict=True))
    assert not torch.allclose(output, plain_attention(*joined, boundaries.offsets, 0.3, 1))  # the control


def stand_in(query, key, value, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout, scale, causal, window=(-1, -1)):
    """What a varlen kernel computes, and nothing for arguments that would make it compute something else."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    offsets = cu_seqlens_q.tolist()
    longest = max(end - start for start, end in zip(offsets, offsets[1:]))
    assert (max_q, max_k, dropout, causal) == (longest, longest, 0.0, True)
    left = None if window[0] == -1 else window[0]
    return kernels.sdpa_per_document(query, key, value, Boundaries(offsets, None, max_q), scale, 0.0, left)


def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa
    return stand_in(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, scale, window_size[1] == 0, window_size)


def flash_attn_2(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)
):  # fmt: skip
    return stand_in(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, softmax_scale, causal, window_size)


def flash_attn_3(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=None, causal=False, window_size=(-1, -1)):
    return stand_in(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, softmax_scale, causal, window_size), None


def flash_attn_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, window_size=(-1, -1),
):  # fmt: skip
    arguments = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return stand_in(q, k, v, *arguments, 0.0, softmax_scale, causal, window_size), None


class TransformerEngineAttention:
    def __init__(
        self, heads, size, num_gqa_groups, attention_dropout, qkv_format, attn_mask_type, softmax_scale, window_size
    ):  # fmt: skip
        self.shape = (heads, num_gqa_groups, size)
        self.window = window_size or (-1, -1)
        self.scale, self.dropout = softmax_scale, attention_dropout
        self.causal = (qkv_format, attn_mask_type) == ("thd", "padding_causal")

    def __call__(self, q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv):
        assert self.shape == (q.shape[1], k.shape[1], q.shape[2])
        arguments = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        return stand_in(q, k, v, *arguments, self.dropout, self.scale, self.causal, self.window).flatten(1)


STAND_INS = {
    "torch-varlen": ("torch.nn.attention.varlen", {"varlen_attn": varlen_attn}),
    "flash-attn": ("flash_attn", {"flash_attn_varlen_func": flash_attn_2}),
    "flash-attn-3": ("flash_attn_interface", {"flash_attn_varlen_func": flash_attn_3}),
    "flash-attn-4": ("flash_attn.cute", {"flash_attn_varlen_func": flash_attn_4}),
    "transformer-engine": ("transformer_engine.pytorch", {"DotProductAttention": TransformerEngineAttention}),
}


@pytest.fixture
def libraries(monkeypatch):
    """Make stand-ins importable by name, and only those; returns the function that does it."""

    def forget():
        for name, loader in vars(kernels).items():
            if hasattr(loader, "cache_clear"):
                loader.cache_clear()

    def install(*names):
        forget()
        for name, (module, content) in STAND_INS.items():
            library = types.SimpleNamespace(**content) if name in names else None  # None makes an import fail
            monkeypatch.setitem(sys.modules, module, library)

    yield install
    monkeypatch.undo()
    forget()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a compute capability, as far as the choice of a kernel looks at one."""

    def pretend(major):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: f"a GPU of {major}.0")

    return pretend


@pytest.mark.case(17)
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("name", STAND_INS)
def test_a_fused_kernel_is_given_boundaries_scale_causality_and_window(name, joined, libraries, gpu, window):
    gpu(9)
    libraries(name)
    boundaries = Boundaries.of_rows(CU_SEQLENS)
    _, attend = kernels.choose_kernel(name, BF16._replace(window=window))
    output = attend(*joined, boundaries, 0.3, 0.0)
    assert torch.allclose(output, plain_attention(*joined, boundaries.offsets, 0.3, window))


def test_the_early_flash_attention_4_that_comes_with_2_is_not_taken(libraries, gpu, monkeypatch):
    gpu(9)
    libraries("flash-attn", "flash-attn-4")
    early = types.SimpleNamespace(flash_attn_varlen_func=lambda q, k, v, cu_seqlens_q, cu_seqlens_k: None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", early)
    assert kernels.choose_kernel(None, BF16)[0] == "flash-attn"


def test_the_best_kernel_that_is_there_is_chosen(libraries, gpu):
    def chosen(major, *names, needs=BF16):
        gpu(major)
        libraries(*names)
        return kernels.choose_kernel(None, needs)[0]

    assert chosen(9, *STAND_INS) == "flash-attn-3"
    assert chosen(9, "flash-attn-4", "flash-attn", "torch-varlen") == "flash-attn-4"
    assert chosen(8, *STAND_INS) == "flash-attn"
    assert chosen(8, "torch-varlen", "transformer-engine") == "torch-varlen"
    assert chosen(8, "transformer-engine") == "transformer-engine"
    assert chosen(7, *STAND_INS) == "sdpa"
    assert chosen(9) == "sdpa"
    assert chosen(9, *STAND_INS, needs=BF16._replace(dtype=torch.float32)) == "sdpa"
    assert chosen(9, *STAND_INS, needs=BF16._replace(dropout=0.1)) == "flash-attn"
    assert chosen(9, *STAND_INS, needs=BF16._replace(head_size=12)) == "sdpa"
    assert chosen(9, *STAND_INS, needs=BF16._replace(window=127)) == "flash-attn-3"
    assert chosen(9, *STAND_INS, needs=BF16._replace(sinks=True)) == "sdpa"


@pytest.mark.parametrize(
    "major, needs, reason",
    [
        (8, BF16, "not made for a GPU of 8.0"),
        (9, BF16._replace(dtype=torch.float32), "the model in float32"),
        (9, BF16._replace(head_size=512), "head sizes"),
        (9, BF16._replace(dropout=0.1), "dropout"),
        (9, BF16._replace(sinks=True), "sinks"),
        (9, BF16, "cannot be imported"),
    ],
)
def test_a_forced_kernel_that_cannot_be_used_says_why(major, needs, reason, libraries, gpu):
    gpu(major)
    libraries()
    with pytest.raises(OptionError, match=reason):
        kernels.choose_kernel("flash-attn-3", needs)


def test_without_a_gpu_there_is_the_reference(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.choose_kernel(None, BF16) == ("sdpa", kernels.sdpa_per_document)
    assert kernels.choose_kernel("sdpa", BF16) == ("sdpa", kernels.sdpa_per_document)
    with pytest.raises(OptionError, match="no GPU"):
        kernels.choose_kernel("torch-varlen", BF16)
    with pytest.raises(OptionError, match="there are flash-attn-3, .*, sdpa"):
        kernels.choose_kernel("dense", BF16)


def test_a_torch_without_causal_windows_is_not_used(libraries, monkeypatch):
    libraries()
    old = types.SimpleNamespace(varlen_attn=lambda query, key, value, is_causal=False: None)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", old)
    with pytest.raises(ImportError, match="older"):
        kernels.load(kernels.LIBRARIES["torch-varlen"])


@pytest.mark.parametrize(
    "head_size, fits", [(8, True), (64, True), (248, True), (256, True), (264, False), (4, False), (252, False)]
)
@pytest.mark.parametrize("name", [name for name in STAND_INS])
def test_fused_kernels_take_head_sizes_to_256(name, head_size, fits, libraries, gpu):
    libraries(*STAND_INS)
    gpu(9)
    needs = BF16._replace(head_size=head_size)
    reason = kernels.KERNELS[name].unusable(needs)
    assert reason is None if fits else f"not {head_size}" in reason


@pytest.mark.parametrize("name", ["flash-attn-3", "flash-attn-4", "flash-attn", "torch-varlen", "transformer-engine"])
@pytest.mark.parametrize("major", range(6, 15))
def test_fused_kernels_are_used_on_the_gpus_that_they_are_made_for(name, major, libraries, gpu):
    libraries(*STAND_INS)
    gpu(major)
    made_for = {"flash-attn-3": {9}, "flash-attn-4": {9, 10}}.get(name, {8, 9, 10, 11, 12})
    assert (kernels.KERNELS[name].unusable(BF16) is None) == (major in made_for)


@pytest.mark.parametrize("dtype, fits", [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_fused_kernels_compute_in_half_precision_alone(dtype, fits, libraries, gpu):
    libraries(*STAND_INS)
    gpu(9)
    for name in STAND_INS:
        assert (kernels.KERNELS[name].unusable(BF16._replace(dtype=dtype)) is None) == fits
        has_dropout = name in ("flash-attn", "transformer-engine")
        assert (kernels.KERNELS[name].unusable(BF16._replace(dtype=dtype, dropout=0.1)) is None) == (
            fits and has_dropout
        )


def test_a_library_without_its_function_cannot_be_used(libraries, gpu, monkeypatch):
    gpu(9)
    libraries(*STAND_INS)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.SimpleNamespace())
    reason = kernels.KERNELS["flash-attn-3"].unusable(BF16)
    assert reason == "it cannot be imported: flash_attn_interface has no flash_attn_varlen_func"


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_a_model_with_a_kernel_can_be_copied_and_pickled(name, joined, libraries):
    libraries(*STAND_INS)
    boundaries = Boundaries.of_rows(CU_SEQLENS)
    attend = kernels.KERNELS[name].attend
    for again in (copy.deepcopy(attend), pickle.loads(pickle.dumps(attend))):
        assert torch.equal(again(*joined, boundaries, 0.3, 0.0), attend(*joined, boundaries, 0.3, 0.0))


def test_smaller_values_are_padded_and_cut_off_again(joined):
    query, key, value = joined
    boundaries = Boundaries.of_rows(CU_SEQLENS)

    def needs_one_size(query, key, value, *others):
        assert value.shape[-1] == key.shape[-1]
        return kernels.sdpa_per_document(query, key, value, *others)

    output = kernels.attend_padded(needs_one_size, query, key, value[..., :3], boundaries, 0.3, 0.0)
    assert torch.allclose(output, plain_attention(*joined, boundaries.offsets, 0.3)[..., :3])
