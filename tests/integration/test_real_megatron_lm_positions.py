"""Rotary and learned positions in Megatron-LM's own pretrain_gpt.py, with attention that takes joined rows alone, as
Transformer Engine's, from a real checkout, on the CPU.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import os
import subprocess
import sys

import pytest
from helpers.launching import ENVIRONMENT, make_corpus
from helpers.real_megatron.lm import NEEDS_CHECKOUT, ON_CPU, launch, losses, train, watched

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
JOINED = ["--spec", "layer_spec", "like_transformer_engine"]
YARN = "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 32"
MLA = """--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8
    --v-head-dim 16"""
KINDS = {
    "RoPE": "",
    "partial RoPE": "--rotary-percent 0.5",
    "YaRN": YARN,
    "MLA": MLA,
    "learned": "--position-embedding-type learned_absolute",
}
WITHOUT = {"MLA": ("--group-query-attention", "--num-query-groups")}
RUN_ON, RESTART = "positions run on through the sequence; ", "positions restart in each document; "


@pytest.fixture(scope="module")
def checkout(megatron_lm):
    return megatron_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(checkout, corpus):
    """Runs a kind of positions; returns the steps and the output, each once."""
    known = {}

    def run_once(kind, *options, watched="alone", ranks=1):
        key = (kind, watched, *options)
        if key not in known:
            script = [ON_CPU / "watched.py", watched, checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
            given = {"ranks": ranks, "without": WITHOUT.get(kind, ())}
            known[key] = train(checkout, corpus, script, *KINDS[kind].split(), *options, **given)
        return known[key]

    return run_once


def first_losses(output, name):
    """The first step's loss, computed from its documents in another way."""
    batches = watched(output)
    return sum(batch[name] for batch in batches) / sum(batch["targets"] for batch in batches)


def agree(what, values, expected, tolerance):
    """Whether two lists of losses are equal, up to a tolerance; prints the largest difference."""
    largest = max(abs(value - other) for value, other in zip(values, expected, strict=True))
    print(f"\n{what}: losses differ by at most {largest:.1e}", flush=True)
    return largest <= tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_ten_losses_are_those_of_local_layers(run, kind):
    """These get the boundaries of rows."""
    joined, output = run(kind, *JOINED)
    by_rows, output_by_rows = run(kind, watched="plain")
    assert "2 x TEDotProductAttention" in output and "2 x DocumentAttention" in output_by_rows
    assert RUN_ON in output and RUN_ON in output_by_rows
    assert len(joined) == 10 and agree(f"{kind}, local layers", losses(joined), losses(by_rows), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_that_of_the_documents_alone(run, kind):
    for options, course in (JOINED, RUN_ON), ([*JOINED, "--reset-position-ids", "--train-iters", 1], RESTART):
        steps, output = run(kind, *options)
        # a learned position is absolute: where it runs on, a document is another than alone
        name = "unchanged" if (kind, course) == ("learned", RUN_ON) else "alone"
        assert course in output
        what = f"{kind}, {course.removesuffix('; ')}, documents {name}"
        assert agree(what, losses(steps)[:1], [first_losses(output, name)], 1e-5)


@pytest.mark.parametrize("kind", ["RoPE", "YaRN", "MLA"])
def test_micro_batches_of_one_row_have_the_same_losses(run, kind):
    one, output = run(kind, *JOINED, "--micro-batch-size", 1, watched="plain")
    assert RUN_ON in output
    assert agree(f"{kind}, micro-batches of 1 and 2", losses(one), losses(run(kind, *JOINED)[0]), 1e-5)


def test_two_pipeline_stages_rotate_as_local_layers(run):
    stages = ["--pipeline-model-parallel-size", 2]
    joined, output = run("YaRN", *JOINED, *stages, watched="plain", ranks=2)
    by_rows, _ = run("YaRN", *stages, watched="plain", ranks=2)
    assert RUN_ON in output and len(joined) == 10
    assert agree("YaRN, two pipeline stages", losses(joined), losses(by_rows), 1e-6)


def test_control_without_the_hook_positions_restart_and_are_seen_to(run):
    steps, output = run("YaRN", *JOINED, watched="without=apply_rotary_pos_emb")
    assert "YaRN rotary positions restart in each document" in output
    run_on = losses(run("YaRN", *JOINED)[0])
    assert losses(steps) != run_on  # the last digits: rotary positions are relative
    assert losses(steps) == pytest.approx(run_on, abs=1e-3)


def test_control_half_of_the_hooks_stops(checkout, corpus):
    script = [ON_CPU / "watched.py", "without=get_rotary_seq_len", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    status, output = launch(checkout, corpus, script, *JOINED, "--global-batch-size", 64)
    assert status != 0 and "for rows of 128; give --reset-position-ids" in output


def test_control_shifted_positions_have_other_losses(run):
    steps, _ = run("learned", *JOINED, "--train-iters", 1, watched="shift")
    assert abs(losses(steps)[0] - losses(run("learned", *JOINED)[0])[0]) > 1e-4
    restarted, _ = run("learned", *JOINED, "--reset-position-ids", "--train-iters", 1)
    assert abs(losses(restarted)[0] - losses(run("learned", *JOINED)[0])[0]) > 1e-4


CALLERS = """
import importlib, sys
sys.argv.append("--data-impl=bfp")
import megatron_bfp
megatron_bfp.install()
for name in ("attention", "multi_latent_attention", "experimental_attention_variant.dsa",
             "experimental_attention_variant.absorbed_mla"):
    importlib.import_module(f"megatron.core.transformer.{name}")
from megatron_bfp.attention.rotations import ROTATIONS
for module in sorted(name for name in sys.modules if name.startswith("megatron.core")):
    for name in ROTATIONS:
        function = vars(sys.modules[module]).get(name)
        if function is not None:
            print("caller", hasattr(function, "rotates_by_rows"), module, name)
"""


def test_everything_that_rotates_has_the_hook(checkout):
    """The sparse and absorbed forms of multi-latent attention too, which need a GPU to run."""
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(checkout), ENVIRONMENT["PYTHONPATH"]])}
    done = subprocess.run([sys.executable, "-c", CALLERS], capture_output=True, text=True, env=environment)
    callers = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("caller ")]
    assert done.returncode == 0, done.stderr[-3000:]
    assert {module.rpartition(".")[2] for _, module, _ in callers} >= {"attention", "dsa", "absorbed_mla"}
    unhooked = [caller for caller in callers if caller[0] == "False" and "transformer_engine" not in caller[1]]
    assert len(callers) >= 8 and not unhooked
