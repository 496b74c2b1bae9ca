"""Models go out to transformers and come back: what transformers computes with an exported model is what the trainer
computes, and training goes on from it with the loss that it had.
"""

import json
import math
import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers.commands import call, files_in
from helpers.datasets import ROOT
from helpers.launching import ENVIRONMENT, free_port, make_corpus, trainer
from helpers.trainer_in_process import run_trainer
from huggingface.evaluate import evaluate as run_lm_eval
from huggingface.evaluate import task_of_documents
from huggingface.generate import generate
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_bfp.tokenizers import load_tokenizer

VERB = "megatron-bfp export-huggingface"
MODEL = ("--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 4, "--ffn-hidden-size", 256)
MODEL += ("--group-query-attention", "--num-query-groups", 2, "--init-method-std", 0.1)
VOCABULARY = 512


class Run(NamedTuple):
    """A run of the trainer that has ended."""

    checkpoints: str
    logits: dict
    """Of ten sequences: "tokens" and "cu_seqlens" of each, and "logits" [10, L, padded vocabulary]."""
    events: list
    """Of its log."""

    def validation_loss(self):
        return [event["loss"] for event in self.events if event["event"] == "valid"][-1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def train(corpus, folder, *options, ranks, launcher="ranks"):
    """Train for a few steps with the real launcher, or with one that imports once."""
    command = [sys.executable, str(ROOT / "tests/helpers/programs/ranks.py"), str(ranks), str(free_port())]
    if launcher == "deepspeed":
        command = ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port())]
    script = "tests/helpers/programs/trainer_with_logits.py"
    options = (*options, "--eval-interval", 6, "--json-log", folder / "log.jsonl", "--save", folder / "checkpoints")
    command += trainer(corpus, *MODEL, *options, script=script)
    environment = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "", "LOGITS": str(folder / "logits.npz")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=corpus)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return Run(str(folder / "checkpoints"), dict(np.load(folder / "logits.npz")), events)


@pytest.fixture(scope="module")
def sharded(corpus, tmp_path_factory):
    """ZeRO 3 on two ranks, by the real launcher."""
    return train(corpus, tmp_path_factory.mktemp("zero3"), "--zero-stage", 3, ranks=2, launcher="deepspeed")


@pytest.fixture(scope="module")
def exported(sharded, tmp_path_factory):
    """The model of that run for transformers, in two files."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(sharded.checkpoints, folder, "--max-shard-size", "400KB")
    return folder


def export(checkpoints, folder, *options):
    with pytest.MonkeyPatch.context() as patch:
        assert call(patch, VERB, checkpoints, "--output", folder, *options) == 0
    return folder


def largest_difference(folder, logits):
    """Between transformers' logits of each document alone and the trainer's of whole sequences."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    difference = 0.0
    for tokens, cu_seqlens, of_trainer in zip(logits["tokens"], logits["cu_seqlens"], logits["logits"], strict=True):
        ends = np.unique(cu_seqlens)
        for begin, end in zip(ends[:-1], ends[1:], strict=True):
            with torch.no_grad():
                alone = model(torch.as_tensor(tokens[None, begin:end].astype(np.int64))).logits[0].numpy()
            assert alone.shape == (end - begin, VOCABULARY)
            difference = max(difference, np.abs(alone - of_trainer[begin:end, :VOCABULARY]).max())
    return difference


def altered(folder, copy, change):
    """A copy of a model, with what ``change`` does to its weights by name."""
    copy.mkdir()
    weights = {}
    for name in os.listdir(folder):
        if name.endswith(".safetensors"):
            weights |= load_file(folder / name)
        elif "index" not in name:
            (copy / name).write_bytes((folder / name).read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in change(weights).items()}, copy / "model.safetensors")
    return copy


def interleaved(weights):
    """Query and key heads in the convention that rotates neighbouring dimensions."""
    heads = {name: tensor for name, tensor in weights.items() if "q_proj" in name or "k_proj" in name}
    return weights | {
        name: tensor.view(-1, 2, 8, 64).transpose(1, 2).reshape(tensor.shape) for name, tensor in heads.items()
    }


def ungrouped(weights):
    """Query heads in an order that forgets which group they are of."""
    heads = {name: tensor for name, tensor in weights.items() if "q_proj" in name}
    return weights | {
        name: tensor.view(2, 2, 16, 64).transpose(0, 1).reshape(tensor.shape) for name, tensor in heads.items()
    }


def test_transformers_computes_what_the_trainer_does(sharded, exported, tmp_path):
    assert len(sharded.logits["tokens"]) == 10 and np.abs(sharded.logits["logits"]).max() > 1
    assert largest_difference(exported, sharded.logits) < 1e-4
    for change in (interleaved, ungrouped):
        assert largest_difference(altered(exported, tmp_path / change.__name__, change), sharded.logits) > 1e-2


CELLS = [
    pytest.param(1, 2, 4),
    *(pytest.param(*cell, marks=pytest.mark.slow) for cell in [(0, 1, 2), (0, 2, 2), (1, 1, 2), (2, 2, 4), (3, 2, 4)]),
]


@pytest.mark.parametrize("zero_stage, tensor_ranks, ranks", CELLS)
def test_whatever_the_zero_stage_and_tensor_parallelism(corpus, tmp_path, zero_stage, tensor_ranks, ranks):
    """The vocabulary of these models is padded, to 576 tokens or more."""
    options = ("--zero-stage", zero_stage, "--tensor-model-parallel-size", tensor_ranks)
    run = train(corpus, tmp_path, *options, "--make-vocab-size-divisible-by", 96, ranks=ranks)
    assert run.logits["logits"].shape[-1] == 576
    assert largest_difference(export(run.checkpoints, tmp_path / "model"), run.logits) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_the_weights_of_the_forward_pass_are_exported(corpus, tmp_path, zero_stage):
    """In bf16 they are those of transformers in fp32 but for the rounding of what is computed with them."""
    run = train(corpus, tmp_path, "--bf16", "--zero-stage", zero_stage, ranks=2)
    folder = export(run.checkpoints, tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert largest_difference(folder, run.logits) < 0.05
    wide = export(run.checkpoints, tmp_path / "wide", "--dtype", "float32")
    narrow, wide = (load_file(path / "model.safetensors") for path in (folder, wide))
    assert all(torch.equal(wide[name], narrow[name].float()) for name in narrow)


def test_a_rerun_gives_the_same_bytes_and_replaces_nothing_unasked(sharded, exported, tmp_path, monkeypatch, capsys):
    again = export(f"{sharded.checkpoints}/iter_0000006", tmp_path / "model", "--max-shard-size", "400KB")
    assert (
        files_in(again)
        == files_in(exported)
        == [
            "config.json",
            "generation_config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    )
    before = {name: (again / name).read_bytes() for name in files_in(again)}
    assert before == {name: (exported / name).read_bytes() for name in before}
    capsys.readouterr()
    assert call(monkeypatch, VERB, sharded.checkpoints, "--output", again) == 2
    assert capsys.readouterr().err == (
        f"{VERB}: error: {again}: exists already; give --overwrite to replace it, or another folder\n"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    assert call(monkeypatch, VERB, sharded.checkpoints, "--output", tmp_path / "other", "--overwrite") == 2
    assert "holds other files than a model's" in capsys.readouterr().err
    export(sharded.checkpoints, again, "--overwrite")
    assert "model.safetensors" in files_in(again) and sorted(os.listdir(tmp_path)) == ["model", "other"]


def test_its_tokenizer_is_that_of_training(corpus, exported):
    ours = load_tokenizer("HuggingFaceTokenizer", str(corpus / "tokenizer.json"), "<eod>")
    theirs = AutoTokenizer.from_pretrained(exported)
    for text in ("The river and the mill.", "def f(x):\n\treturn  x ** 2", "naïve 中文 \U0001f600"):
        assert theirs(text).input_ids == ours.encode_batch([text])[0].tolist()
    assert (theirs.eos_token, theirs.eos_token_id, theirs.bos_token_id) == ("<eod>", ours.eod, None)


def test_it_generates(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text, prompt = generate(str(exported), "The river", 8, 0.0), tokenizer.decode(tokenizer("The river").input_ids)
    assert text.startswith(prompt) and len(text) > len(prompt)
    model = AutoModelForCausalLM.from_pretrained(exported)
    prompt = torch.tensor([[5, 9, 14]])
    tokens = model.generate(prompt, max_new_tokens=3, do_sample=False)[0].tolist()
    for length in range(3, len(tokens)):
        assert tokens[length] == model(torch.tensor([tokens[:length]])).logits[0, -1].argmax()


def test_lm_eval_measures_it(exported, tmp_path, monkeypatch):
    """Its bits per byte are those of the model, each document after an EOD, as lm-eval has it without a BOS."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    documents = ["The river and the mill.", "def f(x):\n    return x"]
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    results = run_lm_eval(str(exported), [task_of_documents(str(path))], device="cpu")["documents"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    nats = 0.0
    for text in documents:
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text).input_ids]])
        with torch.no_grad():
            nats += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    bits = nats / math.log(2) / sum(len(text.encode()) for text in documents)
    assert abs(results["bits_per_byte,none"] - bits) < 1e-4 * bits


def validate(corpus, folder, *options):
    """The validation loss that a run begins with, in this process: nothing is learned at a learning rate of 0."""
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(corpus / "tokenizer.json"), "<eod>")
    options = ("--ffn-hidden-size", 256, *options) if "--ffn-hidden-size" not in options else options
    log = folder / "import.jsonl"
    log.unlink(missing_ok=True)
    given = ("--hidden-size", 64, "--group-query-attention", "--num-query-groups", 2, "--seq-length", 128)
    given += ("--split", "90,5,5", "--train-iters", 1, "--lr", 0, "--eval-interval", 1, "--json-log", log)
    given += ("--make-vocab-size-divisible-by", 128)
    _, output = run_trainer(corpus / "data_text_document", *given, *options, tokenizer=tokenizer)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "valid"][-1], output


def test_training_goes_on_with_the_loss_it_had(corpus, sharded, exported, tmp_path):
    loss, output = validate(corpus, tmp_path, "--pretrained-checkpoint", exported)
    assert f"started from the weights of {exported}\n" in output
    assert abs(loss - sharded.validation_loss()) < 1e-5
    of_random_weights, _ = validate(corpus, tmp_path)
    permuted = altered(exported, tmp_path / "ungrouped", ungrouped)
    of_permuted_heads, _ = validate(corpus, tmp_path, "--pretrained-checkpoint", permuted)
    assert of_random_weights - loss > 0.1 and abs(of_permuted_heads - loss) > 1e-4


def test_it_is_learned_from_there_with_tensor_parallelism(corpus, sharded, exported, tmp_path):
    """Two ranks read their halves of the weights; the first step has the loss of the model, later ones a lower one."""
    options = ("--pretrained-checkpoint", exported, "--tensor-model-parallel-size", 2, "--zero-stage", 1)
    run = train(corpus, tmp_path, *options, ranks=2)
    losses = [event["loss"] for event in run.events if event["event"] == "train"]
    before = [event["loss"] for event in sharded.events if event["event"] == "train"]
    assert losses[0] < before[-1] + 0.1 < before[0]
    assert run.validation_loss() < sharded.validation_loss() - 0.1
