"""Attention windows by each fused kernel, against the reference: outputs and gradients."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from megatron_bfp.attention.boundaries import Boundaries
from megatron_bfp.attention.kernels import KERNELS, Needs, choose_kernel

LENGTHS = [300, 1, 77, 646]
WINDOW, SCALE = 64, 0.125


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_window_is_that_of_the_reference(kernel):
    needs = Needs(torch.bfloat16, 64, 0.0, WINDOW)
    if reason := KERNELS[kernel].unusable(needs):
        pytest.skip(reason)
    torch.manual_seed(0)
    boundaries = Boundaries.of_lengths(LENGTHS, "cuda")
    joined = [torch.randn(sum(LENGTHS), heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    weights = torch.randn(sum(LENGTHS), 8, 64, device="cuda")

    def computed(name, dtype, window):
        inputs = [tensor.to(dtype, copy=True).requires_grad_() for tensor in joined]
        _, attend = choose_kernel(name, needs._replace(dtype=dtype, window=window))
        output = attend(*inputs, boundaries, SCALE, 0.0)
        (output.float() * weights).sum().backward()
        return [output.detach().float(), *(tensor.grad.float() for tensor in inputs)]

    def errors(results, expected):
        return [float((result - other).norm() / other.norm()) for result, other in zip(results, expected, strict=True)]

    expected = computed("sdpa", torch.float32, WINDOW)
    errors_of_kernel = errors(computed(kernel, torch.bfloat16, WINDOW), expected)
    without = errors(computed(kernel, torch.bfloat16, None), expected)
    print(f"{kernel}: relative errors {errors_of_kernel}, without a window {without}")
    assert max(errors_of_kernel) < 0.02 and min(without) > 0.1
