"""Nothing that is read can run code or lead to a file elsewhere, and logs hold no text of documents."""

import ast
import json
import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from helpers.datasets import ROOT, documents_of

from megatron_bfp import SequenceIndexError
from megatron_bfp.progress import without_progress
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.fingerprints import ends_sha256, file_sha256
from megatron_bfp.sequence_index.format import canonical_json, checksum
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex
from megatron_bfp.sequence_index.verify import verify

SOURCES = sorted(path for folder in ("megatron_bfp", "tools", "examples") for path in (ROOT / folder).rglob("*.py"))
RUN_CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
UNSAFE_MODULES = ("pickle", "cPickle", "dill", "marshal", "shelve", "yaml", "joblib")
NEEDED = {
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
    "torch.load": ("weights_only", True),
}


def unsafe_calls(tree):
    """Calls that run code, or that may where what they read says so."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        if name in RUN_CODE or name.split(".")[0] in UNSAFE_MODULES or options.get("shell"):
            yield node.lineno, name
        if name in NEEDED and options.get(NEEDED[name][0]) is not NEEDED[name][1]:
            yield node.lineno, name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_what_it_reads(path):
    assert list(unsafe_calls(ast.parse(path.read_text()))) == []


def test_the_scan_finds_what_it_looks_for():
    unsafe = "eval(x); np.load(f); np.load(f, allow_pickle=True); torch.load(f); yaml.load(f); run(a, shell=True)"
    safe = "model.eval(); re.compile(x); np.load(f, allow_pickle=False); torch.load(f, weights_only=True); json.load(f)"
    assert [name for _, name in unsafe_calls(ast.parse(unsafe))] == [
        "eval",
        "np.load",
        "np.load",
        "torch.load",
        "yaml.load",
        "run",
    ]
    assert list(unsafe_calls(ast.parse(safe))) == []


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def index(write_dataset):
    dataset = write_dataset(documents_of([5, 0, 12, 3, 16, 2]))
    return build(dataset, IndexKey(8, 0, 6), index_directory(dataset.prefix))


def make_checksums_right(index, **changes):
    """As someone would who knows the format."""
    metadata = json.loads(open(f"{index.path}/index.json", "rb").read()) | changes
    for name, entry in metadata["files"].items():
        path = os.path.join(index.path, name)
        if os.path.exists(path):
            entry |= {"bytes": os.path.getsize(path), "ends_sha256": ends_sha256(path)}
            entry |= {"sha256": file_sha256(path, without_progress)}
    with open(f"{index.path}/index.json", "wb") as file:
        file.write(canonical_json(metadata | {"checksum": checksum(metadata)}))


@pytest.mark.parametrize("name", ["runs", "document_ids", "long_documents"])
@pytest.mark.parametrize("size", [1, 5000], ids=["read", "mapped"])
def test_objects_in_an_array_are_refused_and_not_made(index, tmp_path, name, size):
    made = tmp_path / "made"
    array = np.empty(size, dtype=object)
    array[:] = [Touch(str(made)) for _ in range(size)]
    np.save(f"{index.path}/{name}.npy", array, allow_pickle=True)
    make_checksums_right(index)
    for read in (SequenceIndex, verify):
        with pytest.raises(SequenceIndexError, match=f"{name}.npy cannot be read"):
            read(index.path, index.dataset)
    assert not made.exists()
    pickle.loads(pickle.dumps(Touch(str(made)))).close()
    assert made.exists()


OPENED = """
import sys
sys.path.insert(0, sys.argv[1])
from megatron_bfp import BFPError
from megatron_bfp.sequence_index.verify import verify_all
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
try:
    verify_all(sys.argv[2])
except BFPError as error:
    print(error)
print(*opened, sep="\\n")
"""


@pytest.mark.parametrize("outside", [False, True])
def test_no_path_in_an_index_leads_elsewhere(index, tmp_path, outside):
    np.save(tmp_path / "outside.npy", np.arange(3))
    if outside:
        files = json.loads(open(f"{index.path}/index.json", "rb").read())["files"]
        make_checksums_right(index, files=files | {"../../outside.npy": files["runs.npy"]})
    command = [sys.executable, "-c", textwrap.dedent(OPENED), str(ROOT), index.dataset.prefix]
    done = subprocess.run(command, capture_output=True, text=True)
    opened = [line for line in done.stdout.splitlines() if line.startswith(str(tmp_path))]
    assert done.returncode == 0 and opened, done.stderr
    assert ("index.json was altered" in done.stdout) == outside
    files = [line for line in opened if ": " not in line]
    assert all(
        line.startswith((index.path, index.dataset.prefix + ".idx", index.dataset.prefix + ".bin")) for line in files
    )
