"""Megatron-LM's own tools/preprocess_data.py and ours write the same tokens with each tokenizer.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

CHECKOUT = os.environ.get("MEGATRON_LM_PATH")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH does not name a checkout of Megatron-LM"),
]
pytest.importorskip("transformers")

from helpers.tokenizer_zoo import TEXTS, make_zoo

from megatron_bfp.commands import preprocess as command
from megatron_bfp.indexed_dataset.reader import IndexedDataset

RUN_TOOL = """
import json, sys, typing
if not hasattr(typing, "override"):  # Python 3.11, for which Megatron-LM's main is too new
    typing.override = lambda function: function
import preprocess_data
for options in json.load(open(sys.argv[1])):
    sys.argv[1:] = options
    preprocess_data.main()
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Each kind with the path of what each tool wrote. Megatron's is imported once, which takes most of its time."""
    folder = tmp_path_factory.mktemp("zoo")
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    kinds = [kind for kind in make_zoo(folder) if kind.theirs]
    calls, prefixes = [], []
    for number, kind in enumerate(kinds):
        prefixes.append([str(folder / f"{who}-{number}") for who in ("ours", "theirs")])
        common = ["--input", str(source), "--append-eod", "--workers", "1", "--output-prefix"]
        command.main([*common, prefixes[-1][0], *kind.ours, "--seq-length", "64"])
        calls.append([*common, prefixes[-1][1], *kind.theirs])
    (folder / "calls.json").write_text(json.dumps(calls))
    path = os.pathsep.join([CHECKOUT, os.path.join(CHECKOUT, "tools"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN_TOOL, str(folder / "calls.json")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(zip(kinds, prefixes, strict=True))


def documents(prefix):
    dataset = IndexedDataset(f"{prefix}_text_document")
    ends = np.cumsum(dataset.document_lengths[:]).tolist()
    tokens = dataset.tokens(0, dataset.num_tokens).tolist()
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends)]


def test_fault_A06_tokens_are_those_of_megatron_s_own_tool(written):
    assert len(written) >= 10
    different = {}
    for kind, (ours, theirs) in written:
        mine, wanted = documents(ours), documents(theirs)
        if "--append-bos" in kind.ours:  # which Megatron's tool lacks
            assert mine == [[1, *document] for document in wanted]
        elif kind.name in ("RoBERTa", "BERT"):  # two EODs there, one here
            assert mine == [document[:-1] for document in wanted] and wanted[0][-2:] == [kind.eod] * 2
        elif mine != wanted:
            different[kind.name] = [pair for pair in zip(mine, wanted) if pair[0] != pair[1]][0]
    assert not different


def test_files_are_the_same_bytes(written):
    for kind, (ours, theirs) in written:
        if "--append-bos" not in kind.ours and kind.name not in ("RoBERTa", "BERT"):
            for end in ("bin", "idx"):
                mine, wanted = (open(f"{prefix}_text_document.{end}", "rb").read() for prefix in (ours, theirs))
                assert mine == wanted, kind.name
