"""The documentation is true: its snippets run as they stand, its links lead somewhere, and it builds strictly.

A snippet is a fenced block in bash or Python, in the README, in examples/README.md or on a page of docs/. It is run,
unless ``<!-- not run: REASON -->`` stands before it. Shell snippets run in the order of the pages, in one folder that
looks like a checkout with the data that they name.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from helpers.datasets import ROOT

from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter

PAGES = ("README.md", "examples/README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
SITE = ROOT / "mkdocs.yml"
EOD = "<|endoftext|>"
RUN, SHOWN = ("bash", "python"), ("text", "diff", "bibtex", "toml")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
PATH = re.compile(r"(?<![\w/.-])(?:(?:examples|tests|benchmarks)/[\w/*]+\.(?:py|sh)|tools/\w+_bfp\.py)")
LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")
WRITTEN = (
    "report/truncations.png",
    "sample.html",
    "OUT_text_document.bfp",
    "data/code_text_document.bfp",
    "all_text_document.bin",
)
"""What the snippets leave behind."""


class Snippet(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    text: str
    reason: str | None
    """Why it is not run."""


def snippets(page):
    """The snippets of a page, in order."""
    lines, result, i = page.split("\n"), [], 0
    while i < len(lines):
        if not lines[i].startswith("```"):
            i += 1
            continue
        end = lines.index("```", i + 1)
        before = [line for line in lines[:i] if line.strip()][-1:]
        reason = NOT_RUN.fullmatch(before[0]) if before else None
        result.append(Snippet(i + 1, lines[i][3:], "\n".join(lines[i + 1 : end]), reason and reason[1]))
        i = end + 1
    return result


def all_snippets(language=None, run=None):
    """Those of all pages, or those in a language, or those that are run or not."""
    everything = [snippet for page in PAGES for snippet in snippets((ROOT / page).read_text())]
    return [
        snippet
        for snippet in everything
        if (language is None or snippet.language == language) and (run is None or run == (snippet.reason is None))
    ]


def without_snippets(page):
    """The text of a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.+)$", without_snippets(page), re.MULTILINE)
    return {re.sub(r"[^\w]+", "-", re.sub(r"[`*?,.'()]", "", heading.lower())).strip("-") for heading in headings}


def byte_tokenizer(path):
    """Save a Hugging Face tokenizer of bytes; returns its vocabulary size and the id of its EOD."""
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    settings = {"initial_alphabet": byte_level.alphabet(), "special_tokens": [EOD], "show_progress": False}
    tokenizer.train_from_iterator([], tokenizers.trainers.BpeTrainer(**settings))
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size(), tokenizer.token_to_id(EOD)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with what the snippets name: the project's folders, data, documents, a tokenizer, and the commands."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("tools", "examples", "megatron_bfp"):
        (folder / name).symlink_to(ROOT / name)
    vocab_size, eod = byte_tokenizer(folder / "tokenizer.json")
    (folder / "data").mkdir()
    lengths = np.random.default_rng(0).integers(100, 3000, 300)
    tokens = np.random.default_rng(1).integers(0, vocab_size - 1, lengths.sum())
    tokens[tokens >= eod] += 1
    tokens[np.cumsum(lengths) - 1] = eod
    for name in ("books", "web", "code"):
        with IndexedDatasetWriter(str(folder / f"data/{name}_text_document"), "uint16") as writer:
            writer.add(tokens, lengths)
            writer.finalize()
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text('{"text": "The river and the mill. "}\n' * 400)
    (folder / "bin").mkdir()
    commands = {"python": f'exec {sys.executable} "$@"', "megatron-bfp": f'exec {sys.executable} -m megatron_bfp "$@"'}
    for name, line in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def environment(checkout):
    return os.environ | {"PATH": f"{checkout}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def test_fault_C13_shell_snippets_run_as_they_stand(checkout):
    to_run = all_snippets("bash", run=True)
    assert len(to_run) >= 8
    for snippet in to_run:
        done = subprocess.run(
            ["bash", "-euc", snippet.text], cwd=checkout, env=environment(checkout), capture_output=True, text=True
        )
        assert done.returncode == 0, f"{snippet}\n{done.stdout}{done.stderr}"
    assert [name for name in WRITTEN if not (checkout / name).exists()] == []


def test_fault_C13_python_snippets_run_as_they_stand(checkout):
    pytest.importorskip("megatron.core")
    outputs = []
    for snippet in all_snippets("python", run=True):
        (checkout / "snippet.py").write_text(snippet.text)
        command = [sys.executable, "snippet.py"]
        done = subprocess.run(command, cwd=checkout, env=environment(checkout), capture_output=True, text=True)
        assert done.returncode == 0, f"{snippet}\n{done.stderr}"
        outputs.append(done.stdout)
    assert "4 1\n[[2, 0, 5], [4, 0, 3]]\n2\n" in outputs
    assert 4 < float(re.search(r"^loss ([\d.]+)$", "".join(outputs), re.MULTILINE)[1]) < 7  # about log(257)


def test_fault_C13_the_trainer_takes_the_options_that_are_shown(tmp_path):
    arguments = pytest.importorskip("trainer.arguments")
    (shown,) = [snippet for snippet in all_snippets() if snippet.text.startswith("deepspeed examples/pretrain_gpt.py")]
    options = arguments.parse_arguments(shlex.split(shown.text.replace("\\\n", " "))[2:])
    assert list(options.data_path) == ["0.3", "A_text_document", "0.7", "B_text_document"] and options.bf16
    from cluster.settings import read_settings
    from trainer.config_file import config_text, read_config

    in_a_file, of_a_launcher = sorted(all_snippets("toml"), key=lambda snippet: "[launch]" in snippet.text)
    (tmp_path / "run.toml").write_text(of_a_launcher.text)
    assert read_config(str(tmp_path / "run.toml")) == ["--train-iters=143051"]
    assert read_settings(str(tmp_path / "run.toml"))["GPUS_PER_NODE"] == "8"
    assert set(in_a_file.text.splitlines()) <= set(config_text(options).splitlines())


def test_fault_C13_files_that_the_pages_name_are_there():
    for page in PAGES:
        for path in PATH.findall((ROOT / page).read_text()):
            assert list(ROOT.glob(path)), f"{page}: {path}"
    for snippet in all_snippets(run=False):
        for path in re.findall(r"tests/[\w/*]+(?:\.py)?", snippet.reason):
            assert list(ROOT.glob(path)), snippet


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_code_is_run_or_shown(page):
    text = (ROOT / page).read_text()
    assert {snippet.language for snippet in snippets(text)} <= {*RUN, *SHOWN}
    lines = without_snippets(text).split("\n")
    indented = [
        line for before, line in zip(lines, lines[1:], strict=False) if line.startswith("    ") and not before.strip()
    ]
    assert indented == [], "write code between fences, so that it is found"


@pytest.mark.parametrize("page", ["README.md", "examples/README.md", "CHANGELOG.md"])
def test_links_of_pages_outside_the_site_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for link in LINK.findall(without_snippets(text)):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target.read_text()), f"{page}: {link}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def build(config, site):
    """Build the documentation strictly (``--quiet`` would hide warnings from ``--strict``)."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    settings = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)


def test_fault_C13_the_documentation_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs")
    done = build(SITE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'id="megatron_bfp.packing.packed.pack"' in (tmp_path / "reference/packing.html").read_text()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]*)", page.read_text())
        assert loaded == [], f"{page.name} loads something from elsewhere"


def test_a_dead_link_or_anchor_fails_the_build(tmp_path):
    pytest.importorskip("mkdocs")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    for page in (tmp_path / "docs/reference").glob("*.md"):
        page.write_text("# Reference\n")  # it takes most of the time
    assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode == 0
    with open(tmp_path / "docs/index.md", "a", encoding="utf-8") as file:
        file.write("[a](no-page.md) [b](megatron.md#no-anchor)\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and "no-page.md" in done.stderr and "no-anchor" in done.stderr


def test_the_changelog_names_modules_that_exist():
    table = (ROOT / "CHANGELOG.md").read_text().split("| Now, in `megatron_bfp` |")[1].split("\n\n")[0]
    modules = [name for row in table.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", row.split("|")[2])]
    paths = {name: ROOT / "megatron_bfp" / name.replace(".", "/") for name in modules}
    assert len(paths) > 30
    assert [name for name, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").exists())] == []


def documented_options(page):
    """Verb -> the options in its section of docs/command-line.md."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return {section.split("\n")[0]: set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", section)) for section in sections}


@pytest.mark.parametrize("verb", ["preprocess", "index", "merge", "report", "show", "verify"])
def test_the_page_of_commands_has_every_option(verb):
    command = [sys.executable, "-m", "megatron_bfp", verb, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    options = set(re.findall(r"^  (?:-\w, )?(--[a-z][a-z-]+)", done.stdout, re.MULTILINE)) - {"--help", "--version"}
    assert options <= documented_options((ROOT / "docs/command-line.md").read_text())[verb]


def test_fault_C13_snippets_are_found():
    page = "text\n\n```bash\na b \\\n    c\n\nd\n```\n\n<!-- not run: why -->\n\n```bash\ne\n```\n\n"
    page += "- item\n    more\n\n```python\nx = 1\n```\n"
    assert snippets(page) == [
        Snippet(3, "bash", "a b \\\n    c\n\nd", None),
        Snippet(12, "bash", "e", "why"),
        Snippet(19, "python", "x = 1", None),
    ]
    assert [snippet.reason for snippet in snippets(page.replace("not run:", "why not"))] == [None] * 3
    assert "x = 1" not in without_snippets(page) and "more" in without_snippets(page)
    assert anchors("# What is `--a`?\n```bash\n# b\n```\n") == {"what-is-a"}
