"""DeepSpeed's configuration, and the check before the first update that boundaries reached attention."""

import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")
pytest.importorskip("deepspeed")

from helpers.megatron_helpers import initialize_megatron, model_options
from trainer.arguments import parse_arguments
from trainer.engine import check_first_step, deepspeed_config
from trainer.model import build_model

from megatron_bfp import BFPError, IntegrationError
from megatron_bfp.megatron_core.attention import document_boundaries

NEEDED = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --train-iters 100"
NEEDED += " --data-path data --seq-length 64 --tokenizer-model tokenizer.json"
torch = pytest.importorskip("torch")
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
    watched = check_first_step(engine, batches())
    for _ in range(2):
        batch = next(watched)
        step(engine, batch, batch["cu_seqlens"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "attention inside documents, as the first step showed: 2 x DocumentAttention by sdpa; rotary positions run on "
        "through the sequence"
    )


def test_fault_A01_boundaries_of_other_documents_stop_it(engine, capsys):
    watched = check_first_step(engine, batches())
    before = [parameter.clone() for parameter in engine.module.parameters()]
    whole_rows = torch.tensor([[0, *[LENGTH] * LENGTH]] * 2, dtype=torch.int32)
    with pytest.raises(IntegrationError, match="got other boundaries than those of the batches"):
        step(engine, next(watched), whole_rows)
    assert all(map(torch.equal, before, engine.module.parameters()))
    assert capsys.readouterr().out == ""


def settings_of(tmp_path, config, text=""):
    path = tmp_path / "deepspeed.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    words = f"{NEEDED} --global-batch-size 8 --deepspeed_config {path} {text}".split()
    return deepspeed_config(parse_arguments(words), accumulation=8)


def test_deepspeed_s_json_is_completed_by_the_options(tmp_path):
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "auto", "immediate_grad_update": True},
        "zero_optimization": {"stage": 2, "overlap_comm": False},
    }
    settings = settings_of(tmp_path, given, "--bf16")
    assert settings["train_batch_size"] == settings["gradient_accumulation_steps"] == 8
    assert settings["bf16"] == {"enabled": True, "immediate_grad_update": True}
    assert settings["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert settings_of(tmp_path, {})["zero_optimization"] == {"stage": 0}
    assert settings_of(tmp_path, {}, "--zero-stage 3")["zero_optimization"] == {"stage": 3}


@pytest.mark.parametrize(
    "config, text, named",
    [
        ({"train_batch_size": 16}, "", "train_batch_size is 16, the options say 8"),
        ({"bf16": {"enabled": True}}, "", "bf16 is True"),
        ({"zero_optimization": {"stage": 1}}, "--zero-stage 2", "--zero-stage 2"),
        ({"optimizer": {"type": "Adam"}}, "", "remove optimizer"),
        ({"fp16": {"enabled": True}}, "", "remove fp16"),
        ("[1]", "", "not a JSON object"),
        ("{", "", "deepspeed.json"),
    ],
)
def test_a_json_that_contradicts_the_options_is_refused(tmp_path, config, text, named):
    with pytest.raises(BFPError, match=named):
        settings_of(tmp_path, config, text)


@pytest.mark.parametrize("rotary_base", [10000, 500])
def test_the_model_s_rotation_and_norms_are_those_of_the_options(rotary_base):
    initialize_megatron()
    options = model_options(seq_length=LENGTH, rotary_base=rotary_base, norm_epsilon=rotary_base * 1e-7)
    model = build_model(options, 64)
    halves = torch.arange(0, 16, 2, dtype=torch.float32) / 16  # of heads of 16
    expected = torch.arange(LENGTH)[:, None] / rotary_base**halves
    angles = model.rotary_pos_emb(LENGTH)[:, 0, 0].cpu()
    assert torch.allclose(angles, torch.cat([expected, expected], dim=-1), rtol=1e-5)
    norms = [module.eps for module in model.modules() if "RMSNorm" in type(module).__name__]
    assert norms == [rotary_base * 1e-7] * 5
