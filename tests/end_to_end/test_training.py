"""Raw documents to a trained model with the real launcher: ``deepspeed`` on two CPU ranks with gloo."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
from conftest import DATA, ROOT

pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

STEP = re.compile(r"^iteration (\d+)/\d+ \| loss (\S+) .* grad norm (\S+) .* consumed samples (\d+) ", re.MULTILINE)
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"],
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus of this repository's own files, tokenized and indexed by the tool."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("corpus")
    sources = sorted([*ROOT.glob("megatron_bfp/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/*.py")])
    with open(folder / "corpus.jsonl", "w") as file:
        for source in sources:
            text = source.read_text()
            for piece in [text, *text.split("\n\n\n")]:
                file.write(json.dumps({"text": piece}) + "\n")
        file.write((DATA / "nasty" / "00_good.jsonl").read_text())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<eod>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(source) for source in sources], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    command = [sys.executable, str(ROOT / "tools/preprocess_bfp.py"), "--input", str(folder / "corpus.jsonl")]
    command += ["--output-prefix", str(folder / "data"), "--tokenizer-model", str(folder / "tokenizer.json")]
    command += ["--eod-token", "<eod>", "--append-eod", "--seq-length", "128", "--split", "90,5,5", "--workers", "2"]
    subprocess.run(command, check=True, timeout=120)
    return folder


def launch(corpus, *options, ranks=2, train_iters=6):
    """Run the trainer under ``deepspeed``; returns its exit status and output."""
    command = ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port())]
    command += [str(ROOT / "examples/pretrain_gpt.py"), "--num-layers", "2", "--hidden-size", "64"]
    command += ["--num-attention-heads", "4", "--seq-length", "128", "--train-iters", str(train_iters)]
    command += ["--global-batch-size", "8", "--lr", "3e-3", "--lr-warmup-iters", "2", "--num-workers", "0"]
    command += ["--tokenizer-model", str(corpus / "tokenizer.json"), "--eod-token", "<eod>", "--split", "90,5,5"]
    if "--data-path" not in options:
        command += ["--data-path", str(corpus / "data_text_document")]
    if "--micro-batch-size" not in options:
        command += ["--micro-batch-size", "2"]
    done = subprocess.run(
        command + list(map(str, options)), capture_output=True, text=True, timeout=280, env=ENVIRONMENT, cwd=corpus
    )
    return done.returncode, done.stdout + done.stderr


def train(corpus, *options, **keywords):
    """The printed (loss, gradient norm, consumed samples) of each iteration."""
    status, output = launch(corpus, *options, **keywords)
    assert status == 0, output[-5000:]
    return {int(iteration): values for iteration, *values in STEP.findall(output)}


def as_numbers(steps):
    return [[float(loss), float(norm)] for loss, norm, _ in steps.values()]


@pytest.fixture(scope="module")
def reference(corpus):
    return train(corpus, "--zero-stage", 1)


def test_the_loss_falls_and_samples_are_counted(reference):
    losses = [float(loss) for loss, _, _ in reference.values()]
    assert losses[0] == pytest.approx(6.2, abs=0.3) and losses[-1] < losses[0] - 0.3  # ln 512 = 6.24
    assert [int(consumed) for _, _, consumed in reference.values()] == [8, 16, 24, 32, 40, 48]


def test_a_resumed_run_equals_an_uninterrupted_one(corpus, reference, tmp_path):
    checkpoints = ("--save", tmp_path / "checkpoints", "--load", tmp_path / "checkpoints", "--zero-stage", 1)
    first = train(corpus, *checkpoints, "--exit-interval", 2)
    second = train(corpus, *checkpoints)
    assert list(first) == [1, 2] and list(second) == [3, 4, 5, 6]
    assert first | second == reference


def test_the_loss_is_the_mean_over_the_targets_of_the_global_batch(corpus, reference):
    """Ranks, micro-batch size and accumulation change how a global batch is cut up, not what it teaches."""
    alone = train(corpus, "--micro-batch-size", 8, ranks=1)
    accumulated = train(corpus, "--micro-batch-size", 1)
    for other in (alone, accumulated):
        for (loss, norm), (other_loss, other_norm) in zip(as_numbers(reference), as_numbers(other), strict=True):
            assert other_loss == pytest.approx(loss, abs=2e-4)
            assert other_norm == pytest.approx(norm, rel=2e-3)


def test_bf16_without_zero_follows_fp32(corpus, reference):
    found = train(corpus, "--bf16", "--zero-stage", 0)
    for (loss, _), (expected, _) in zip(as_numbers(found), as_numbers(reference), strict=True):
        assert loss == pytest.approx(expected, abs=0.02)


def test_concatenation_trains_with_the_same_command(corpus):
    losses = [float(loss) for loss, _, _ in train(corpus, "--data-impl", "mmap", train_iters=3).values()]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_a_missing_index_is_built_by_the_trainer(corpus, tmp_path, reference):
    for suffix in (".bin", ".idx"):
        shutil.copy(corpus / f"data_text_document{suffix}", tmp_path / f"copy{suffix}")
    found = train(corpus, "--data-path", tmp_path / "copy", "--zero-stage", 1, "--train-iters", 6)
    assert found == reference
    assert os.listdir(tmp_path / "copy.bfp")[0].startswith("s128-d0-")


@pytest.mark.parametrize(
    "options, named",
    [
        (["--global-batch-size", 7], "--global-batch-size 7"),
        (["--split", "90,abc,5"], "--split '90,abc,5'"),
        (["--data-path", "nowhere"], "--data-path nowhere: no such dataset"),
    ],
)
def test_bad_options_are_one_line_and_status_2(corpus, options, named):
    before = sorted(os.listdir(corpus))
    status, output = launch(corpus, *options)
    assert status == 2
    lines = [line for line in output.splitlines() if line.startswith("pretrain_gpt: error:")]
    assert len(lines) == 1 and named in lines[0]
    assert "Traceback" not in output and sorted(os.listdir(corpus)) == before
