"""Rotary positions of Megatron-LM's joined rows through Transformer Engine's layers and kernels, fused and not."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytest.importorskip("transformer_engine")

from helpers.rotary_models import hook_rotations, make_model, run

CASES = [
    ("RoPE", False),
    ("RoPE", True),
    ("partial", True),
    ("interleaved", True),
    ("YaRN", False),
    ("YaRN", True),
    ("MLA", False),
    ("MLA with YaRN", False),
    ("MLA with YaRN", True),
]
"""Kind of rotation, and whether it is fused."""


@pytest.mark.parametrize("kind, fused", CASES)
def test_joined_rows_are_rotated_as_rows_that_are_not_joined(monkeypatch, kind, fused):
    model = make_model(monkeypatch, kind, size=256, transformer_engine=True, fused=fused)
    _, expected, _ = run(model, False)
    _, restarted, text = run(model, True)
    assert text.endswith("rotary positions restart in each document")
    hook_rotations(monkeypatch)
    _, got, text = run(model, True)
    assert text.endswith("rotary positions run on through the sequence")
    for ours, own, rows in zip(got, restarted, expected, strict=True):
        error, of_restarted = ((part - rows).abs().max() / rows.abs().max() for part in (ours, own))
        print(f"\n{kind}, {'fused' if fused else 'not fused'}: {error:.1e}; restarted {of_restarted:.1e}", flush=True)
        assert error < 1e-2 < of_restarted
