"""The equivalence table: each path of the trainer on packed sequences equals the chunks alone, and not without mask.

The rows of the GPU are in tests/gpu, those of several processes in tests/end_to_end.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

from helpers import equivalence
from helpers.datasets import documents_of

CASES = [
    equivalence.Case("sdpa", precision, heads, path)
    for precision in ("fp32", "bf16")
    for heads in ("MHA", "GQA")
    for path in equivalence.PATHS
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_equals_alone(case, write_dataset):
    prefix = write_dataset(documents_of([37, 1, 20, 64 + 11, 40, 9, 13, 30, 17, 8, 26, 5, 50])).prefix
    equivalence.check(case, prefix, "cpu", seq_length=64, vocab_size=512)
