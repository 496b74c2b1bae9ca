"""The example trainer's check, before its first update, that boundaries reached attention."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

from helpers.megatron_helpers import initialize_megatron, model_options
from trainer import engine as pretrain_boundaries
from trainer.model import build_model

from megatron_bfp import IntegrationError
from megatron_bfp.megatron_core.attention import document_boundaries

LENGTH = 16
CU_SEQLENS = torch.tensor([[0, 5, 9, *[LENGTH] * (LENGTH - 2)], [0, *[LENGTH] * LENGTH]], dtype=torch.int32)


@pytest.fixture
def engine():
    initialize_megatron()
    model = build_model(model_options(seq_length=LENGTH), 64)
    return SimpleNamespace(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def step(engine, batch, cu_seqlens):
    tokens = batch["tokens"]
    positions = torch.arange(LENGTH).expand_as(tokens)
    boundaries = document_boundaries(cu_seqlens)
    engine.module(tokens, positions, None, labels=tokens, packed_seq_params=boundaries).sum().backward()
    engine.optimizer.step()


def batches():
    while True:
        yield {"tokens": torch.arange(2 * LENGTH).view(2, LENGTH), "cu_seqlens": CU_SEQLENS}


@pytest.mark.parametrize("recompute", [None, "full"], ids=["plain", "recomputed"])
def test_fault_A01_the_first_update_comes_after_the_check(engine, capsys, recompute):
    if recompute:
        engine.module = build_model(model_options(seq_length=LENGTH, recompute_granularity=recompute), 64)
        engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    watched = pretrain_boundaries.check_first_step(engine, batches())
    for _ in range(2):
        batch = next(watched)
        step(engine, batch, batch["cu_seqlens"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "attention inside documents, as the first step showed: 2 x DocumentAttention by sdpa; rotary positions run on "
        "through the sequence"
    )


def test_fault_A01_boundaries_of_other_documents_stop_it(engine, capsys):
    watched = pretrain_boundaries.check_first_step(engine, batches())
    before = [parameter.clone() for parameter in engine.module.parameters()]
    whole_rows = torch.tensor([[0, *[LENGTH] * LENGTH]] * 2, dtype=torch.int32)
    with pytest.raises(IntegrationError, match="got other boundaries than those of the batches"):
        step(engine, next(watched), whole_rows)
    assert all(map(torch.equal, before, engine.module.parameters()))
    assert capsys.readouterr().out == ""
