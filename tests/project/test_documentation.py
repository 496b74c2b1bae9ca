"""The documentation's snippets run as they stand, or say in a comment before them why they are not run.

A snippet is a fenced block or one of indented lines. Before one that is not run stands ``<!-- not run: REASON -->``.
Shell snippets are run in their order, in a folder that looks like a checkout with the data that they name.
"""

import os
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from helpers.datasets import ROOT

from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter

PAGES = ("README.md", "examples/README.md")
EOD = "<|endoftext|>"
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


class Snippet(NamedTuple):
    """A block of code in a page."""

    line: int
    language: str
    """Of the fence; empty for indented lines, which are shell."""
    text: str
    reason: str | None
    """Why it is not run."""


def snippets(page):
    """Those of a page, in their order."""
    lines, place, found = [*page.split("\n"), ""], 0, []
    while place < len(lines):
        begin, language = place, ""
        if lines[place].startswith("```"):
            language = lines[place][3:]
            end = lines.index("```", place + 1)
            text, place = lines[place + 1 : end], end + 1
        elif lines[place].startswith("    ") and not lines[place - 1].strip():
            while lines[place].startswith("    ") or not lines[place].strip() and lines[place + 1].startswith("    "):
                place += 1
            text = [line[4:] for line in lines[begin:place]]
        else:
            place += 1
            continue
        before = [line for line in lines[:begin] if line.strip()][-1:]
        reason = NOT_RUN.fullmatch(before[0]) if before else None
        found.append(Snippet(begin + 1, language, "\n".join(text), reason and reason[1]))
    return found


def of_documentation(language=None, run=None):
    """All snippets, or those in a language, or those that are run or not."""
    found = [snippet for page in PAGES for snippet in snippets((ROOT / page).read_text())]
    return [
        snippet
        for snippet in found
        if (language is None or snippet.language == language) and (run is None or run == (snippet.reason is None))
    ]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with what the snippets name: tools, data, documents, a tokenizer, and the commands on the path."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("tools", "examples", "megatron_bfp"):
        (folder / name).symlink_to(ROOT / name)
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    settings = {"initial_alphabet": byte_level.alphabet(), "special_tokens": [EOD], "show_progress": False}
    tokenizer.train_from_iterator([], tokenizers.trainers.BpeTrainer(**settings))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "data").mkdir()
    for name in ("books", "web", "code"):
        lengths = np.random.default_rng(0).integers(100, 3000, 300)
        with IndexedDatasetWriter(str(folder / f"data/{name}_text_document"), "uint16") as writer:
            writer.add(np.random.default_rng(1).integers(1, tokenizer.get_vocab_size(), lengths.sum()), lengths)
            writer.finalize()
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text('{"text": "The river and the mill. "}\n' * 400)
    (folder / "bin").mkdir()
    modules = {"preprocess": "megatron_bfp.commands.preprocess", "report": "megatron_bfp.commands.report"}
    programs = {
        f"megatron-bfp-{name}": f'exec {sys.executable} -c "import sys; from {module} import console; '
        f'sys.exit(console())" "$@"'
        for name, module in modules.items()
    }
    for name, line in {"python": f'exec {sys.executable} "$@"', **programs}.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def environment(checkout):
    return os.environ | {"PATH": f"{checkout}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def test_fault_C13_shell_snippets_run_as_they_stand(checkout):
    wanted = of_documentation("", run=True)
    assert len(wanted) >= 5
    for snippet in wanted:
        done = subprocess.run(
            ["bash", "-euc", snippet.text], cwd=checkout, env=environment(checkout), capture_output=True, text=True
        )
        assert done.returncode == 0, f"{snippet}\n{done.stdout}{done.stderr}"
    made = {"report/truncations.png", "sample.html", "OUT_text_document.bfp", "data/code_text_document.bfp"}
    assert all((checkout / name).exists() for name in made)


def test_fault_C13_python_snippets_run_as_they_stand(checkout):
    pytest.importorskip("megatron.core")
    wanted = of_documentation("python")
    assert wanted and all(snippet.reason is None for snippet in wanted)
    for snippet in wanted:
        (checkout / "snippet.py").write_text(snippet.text)
        command = [sys.executable, "snippet.py"]
        done = subprocess.run(command, cwd=checkout, env=environment(checkout), capture_output=True, text=True)
        assert done.returncode == 0, f"{snippet}\n{done.stderr}"
        assert 4 < float(re.search(r"^loss ([\d.]+)$", done.stdout, re.MULTILINE)[1]) < 7  # about log(257)


def test_fault_C13_the_trainer_takes_the_options_that_are_shown():
    arguments = pytest.importorskip("trainer.arguments")
    (shown,) = [found for found in of_documentation() if found.text.startswith("deepspeed examples/pretrain_gpt.py")]
    options = arguments.parse_arguments(shlex.split(shown.text.replace("\\\n", " "))[2:])
    assert list(options.data_path) == ["0.3", "A_text_document", "0.7", "B_text_document"] and options.bf16


def test_fault_C13_files_that_snippets_name_are_there():
    for snippet in of_documentation():
        for path in re.findall(r"(?<![\w/.-])(?:examples|tests|tools)/[\w/]+\.(?:py|sh)", snippet.text):
            assert (ROOT / path).exists(), snippet
    for snippet in of_documentation(run=False):
        for path in re.findall(r"tests/[\w/*]+(?:\.py)?", snippet.reason):
            assert list(ROOT.glob(path)), snippet


def test_fault_C13_snippets_are_found():
    page = "text\n\n    a b \\\n        c\n\n    d\n\n<!-- not run: why -->\n\n    e\n\n- item\n    more of it\n\n"
    page += "```python\nx = 1\n```\n"
    assert snippets(page) == [
        Snippet(3, "", "a b \\\n    c\n\nd", None),
        Snippet(10, "", "e", "why"),
        Snippet(15, "python", "x = 1", None),
    ]
    assert [snippet.reason for snippet in snippets(page.replace("not run:", "why not"))] == [None] * 3
