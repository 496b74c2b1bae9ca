"""What the examples measure of a model: losses of documents, sampled texts, values in context; and the runs that make
models."""

import subprocess
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")
pytest.importorskip("deepspeed")

from experiments import context_probe
from experiments.sampling import sample
from experiments.trained_model import TrainedModel, document_losses, load_model
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


def test_the_loss_of_a_document_is_that_of_its_chunks_alone(write_dataset):
    model, documents = trained(), documents_of(LENGTHS)
    losses, targets = document_losses(model, write_dataset(documents).prefix)
    for document, loss, count in zip(documents, losses, targets):
        expected = 0.0
        for start in range(0, len(document), SEQ_LENGTH):
            chunk = document[start : start + SEQ_LENGTH]
            answers = torch.tensor(document[start + 1 : start + 1 + SEQ_LENGTH])
            if len(answers):
                logits = model.logits(torch.tensor([chunk]), [len(chunk)])[0, : len(answers)]
                expected += torch.nn.functional.cross_entropy(logits, answers, reduction="sum").item()
        assert count == len(document) - 1
        assert loss == pytest.approx(expected, rel=1e-4)


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


def test_the_probes_report_says_what_it_found():
    def runs(share):
        values = [np.linspace(share - 5, share + 5, 100) + seed / 10 for seed in range(3)]
        return [context_probe.Result({5: value / 2, 10: value}, {5: value / 4, 10: value * 0 + 30}) for value in values]

    text = context_probe.report({"concat": runs(50), "concat_masked": runs(50), "pack": runs(75)})
    assert "With packing, the share of values predicted right at the end is higher than with concatenation." in text
    assert "Between concatenation, document mask and concatenation, no difference in the share" in text
    assert "Between packing and concatenation, no difference in the probability of the values at the end" in text
    row = next(line for line in text.splitlines() if line.startswith("| packing "))
    assert row.split("|")[2].strip().startswith("37.")  # of the first checkpoint
    assert "25.0 [25.0, 25.0]" in row


@pytest.fixture
def tiny_runs(tmp_path, monkeypatch):
    """Runs of the probe with 4 steps of 32 sequences, and two checkpoints."""
    monkeypatch.setattr(context_probe, "POINTS", 2)
    return context_probe.probe_runs(str(tmp_path), steps=4, seeds=2)


def test_a_run_is_trained_once_loaded_and_measured(tiny_runs, monkeypatch):
    monkeypatch.setattr(context_probe, "HELD_OUT", 70)
    training = tiny_runs[2]
    assert [*train_all([training], 1)] == [training]
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
def test_the_probe_runs_as_a_whole(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "context_probe.py"), "--output", str(tmp_path)]
    command += ["--steps", "40", "--seeds", "2", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    text = (tmp_path / "context_probe.md").read_text()
    assert text.strip() in done.stdout
    assert (tmp_path / "context_probe.png").read_bytes().startswith(b"\x89PNG")
    again = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT)
    assert again.returncode == 0 and text.strip() in again.stdout and "training" not in again.stderr
