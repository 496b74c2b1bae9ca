"""What the examples measure of a model: losses of documents, sampled texts, values in context; and the runs that make
models."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")
pytest.importorskip("deepspeed")

from experiments import context_probe
from experiments.data_methods import COMPARISONS, METHODS
from experiments.sampling import sample
from experiments.trained_model import TrainedModel, load_model, target_losses
from experiments.training_runs import TrainingRun, train_all
from helpers.datasets import ROOT, documents_of
from helpers.launching import ENVIRONMENT
from helpers.megatron_helpers import Tokenizer, initialize_megatron, model_options
from trainer.config import TrainerConfig
from trainer.model import build_model

from megatron_bfp import InputError

SEQ_LENGTH = 32
LENGTHS = [5, 40, 1, 17, 31, 32, 9, 70, 3]
VOCABULARY = 320


def trained(**changes):
    """A model with random weights."""
    initialize_megatron()
    torch.manual_seed(2)
    shape = {"seq_length": SEQ_LENGTH, "make_vocab_size_divisible_by": 128, **changes}
    model = build_model(model_options(**shape), VOCABULARY).eval()
    config = TrainerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        data_path=("none",),
        seq_length=SEQ_LENGTH,
        seed=3,
        tokenizer_model="none",
        micro_batch_size=2,
        train_iters=1,
    )
    return TrainedModel(model, config, Tokenizer())


def test_the_loss_of_a_token_is_that_in_its_chunk_alone(write_dataset):
    model, documents = trained(), documents_of(LENGTHS)
    losses = np.split(target_losses(model, write_dataset(documents).prefix), np.cumsum(LENGTHS)[:-1])
    for document, of_document in zip(documents, losses):
        expected = [np.nan]
        for start in range(0, len(document), SEQ_LENGTH):
            chunk = document[start : start + SEQ_LENGTH]
            answers = torch.tensor(document[start + 1 : start + 1 + SEQ_LENGTH])
            if len(answers):
                logits = model.logits(torch.tensor([chunk]), [len(chunk)])[0, : len(answers)]
                expected += torch.nn.functional.cross_entropy(logits, answers, reduction="none").tolist()
        assert of_document == pytest.approx(np.array(expected), rel=1e-4, nan_ok=True)


def test_losses_are_of_every_token_however_the_model_was_trained(write_dataset):
    """Targets only, balanced batches and the like are of the training."""
    model, prefix = trained(), write_dataset(documents_of(LENGTHS)).prefix
    expected = target_losses(model, prefix)
    assert np.isnan(expected).sum() == len(LENGTHS)
    for changes in (
        {"targets_only": True, "even_sequences": True, "balance_batches": 4},
        {"data_impl": "mmap", "dataloader_inter_document_masking": True, "eod_mask_loss": True},
    ):
        losses = target_losses(model._replace(config=dataclasses.replace(model.config, **changes)), prefix)
        assert losses == pytest.approx(expected, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("groups", [None, 2])
def test_sampling_with_memory_gives_what_whole_texts_give(groups):
    """The prompts are more than are continued at once, and the texts longer than a training sequence would be."""
    model = trained(group_query_attention=groups is not None, num_query_groups=groups or 1)
    model = model._replace(tokenizer=types.SimpleNamespace(vocab_size=VOCABULARY))
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (70, 6))
    added = sample(model, prompts, 5, temperature=0.7, seed=4)
    uniform = np.random.default_rng(4).random((70, 5))
    texts = prompts
    for step in range(5):
        logits = model.logits(torch.from_numpy(texts), [texts.shape[1]] * 70)[:, -1]
        cumulative = (logits.double() / 0.7).softmax(-1).cumsum(-1).numpy()
        tokens = (cumulative < uniform[:, step, None]).sum(1)
        assert (np.abs(cumulative - uniform[:, step, None]).min(1) < 1e-6).sum() == 0, "too close to compare"
        assert (added[:, step] == tokens).all()
        texts = np.concatenate([texts, tokens[:, None]], 1)
    assert len(np.unique(added)) > 100
    # nothing of it stays in the model
    assert (sample(model, prompts, 5, temperature=0.7, seed=4) == added).all()


def test_probe_documents_define_a_name_once_and_use_it_once():
    documents = context_probe.make_documents(300, seed=1)
    seq_length, pairs = context_probe.SEQ_LENGTH, context_probe.PAIRS
    assert documents.lengths.min() >= seq_length // 2 and documents.lengths.max() <= 0.9 * seq_length
    for tokens, length, definitions, uses in zip(*documents):
        document, beside = tokens[:length], tokens[length:]
        assert document[-1] == beside[-1] == context_probe.EOD_ID
        assert (tokens == context_probe.EOD_ID).sum() == 2
        first_word, names = context_probe.FIRST_WORD, document[uses]
        assert (document < context_probe.NAMES).sum() == pairs and len(set(names)) == pairs
        assert (document[uses + 1] == document[definitions]).all() and (document < first_word).sum() == 3 * pairs
        assert ((document[definitions] - context_probe.NAMES) // context_probe.VALUES == names).all()
        assert definitions.max() < uses.min() and (beside >= first_word).all()


def test_cut_uses_are_counted():
    documents = context_probe.make_documents(2000, seed=1)
    half = documents._replace(uses=documents.definitions + 64)  # parted by half of the cuts
    assert context_probe.share_cut(half, seed=1) == pytest.approx(0.5, abs=0.03)
    near = documents._replace(uses=documents.definitions)
    assert context_probe.share_cut(near, seed=1) == 0


def probe_results(area, spread=0.1):
    """Runs whose values right go from half of ``area`` to one and a half of it."""
    documents = np.linspace(-5, 5, context_probe.HELD_OUT)
    runs = []
    for seed in range(3):
        middle = area + documents + seed * spread
        runs.append(context_probe.Result({5: middle / 2, 10: middle, 15: middle * 1.5}, {5: middle, 10: middle}))
        runs[-1].probability[15] = middle
    return runs


def test_the_probes_report_says_what_it_found():
    results = {"concat": probe_results(50), "concat_masked": probe_results(50, spread=-0.1), "pack": probe_results(60)}
    text = context_probe.report(results, METHODS, COMPARISONS)
    assert "With packing, the endpoint is higher than with concatenation." in text
    assert "Between concatenation, document mask and concatenation, no difference in the endpoint" in text
    levels, difference, _, curve, _ = (line.split("|") for line in text.splitlines() if line.startswith("| packing "))
    assert levels[2].strip().startswith("60.1 [") and difference[2].strip() == "10.00 [10.00, 10.00]"
    assert levels[3].strip() == "13 (13 to 13)"  # 60 at step 10, 90 at step 15
    assert curve[2].strip().startswith("30.")


def test_steps_until_learned_are_interpolated_and_may_be_never():
    def steps(shares):
        curve = {25 * (n + 1): np.full(4, share) for n, share in enumerate(shares)}
        return context_probe.steps_until_learned(context_probe.Result(curve, curve))

    assert steps([10.0, 70.0, 90.0]) == 62.5 and steps([100.0, 10.0]) == 20 and steps([10.0, 79.9]) == np.inf
    assert steps([10.0, 80.0, 60.0]) == 50
    results = {name: probe_results(area) for name, area in (("concat", 20), ("concat_masked", 50), ("pack", 60))}
    results["pack"][0] = probe_results(20)[0]
    text = context_probe.report(results, METHODS, COMPARISONS)
    assert "| above 15 (above 15 to above 15) |" in text and "| 13 (13 to above 15) " in text


@pytest.fixture
def tiny_runs(tmp_path, monkeypatch):
    """Runs of the probe with 4 steps of 32 sequences, and two checkpoints."""
    monkeypatch.setattr(context_probe, "POINTS", 2)
    return context_probe.probe_runs(str(tmp_path), steps=4, seeds=[1, 2])


def test_a_run_is_trained_once_loaded_and_measured(tiny_runs, monkeypatch):
    monkeypatch.setattr(context_probe, "HELD_OUT", 70)
    training = tiny_runs[2]
    measured = []
    assert [*train_all([training], 1, measured.append)] == [training] == measured
    assert training.is_done()
    result = context_probe.measure(training)
    assert sorted(result.right) == sorted(result.probability) == [2, 4]
    assert result.right[4].shape == result.probability[4].shape == (70,)
    assert set(np.unique(result.right[4] * context_probe.PAIRS / 100)) <= set(range(context_probe.PAIRS + 1))
    assert 0 < result.probability[4].min() and result.probability[4].max() < 100
    log = open(f"{training.folder}/train.log").read()
    assert [*train_all([training], 1)] == [training] and open(f"{training.folder}/train.log").read() == log
    other = TrainingRun("other", training.folder, {**training.options, "hidden-size": 32})
    with pytest.raises(InputError, match="does not hold the whole model"):
        load_model(other.trainer_options(), other.checkpoint())


@pytest.mark.slow
def test_a_trainer_that_fails_is_an_error_that_names_its_log(tiny_runs):
    training = TrainingRun("wrong", tiny_runs[0].folder, {**tiny_runs[0].options, "data-path": "nowhere"})
    with pytest.raises(InputError, match=r"wrong: the trainer ended with status 2 .*train\.log"):
        [*train_all([training], 1)]


@pytest.mark.slow
def test_the_probe_gives_the_same_results_after_a_kill(tmp_path):
    """A minute of training. All processes are killed after the first checkpoint, and the same command goes on; then the
    run that was killed is made again undisturbed."""
    command = [sys.executable, str(ROOT / "examples" / "context_probe.py"), "--output", str(tmp_path)]
    command += ["--steps", "40", "--seeds", "2", "--jobs", "2"]
    killed = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    run = tmp_path / "steps40" / "concat_seed1"
    end = time.monotonic() + 300
    while not [*run.glob("checkpoints/*/complete.json")]:
        assert killed.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (run / "result.json").exists()

    def finish():
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr[-3000:]
        text = (tmp_path / "context_probe.md").read_text()
        assert text.strip() in done.stdout
        return text, done.stderr

    text, progress = finish()
    assert (run / "train.log").read_text().count("attention kernel") == 2, "not resumed"
    assert "6 of 6 runs are done, about 0 minutes left" in progress
    assert (tmp_path / "context_probe.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((run / "result.json").read_text())
    shutil.rmtree(run)
    again, progress = finish()
    assert json.loads((run / "result.json").read_text()) == result and again == text
    assert progress.count("trained in") == 1
    assert "training" not in finish()[1]
