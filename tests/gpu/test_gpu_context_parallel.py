"""Context parallelism with each fused kernel: two ranks on one GPU against the reference kernel on one rank.

Gathered keys need causal attention that is aligned at the bottom right, as a rank's queries are the last of their keys.
"""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from helpers.context_parallel_kernels import check_kernels, usable


def test_every_kernel_computes_the_shares_of_one_rank(tmp_path):
    kernels, reasons = usable()
    for name, reason in reasons.items():
        print(f"{name} is left out: {reason}")
    assert len(kernels) > 1  # sdpa, and one that is fused
    check_kernels(tmp_path, "cuda", kernels)
