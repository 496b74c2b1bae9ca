"""What is read: folders that transformers itself wrote, checkpoints and tokenizers, and what is refused in one line."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from helpers.commands import call
from helpers.datasets import write
from helpers.trainer_in_process import run_trainer
from trainer.arguments import parse_arguments
from trainer.pretrained import open_pretrained
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_bfp.errors import InputError, OptionError
from megatron_bfp.huggingface.checkpoint import TrainerCheckpoint, checkpoint_folder
from megatron_bfp.huggingface.export import shards_of
from megatron_bfp.huggingface.llama import LlamaShape, to_huggingface
from megatron_bfp.huggingface.pretrained import PretrainedLlama
from megatron_bfp.huggingface.tokenizer_files import write_tokenizer
from megatron_bfp.tokenizers import load_tokenizer

UNTOUCHED = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
VERB = "megatron-bfp export-huggingface"
EMBEDDING = "embedding.word_embeddings.weight"
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
SHAPE |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model that transformers wrote, in several files."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 50000.0})
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="20KB")
    return folder


def changed(llama, folder, **entries):
    """The same folder with other entries in its config.json."""
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows", [48, 50, 64])
def test_what_goes_in_comes_out(llama, ranks, rows):
    """The vocabulary is padded with zeros, or cut where it has rows that the tokenizer does not need."""
    model, pretrained = LlamaForCausalLM.from_pretrained(llama), PretrainedLlama(str(llama))
    expected, names = model.state_dict(), []
    for name in pretrained.shape.parameter_names():
        parts = [pretrained.part(name, rank, ranks, rows) for rank in range(ranks)]
        for key, tensor in to_huggingface(pretrained.shape, name, parts).items():
            whole = expected[key][:rows] if len(expected[key]) == 50 else expected[key]
            assert torch.equal(tensor, whole), key
            names.append(key)
        if rows == 64 and "embedding" in name:
            assert not torch.cat(parts)[50:].any() and len(torch.cat(parts)) == 64
    assert sorted(names) == sorted(expected) and pretrained.rotary_base == 50000.0


def test_a_tied_output_layer_is_the_embedding(llama, tmp_path):
    pretrained = PretrainedLlama(changed(llama, tmp_path / "tied", tie_word_embeddings=True))
    output, embedding = (pretrained.part(name, 0, 1, 50) for name in ("output_layer.weight", EMBEDDING))
    assert pretrained.is_tied and torch.equal(output, embedding)
    assert not torch.equal(PretrainedLlama(str(llama)).part("output_layer.weight", 0, 1, 50), embedding)


REFUSED = [
    ({"model_type": "gpt2"}, "its model_type is gpt2; the trainer's models have llama"),
    ({"hidden_act": "gelu"}, "its hidden_act is gelu; the trainer's models have silu"),
    ({"attention_bias": True}, "its attention_bias is True"),
    ({"mlp_bias": True}, "its mlp_bias is True"),
    ({"quantization_config": {"bits": 4}}, "its quantization_config is"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "its rope_type is llama3"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "its rope_type is linear"),
    ({"head_dim": 16}, "its head_dim is 16; the trainer's heads have hidden_size / num_attention_heads, 8"),
    ({"num_attention_heads": None}, "config.json: TypeError"),
    ({"intermediate_size": 128}, "model.layers.0.mlp.up_proj.weight: 4096 elements, where config.json says 8192"),
]


@pytest.mark.parametrize("entries, message", REFUSED)
def test_other_architectures_are_refused_by_name(llama, tmp_path, entries, message):
    folder = changed(llama, tmp_path / "other", **entries)
    with pytest.raises(OptionError, match=r"^--pretrained-checkpoint [^\n]*$") as refused:
        pretrained = PretrainedLlama(folder)
        for name in pretrained.shape.parameter_names():
            pretrained.part(name, 0, 1, 50)
    assert message in str(refused.value)


def test_a_folder_without_a_model_is_refused(llama, tmp_path):
    with pytest.raises(OptionError, match=f"{tmp_path}: holds no config.json of a Hugging Face model"):
        PretrainedLlama(str(tmp_path))
    folder = tmp_path / "damaged"
    shutil.copytree(llama, folder)
    (first, *_) = sorted(folder.glob("*.safetensors"))
    os.truncate(first, 100)
    with pytest.raises(OptionError, match="the weights must be in safetensors files"):
        PretrainedLlama(str(folder))


OPTIONS = {"--num-layers": 2, "--hidden-size": 32, "--ffn-hidden-size": 64, "--num-attention-heads": 4}
OPTIONS |= {"--num-query-groups": 2, "--rotary-base": 50000, "--seq-length": 32, "--micro-batch-size": 1}
OPTIONS |= {"--tokenizer-model": "none", "--data-path": "none", "--train-iters": 1}


def configuration(llama, **options):
    given = OPTIONS | options | {"--pretrained-checkpoint": llama}
    return parse_arguments(["--group-query-attention", *(str(word) for pair in given.items() for word in pair)])


def test_the_options_must_be_those_of_the_model(llama):
    assert open_pretrained(configuration(llama), 50).folder == str(llama)
    other = configuration(llama, **{"--num-layers": 3, "--rotary-base": 10000})
    with pytest.raises(OptionError, match="it has --num-layers 2, not 3, --rotary-base 50000, not 10000; give the"):
        open_pretrained(other, 50)
    with pytest.raises(OptionError, match="its vocabulary has 50 tokens, that of --tokenizer-model 51"):
        open_pretrained(configuration(llama), 51)


def test_shards_are_as_large_as_they_may_be():
    shape = LlamaShape(3, 32, 64, 4, 2, 50)
    names = shape.parameter_names()
    sizes = [4 * shape.size_of(name) for name in names]
    for limit in (1, max(sizes), 3 * max(sizes), sum(sizes)):
        shards = list(shards_of(shape, 4, limit))
        assert [name for shard in shards for name in shard] == names
        totals = [sum(4 * shape.size_of(name) for name in shard) for shard in shards]
        assert all(total <= limit or len(shard) == 1 for shard, total in zip(shards, totals))
        firsts = [4 * shape.size_of(shard[0]) for shard in shards]
        assert all(total + first > limit for total, first in zip(totals, firsts[1:]))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Of a run with ZeRO 3, whose tokenizer has gone."""
    folder = tmp_path_factory.mktemp("run")
    documents = [np.arange(1, length) % 300 + 1 for length in (5, 40, 17, 31, 32, 9, 70, 3, 12, 25, 8) * 3]
    prefix = write(folder / "data", documents).prefix
    run_trainer(prefix, "--train-iters", 2, "--save-interval", 1, "--zero-stage", 3, "--save", folder / "checkpoints")
    return folder / "checkpoints"


def test_bad_checkpoints_are_one_line(checkpoints, tmp_path, monkeypatch, capsys, tokenizer_file):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoints, copy)
    latest, earlier = copy / "iter_0000002", copy / "iter_0000001"
    words = ("--output", tmp_path / "out", "--tokenizer-model", tokenizer_file, "--eod-token", "<|endoftext|>")

    def error(*arguments):
        assert call(monkeypatch, VERB, *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "was saved with --tokenizer-model (size of its vocabulary) 480, not 600" in error(latest, *words)
    assert "No such file" in error(latest, "--output", tmp_path / "out")
    os.truncate(latest / "zero_pp_rank_0_mp_rank_00_optim_states.pt", 100)
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt: has 100 bytes, not" in error(copy, *words)
    (latest / "complete.json").unlink()
    assert checkpoint_folder(str(copy)) == str(earlier)
    (earlier / "complete.json").write_text("{")
    assert "complete.json: JSONDecodeError" in error(copy, *words)
    (earlier / "complete.json").unlink()
    assert "holds no complete checkpoint" in error(copy, *words)
    assert "gone: no such folder" in error("gone", *words)
    assert os.listdir(tmp_path) == ["copy"]


class Malicious:
    """What runs a command when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_nothing_in_a_checkpoint_is_executed(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoints / "iter_0000002", "copy")
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({"module": Malicious()}, f"copy/{name}")
    described = json.loads(open("copy/complete.json").read())
    described["files"][name] = os.path.getsize(f"copy/{name}")
    open("copy/complete.json", "w").write(json.dumps(described))
    with pytest.raises(InputError, match="cannot be read: Weights only load failed"):
        TrainerCheckpoint("copy").parts(EMBEDDING)
    assert not os.path.exists("executed")


@pytest.mark.parametrize("name", ["SentencePieceTokenizer", "TikTokenizer"])
def test_other_vocabularies_become_a_tokenizer_json_with_the_same_ids(name, tmp_path, train_sentencepiece, request):
    is_piece = name == "SentencePieceTokenizer"
    path = train_sentencepiece(**UNTOUCHED) if is_piece else request.getfixturevalue("megatron_tiktoken_file")
    ours = load_tokenizer(name, path)
    write_tokenizer(ours, path, str(tmp_path), 128)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("The river  and the mill.", "def f(x):\n\treturn x ** 2", "naïve 中文 \U0001f600"):
        ids = theirs(text).input_ids
        assert ids == ours.encode_batch([text])[0].tolist() and theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.eod and theirs.bos_token_id == ours.bos and theirs.model_max_length == 128


@pytest.mark.parametrize("options, reason", [(UNTOUCHED | {"model_type": "unigram"}, "unigram"), ({}, "changes texts")])
def test_a_vocabulary_that_transformers_cannot_run_is_refused(tmp_path, train_sentencepiece, options, reason):
    path = train_sentencepiece(**options)
    with pytest.raises(OptionError, match=f"{reason}.*; give --tokenizer-model a tokenizer.json"):
        write_tokenizer(load_tokenizer("SentencePieceTokenizer", path), path, str(tmp_path), 128)


def test_a_tokenizer_folder_keeps_its_settings_but_not_what_adds_tokens(tmp_path, tokenizer_folder):
    config = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>", "add_bos_token": True, "tokenizer_class": "Other"}
    folder = tokenizer_folder(config)
    (tmp_path / "out").mkdir()
    ours = load_tokenizer("HuggingFaceTokenizer", folder)
    write_tokenizer(ours, folder, str(tmp_path / "out"), 128)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.eos_token, theirs.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert theirs("The river").input_ids == ours.encode_batch(["The river"])[0].tolist()
