"""The preflight finds what differs between nodes: processes on this host in folders of their own, one for each node."""

import argparse
import json
import os
import shutil
import socket
from collections import namedtuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from cluster.indexes import is_built_at_start
from cluster.options import run_options
from cluster.preflight import inspect
from cluster.rendezvous import GREETING, _missing, collect
from helpers.datasets import documents_of, write
from helpers.launching import ENVIRONMENT, free_port
from helpers.preflight_nodes import TRAINED, make_node, make_nodes, preflight
from trainer.checkpoints.save_folder import smallest_checkpoint

from megatron_bfp import IndexedDatasetError
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, cached_index_directory


@pytest.fixture
def nodes(tmp_path):
    """Folders of three equal nodes."""
    return make_nodes(tmp_path)


def problems(result):
    """The lines of the node of rank 0; every node must have failed."""
    statuses, outputs = result
    assert statuses == [2] * len(statuses), outputs
    return outputs[0].splitlines()


def test_equal_nodes_agree(nodes):
    statuses, outputs = preflight(nodes)
    assert statuses == [0, 0, 0], outputs
    assert outputs[0].startswith("preflight: 3 nodes agree: ") and "torch " in outputs[0] and outputs[1:] == ["", ""]


def test_fault_A13_ids_outside_the_vocabulary_are_found(tmp_path):
    from cluster.preflight import check_tokenizer
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE({chr(0x100 + i): i for i in range(128)}, []))
    tokenizer.add_special_tokens(["<eod>"])  # 129 words: an embedding of 256 rows
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "fine", [[5, 6], [7, 255]])
    write(tmp_path / "other", [[5, 6], [7, 256]])
    words = [*TRAINED, *EOD, "--tokenizer-model", str(tmp_path / "tokenizer.json"), "--data-path"]
    words += [str(tmp_path / "fine"), str(tmp_path / "missing")]
    assert check_tokenizer(run_options("pretrain_gpt", words))
    trained = run_options("pretrain_gpt", [*words, str(tmp_path / "other")])
    reason = "other.bin: document 1 holds the token id 256, the model's vocabulary ends at 255"
    with pytest.raises(IndexedDatasetError, match=reason):
        check_tokenizer(trained)
    check_tokenizer(run_options("pretrain_gpt", [*words, str(tmp_path / "other"), "--make-vocab-size-div", "300"]))


@pytest.mark.case(29)
def test_a_missing_index_is_found_on_its_node(nodes):
    shutil.rmtree(nodes[1] / "data.bfp/s64-d0-8")
    (line,) = problems(preflight(nodes))
    assert line.startswith(
        "preflight: error: node node-b: data.bfp: there is no sequence index s64-d0-8, only s64-d8-10. Build it: "
    )
    assert line.endswith("megatron-bfp index data --seq-length 64 --split 80,20")


def test_another_idx_is_found(nodes):
    """A dataset made of other documents, with its own, valid indexes."""
    shutil.rmtree(nodes[2])
    make_node(nodes[2])
    lengths = [7, 40, 12, 64, 3, 30, 9, 21, 6, 10]
    dataset = write(nodes[2] / "data", documents_of(lengths))
    for first, end in ((0, 8), (8, 10)):
        build(dataset, IndexKey(64, first, end), f"{dataset.prefix}.bfp", overwrite=True)
    lines = problems(preflight(nodes))
    assert any(line.startswith("preflight: error: node node-c: data.idx is ") for line in lines)
    assert all("node node-c: data" in line and "on node-a, node-b it is" in line for line in lines)


def test_another_bin_is_found(nodes):
    """Other tokens in documents of the same lengths: the .idx and its indexes are the same."""
    write(nodes[2] / "data", documents_of([7, 40, 12, 64, 3, 30, 9, 21, 5, 11], first_token=2))
    (line,) = problems(preflight(nodes))
    assert line.startswith("preflight: error: node node-c: data.bin is ")


def test_an_idx_that_its_index_was_not_built_from_is_found(nodes):
    write(nodes[1] / "data", documents_of([8, 39, 12, 64, 3, 30, 9, 21, 5, 11]))
    lines = problems(preflight(nodes))
    assert len([line for line in lines if "node node-b: " in line and "the fingerprint differs" in line]) == 1


def test_another_version_of_a_package_is_found(nodes, tmp_path):
    other = tmp_path / "other"
    (other / "deepspeed-0.1.2.dist-info").mkdir(parents=True)
    (other / "deepspeed-0.1.2.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1.2\n"
    )
    path = {"PYTHONPATH": f"{other}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    (line,) = problems(preflight(nodes, b=path))
    assert line.startswith("preflight: error: node node-b: deepspeed is 0.1.2, on node-a, node-c it is ")


def test_missing_gpus_are_found(nodes):
    (line,) = problems(preflight(nodes[:1], gpus=8, a={"CUDA_VISIBLE_DEVICES": ""}))
    assert line == "preflight: error: node node-a: 0 GPUs, 8 are needed (GPUS_PER_NODE)"


def test_another_tokenizer_is_found(nodes):
    text = (nodes[1] / "tokenizer.json").read_text()
    (nodes[1] / "tokenizer.json").write_text(text.replace('"b"', '"c"'))
    (line,) = problems(preflight(nodes))
    assert line.startswith("preflight: error: node node-b: tokenizer is ")


def test_a_taken_port_is_found(nodes):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        statuses, outputs = preflight(nodes, port=port, starting=1)
    assert statuses == [2]
    reason = f"port {port} cannot be used: Address already in use; choose another MASTER_PORT"
    assert outputs == [f"preflight: error: node node-a: {reason}\n"]


@pytest.mark.slow
def test_a_node_that_does_not_come_is_counted(nodes):
    statuses, outputs = preflight(nodes, starting=2, timeout=10)
    assert statuses == [2, 2]
    assert "1 of 3 nodes did not report" in outputs[0] and ": rank 2; these did: node-a, node-b" in outputs[0]
    assert _missing(
        [{"rank": 1, "node": "b"}], argparse.Namespace(nodes=2, master_addr="a", master_port=1), 10.0, ["a", "b"]
    ).endswith("10 s: a; these did: b")


def problems_here(node, monkeypatch, *words, trainer="pretrain_gpt"):
    """What a node sees by itself, without a process for it."""
    monkeypatch.chdir(node)
    trained = run_options(trainer, [*TRAINED, *words])
    return inspect(argparse.Namespace(gpus_per_node=0, vocab_size="3"), trained)["problems"]


EOD = ("--eod-token", "<eod>")


def test_fault_A15_preflight_looks_for_the_index_with_the_cap(nodes, monkeypatch):
    cap = (*EOD, "--max-documents-per-sequence", "2")
    (line,) = problems_here(nodes[0], monkeypatch, *cap)
    assert "there is no sequence index s64-d0-8-m2" in line
    assert line.endswith("megatron-bfp index data --seq-length 64 --max-documents-per-sequence 2 --split 80,20")
    dataset = IndexedDataset("data")
    for first, end in ((0, 8), (8, 10)):
        build(dataset, IndexKey(64, first, end, 2), "data.bfp")
    assert problems_here(nodes[0], monkeypatch, *cap) == []
    shutil.rmtree("data.bfp/s64-d0-8")  # of a run without the cap
    assert problems_here(nodes[0], monkeypatch, *cap) == []
    assert len(problems_here(nodes[0], monkeypatch, *EOD)) == 1


def test_preflight_looks_for_the_index_of_even_sequences(nodes, monkeypatch):
    even = (*EOD, "--even-sequences")
    (line,) = problems_here(nodes[0], monkeypatch, *even)
    assert "there is no sequence index s64-d0-8-e" in line
    assert line.endswith("megatron-bfp index data --seq-length 64 --even-sequences --split 80,20")
    dataset = IndexedDataset("data")
    for first, end in ((0, 8), (8, 10)):
        build(dataset, IndexKey(64, first, end, None, True), "data.bfp")
    shutil.rmtree("data.bfp/s64-d0-8")
    assert problems_here(nodes[0], monkeypatch, *even) == []
    assert len(problems_here(nodes[0], monkeypatch, *EOD)) == 1


def test_fault_A15_preflight_looks_under_the_data_cache_path(nodes, monkeypatch):
    monkeypatch.chdir(nodes[0])
    directory = cached_index_directory(IndexedDataset("data"), "cache")
    os.makedirs("cache")
    os.rename("data.bfp", directory)
    (line,) = problems_here(nodes[0], monkeypatch, *EOD)
    assert "there is no sequence index s64-d0-8." in line
    cache = (*EOD, "--data-cache-path", "cache")
    assert problems_here(nodes[0], monkeypatch, *cache) == []
    with open(os.path.join(directory, "s64-d0-8", "index.json"), "ab") as file:  # it is opened, not only looked for
        file.write(b" ")
    (line,) = problems_here(nodes[0], monkeypatch, *cache)
    assert "the sequence index is damaged" in line
    shutil.rmtree(directory)
    (line,) = problems_here(nodes[0], monkeypatch, *cache)
    assert line.startswith(f"data.bfp and {directory}: there is no sequence index s64-d0-8")


def test_fault_A15_an_index_that_only_training_can_build_is_no_problem(nodes, monkeypatch):
    """Where the data cannot be written, no command builds it beside them: training does, under the cache path."""
    monkeypatch.chdir(nodes[0])
    shutil.rmtree("data.bfp")
    may_write = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != "." and may_write(path, mode))
    assert problems_here(nodes[0], monkeypatch, *EOD, "--data-cache-path", "cache") == []
    assert problems_here(nodes[0], monkeypatch, *EOD, "--data-cache-path", "cache", "--even-sequences") == []
    assert len(problems_here(nodes[0], monkeypatch, *EOD)) == 1


def test_fault_A15_preflight_looks_for_what_is_trained_after_the_recipe(nodes, monkeypatch):
    write(nodes[0] / "other", documents_of([5] * 10))
    for words, missing in (
        (("--seq-length", "32"), "data.bfp: there is no sequence index s32-d0-8"),
        (("--split", "50,50"), "data.bfp: there is no sequence index s64-d0-5"),
        (("--data-path", "0.5", "data", "0.5", "other"), "other.bfp: there is no sequence index s64-d0-8"),
        (("--data-path", "absent"), "absent.idx: no such file"),
        (("--tokenizer-model", "absent.json"), "absent.json"),
    ):
        (line,) = problems_here(nodes[0], monkeypatch, *EOD, *words)
        assert missing in line
    assert problems_here(nodes[0], monkeypatch, *EOD, "--seq-length", "32", "--data-impl", "mmap") == []
    shutil.rmtree("data.bfp/s64-d8-10")
    assert len(problems_here(nodes[0], monkeypatch, *EOD)) == 1  # valid, as --eval-interval is among the options


@pytest.mark.parametrize("trainer", ["megatron_lm", "megatron_deepspeed"])
def test_fault_A15_preflight_knows_megatrons_options(nodes, monkeypatch, trainer):
    """Its three splits; its tokenizers, of which some cannot be loaded here."""
    words = ("--data-impl", "bfp", "--tokenizer-type", "HFTokenizer" if "deep" in trainer else "HuggingFaceTokenizer")
    assert problems_here(nodes[0], monkeypatch, *words, trainer=trainer) == []
    (line,) = problems_here(nodes[0], monkeypatch, *words, "--split", "80,10,10", trainer=trainer)
    assert "there is no sequence index s64-d8-9" in line
    build(IndexedDataset("data"), IndexKey(64, 8, 9), "data.bfp")
    (line,) = problems_here(nodes[0], monkeypatch, *words, "--split", "80,10,10", trainer=trainer)
    assert "there is no sequence index s64-d9-10" in line
    other = ("--tokenizer-type", "GPT2BPETokenizer", "--tokenizer-model")
    assert problems_here(nodes[0], monkeypatch, *words, *other, "data.idx", trainer=trainer) == []
    (line,) = problems_here(nodes[0], monkeypatch, *words, *other, "absent", trainer=trainer)
    assert "absent" in line


def test_fault_C03_preflight_tries_to_save(nodes, monkeypatch, tmp_path):
    folder = tmp_path / "checkpoints"
    assert problems_here(nodes[0], monkeypatch, *EOD, "--save", str(folder)) == []
    (line,) = problems_here(nodes[0], monkeypatch, *EOD, "--save", "/proc/checkpoints")
    assert line.startswith("--save /proc/checkpoints: cannot be written: ")
    assert problems_here(nodes[0], monkeypatch, *EOD) == []  # no --save at all


def test_fault_C03_preflight_knows_what_a_checkpoint_takes(nodes, monkeypatch, tmp_path):
    """Of the whole model, not of one tensor-parallel rank."""
    words = ("--save", str(tmp_path), "--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "8")
    layers = 2 * (4 * 64 * 64 + 3 * 64 * 256)  # two layers of attention and SwiGLU
    matrices, norms = layers + 2 * 16 * 64, 5 * 64  # embedding and output of 3 words, padded to 16
    needed = smallest_checkpoint(matrices + 2 * norms)
    usage = namedtuple("usage", "total used free")
    for free, problems in ((needed, 0), (needed - 1, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**12, 0, free))
        assert len(problems_here(nodes[0], monkeypatch, *EOD, *words)) == problems


def test_fault_C03_a_node_that_cannot_save_is_named(nodes):
    (nodes[0] / "checkpoints").mkdir()
    (nodes[1] / "checkpoints").write_text("a file")
    (line,) = problems(preflight(nodes[:2], "--save", "checkpoints"))
    assert line.startswith("preflight: error: node node-b: --save checkpoints: not a folder")


def test_an_index_with_another_cap_is_built_at_start(nodes, monkeypatch):
    monkeypatch.chdir(nodes[0])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    dataset = IndexedDataset("data")
    directory = cached_index_directory(dataset, "cache")
    for cap, is_missing in ((None, False), (3, True)):
        words = [*TRAINED, *EOD, "--data-cache-path", "cache"]
        options = run_options("pretrain_gpt", [*words, *(["--max-documents-per-sequence", str(cap)] if cap else [])])
        build(dataset, IndexKey(64, 0, 8), directory)
        assert is_built_at_start(options, dataset, "train") is is_missing
        if is_missing:
            build(dataset, IndexKey(64, 0, 8, cap), directory)
            assert not is_built_at_start(options, dataset, "train")


def test_another_program_that_connects_is_no_node():
    """Only a node's greeting counts, and what it says is not read without."""
    findings = {"node": "a", "rank": 0, "facts": {}, "problems": []}
    options = argparse.Namespace(nodes=2, timeout=5.0, master_port=free_port(), master_addr="127.0.0.1")
    listener = socket.create_server(("127.0.0.1", options.master_port))
    connections = []
    for greeting in ("something else", GREETING):
        connection = socket.create_connection(("127.0.0.1", options.master_port))
        node = {"greeting": greeting, "node": greeting, "rank": 1, "facts": {}, "problems": []}
        connection.sendall(json.dumps(node).encode() + b"\n")
        connections.append(connection)
    accepted, nodes = collect(listener, findings, options, 5.0)
    assert [node["node"] for node in nodes] == ["a", GREETING]
    for connection in (listener, *connections, *accepted):
        connection.close()
