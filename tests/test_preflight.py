"""The preflight finds what differs between nodes: processes on this host in folders of their own, one for each node."""

import argparse
import os
import shutil
import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from conftest import ROOT, documents_of, write  # noqa: E402
from launching import ENVIRONMENT, free_port  # noqa: E402

from megatron_bfp import IndexedDatasetError  # noqa: E402
from megatron_bfp.index_building import build  # noqa: E402
from megatron_bfp.index_format import IndexKey  # noqa: E402

NODES = ("node-a", "node-b", "node-c")


def make_node(folder):
    """What a node has: a dataset, its indexes, a tokenizer."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    dataset = write(folder / "data", documents_of([7, 40, 12, 64, 3, 30, 9, 21, 5, 11]))
    for first, end in ((0, 8), (8, 10)):
        build(dataset, IndexKey(64, first, end), f"{dataset.prefix}.bfp")
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1} | {chr(0x100 + i): i for i in range(2, 203)}, []))
    tokenizer.add_special_tokens(["<eod>"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def nodes(tmp_path):
    """Folders of three equal nodes."""
    make_node(tmp_path / NODES[0])
    for name in NODES[1:]:
        shutil.copytree(tmp_path / NODES[0], tmp_path / name)
    return [tmp_path / name for name in NODES]


def preflight(nodes, port=None, starting=None, gpus=0, timeout=30, **environments):
    """Exit statuses and the outputs of the nodes; ``environments`` has more variables for a node, by its letter."""
    port = port or free_port()
    options = [
        "--nodes",
        str(len(nodes)),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
        "--timeout",
        str(timeout),
    ]
    options += ["--gpus-per-node", str(gpus), "--data-path", "data", "--seq-length", "64", "--split", "80,20"]
    options += ["--tokenizer-model", "tokenizer.json", "--eod-token", "<eod>"]
    processes = []
    for rank, node in enumerate(nodes if starting is None else nodes[:starting]):
        command = [sys.executable, str(ROOT / "examples/preflight.py"), *options]
        command += ["--node-rank", str(rank), "--node-name", node.name]
        environment = ENVIRONMENT | environments.get(node.name[-1], {})
        processes.append(
            subprocess.Popen(
                command, cwd=node, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    return [process.returncode for process in processes], outputs


def problems(found):
    """The lines of the node of rank 0; every node must have failed."""
    statuses, outputs = found
    assert statuses == [2] * len(statuses), outputs
    return outputs[0].splitlines()


def test_equal_nodes_agree(nodes):
    statuses, outputs = preflight(nodes)
    assert statuses == [0, 0, 0], outputs
    assert outputs[0].startswith("preflight: 3 nodes agree: ") and "torch " in outputs[0] and outputs[1:] == ["", ""]


def test_fault_A13_ids_outside_the_vocabulary_are_found(tmp_path):
    from preflight import check_tokenizer
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE({chr(0x100 + i): i for i in range(128)}, []))
    tokenizer.add_special_tokens(["<eod>"])  # 129 words: an embedding of 256 rows
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = argparse.Namespace(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer.json")
    )
    options.eod_token, options.data_path = "<eod>", [str(tmp_path / "fine"), str(tmp_path / "missing")]
    write(tmp_path / "fine", [[5, 6], [7, 255]])
    write(tmp_path / "other", [[5, 6], [7, 256]])
    assert check_tokenizer(options)
    options.data_path.append(str(tmp_path / "other"))
    reason = "other.bin: document 1 holds the token id 256, the model's vocabulary ends at 255"
    with pytest.raises(IndexedDatasetError, match=reason):
        check_tokenizer(options)


@pytest.mark.case(29)
def test_a_missing_index_is_found_on_its_node(nodes):
    shutil.rmtree(nodes[1] / "data.bfp/s64-d0-8")
    (line,) = problems(preflight(nodes))
    assert line.startswith(
        "preflight: error: node node-b: no sequence index data.bfp/s64-d0-8; build it: megatron-bfp-"
    )
    assert line.endswith("--indexed data --seq-length 64 --split 80,20")


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
    assert line == "preflight: error: node node-a: 0 GPUs, 8 are wanted (GPUS_PER_NODE)"


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
        statuses, outputs = preflight(nodes, port, starting=1)
    assert statuses == [2]
    reason = f"port {port} cannot be used: Address already in use; choose another MASTER_PORT"
    assert outputs == [f"preflight: error: node node-a: {reason}\n"]


@pytest.mark.slow
def test_a_node_that_does_not_come_is_counted(nodes):
    statuses, outputs = preflight(nodes, starting=2, timeout=10)
    assert statuses == [2, 2]
    assert "1 of 3 nodes did not report" in outputs[0] and "these did: node-a, node-b" in outputs[0]
