"""The equivalence table on a GPU: every kernel that is installed, against the chunks alone through the reference.

Alone, each chunk runs through per-document SDPA in the same precision, so that a kernel cannot agree with itself on
something wrong.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

import numpy as np
from helpers import equivalence
from helpers.datasets import documents_of

from megatron_bfp.attention.kernels import KERNELS, Needs, choose_kernel

SHAPE = {"hidden_size": 256, "ffn_hidden_size": 512, "init_method_std": 0.08}
CASES = [
    equivalence.Case(kernel, precision, heads, path)
    for kernel in KERNELS
    for precision in ("fp32", "bf16")
    if kernel == "sdpa" or precision == "bf16"  # the fused kernels take no fp32
    for heads in ("MHA", "GQA")
    for path in equivalence.PATHS
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_equals_alone(case, write_dataset):
    reason = KERNELS[case.kernel].unusable(Needs(torch.bfloat16, 64, 0.0))
    if reason:
        pytest.skip(f"{case.kernel}: {reason}")
    lengths = np.random.default_rng(1).integers(1, 300, 60).tolist()
    prefix = write_dataset(documents_of([*lengths, 1300, 777])).prefix
    equivalence.check(case, prefix, "cuda", seq_length=512, vocab_size=16384, **SHAPE)


def test_the_kernel_chosen_is_told():
    name, _ = choose_kernel(None, Needs(torch.bfloat16, 128, 0.0))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}: {name} is chosen for bf16")
    assert name != "sdpa"
    assert choose_kernel(None, Needs(torch.float32, 128, 0.0))[0] == "sdpa"
