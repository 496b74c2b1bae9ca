"""``--json``: one JSON object on standard output, with the numbers of the text and the keys that the help names."""

import json
import re

import numpy as np
import pytest
from helpers.commands import call, parser_of
from helpers.datasets import DATA, documents_of, write

from megatron_bfp.indexed_dataset.reader import IndexedDataset

NUMBER = re.compile(r"\d[\d,]*")
ORDERS = ("random", "balanced", "over_batches")
SPLIT = ("--seq-length", 64, 16, "--split", "8,1,1")


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Two datasets, of 300 and 40 documents of up to 200 tokens, some of them empty."""
    folder, rng = tmp_path_factory.mktemp("json"), np.random.default_rng(5)
    return [
        write(folder / name, documents_of(rng.integers(0, 200, n).tolist())).prefix
        for name, n in (("a", 300), ("b", 40))
    ]


@pytest.fixture
def text_and_json(monkeypatch, capsys):
    """The lines that a verb prints, and its object."""

    def run(verb, *arguments):
        assert call(monkeypatch, f"megatron-bfp {verb}", *arguments) == 0
        text = capsys.readouterr()
        assert call(monkeypatch, f"megatron-bfp {verb}", *arguments, "--json") == 0
        printed = capsys.readouterr()
        assert text.err == printed.err == ""
        content = json.loads(printed.out)
        check_that_help_names_keys(monkeypatch, verb, content)
        return text.out.splitlines(), content

    return run


def check_that_help_names_keys(monkeypatch, verb, content):
    """Each key of an object and of those in it is a word of the help."""
    words = set(re.findall(r"\w+", parser_of(monkeypatch, f"megatron-bfp {verb}").epilog))
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            assert set(value) <= words, set(value) - words
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []


def rows_of(lines, header):
    """Name -> numbers of the row, from all tables whose header begins so."""
    rows = {}
    for start, line in enumerate(lines):
        if line.split()[: len(header)] == header:
            for row in lines[start + 2 :]:
                if not row.strip():
                    break
                name, *cells = row.split()
                rows.setdefault(name, []).append(cells)
    return rows


def integers(cells):
    return [int(cell.replace(",", "")) for cell in cells]


def test_index_has_the_numbers_of_its_tables(text_and_json, prefixes):
    lines, content = text_and_json("index", *prefixes, *SPLIT)
    cuts, sizes = rows_of(lines, ["index", "split"]), rows_of(lines, ["index", "documents"])
    assert [dataset["prefix"] for dataset in content["datasets"]] == prefixes
    for number, dataset in enumerate(content["datasets"]):
        assert f"{dataset['documents']:,} documents, {dataset['tokens']:,} tokens, {dataset['dtype']}" in lines
        assert [index["split"] for index in dataset["indexes"]] == ["train", "valid", "test"] * 2
        for index in dataset["indexes"]:
            (split, *numbers) = cuts[index["name"]].pop(0)
            needless = index["cut_needlessly"]
            assert split == index["split"]
            assert integers(numbers) == [
                needless["concatenation"],
                needless["packing"],
                index["longer_than_seq_length"],
            ]
            names = ("documents", "empty_documents", "tokens", "sequences", "padding")
            assert integers(sizes[index["name"]].pop(0)[:5]) == [index[name] for name in names]
            assert index["name"].startswith(
                f"s{index['seq_length']}-d{index['first_document']}-{index['end_document']}"
            )
            assert index["path"] == f"{prefixes[number]}.bfp/{index['name']}"
            assert index["max_documents_per_sequence"] is None and index["documents"] > 0
            assert index["even_sequences"] is False
    train = content["datasets"][0]["indexes"][0]
    assert train["cut_needlessly"]["concatenation"] > 20 and train["cut_needlessly"]["packing"] == 0


def test_verify_has_the_numbers_of_its_tables(text_and_json, prefixes):
    text_and_json("index", *prefixes, *SPLIT)
    for options in ([], ["--tokens", "--vocab-size", 65_535]):
        lines, content = text_and_json("verify", *prefixes, *options)
        rows = rows_of(lines, ["index", "state"])
        for dataset in content["datasets"]:
            assert dataset["tokens_checked"] == bool(options) and len(dataset["indexes"]) == 6
            told = f"{dataset['tokens']:,} tokens of {dataset['documents']:,} documents are right"
            assert (told in lines) == bool(options)
            for index in dataset["indexes"]:
                state, *numbers = rows[index["name"]].pop(0)
                names = ("documents", "empty_documents", "tokens", "sequences", "padding")
                assert state == "whole" and integers(numbers) == [index[name] for name in names]
        assert not any(rows.values())


def test_show_has_the_numbers_of_its_table(text_and_json, prefixes):
    text_and_json("index", prefixes[0], *SPLIT)
    which = (prefixes[0], "--seq-length", 64, "--split", "8,1,1")
    for options in (["--sequence", 3], ["--sample", 500, "--seed", 9], ["--sequence", 0, "--split-name", "valid"]):
        lines, content = text_and_json("show", *which, *options)
        sizes = integers(NUMBER.findall(next(line for line in lines if " targets" in line and " chunk" in line)))
        assert sizes == [content["tokens"], len(content["chunks"]), content["padding"], content["targets"]]
        named = next(line for line in lines if f" of {content['num_sequences']:,}" in line and "sequence " in line)
        assert named.endswith(f"sequence {content['sequence']:,} of {content['num_sequences']:,}")
        rows = [line for line in lines if re.match(r" *\d[\d,]* to \d", line)]
        for row, chunk in zip(rows, content["chunks"], strict=True):
            first, last, document, start, end, length, targets = integers(NUMBER.findall(row))
            assert (first, last) == (chunk["position"], chunk["position"] + chunk["length"] - 1)
            assert (start, end) == (chunk["offset"], chunk["offset"] + chunk["length"] - 1)
            assert (document, length, targets) == (chunk["document"], chunk["document_length"], chunk["targets"])
            assert row.endswith(chunk["part"]) and "text" not in chunk
        assert sum(chunk["length"] for chunk in content["chunks"]) + content["padding"] == content["seq_length"] == 64
        assert content["split"] == (options[-1] if "--split-name" in options else "train")
        if options[0] == "--sample":
            named = f"sample {content['sample']} with seed {content['seed']} (epoch {content['epoch']})"
            assert any(line.startswith(named) for line in lines) and content["epoch"] > 0
        else:
            assert content["sample"] is content["seed"] is content["epoch"] is None


def test_targets_only_is_in_names_and_objects(text_and_json, prefixes):
    targets = (prefixes[1], *SPLIT, "--targets-only")
    text, content = text_and_json("index", *targets)
    indexes = content["datasets"][0]["indexes"]
    assert all(index["targets_only"] and index["name"].endswith("-t") for index in indexes)
    assert all(index["one_token_documents"] == 0 for index in indexes) and "one token" in "\n".join(text)
    assert not text_and_json("index", prefixes[1], *SPLIT)[1]["datasets"][0]["indexes"][0]["targets_only"]
    show = ("show", prefixes[1], "--seq-length", 64, *SPLIT[3:], "--targets-only", "--sequence", 0)
    content = text_and_json(*show)[1]
    assert content["index"].endswith("s64-d0-32-t") and content["targets"] == content["tokens"]
    text, content = text_and_json("verify", prefixes[1])
    verified = content["datasets"][0]["indexes"]
    assert {index["name"] for index in verified if index["targets_only"]} == {index["name"] for index in indexes}
    assert all(("one_token_documents" in index) == index["targets_only"] for index in verified)
    assert "one token" in "\n".join(text)


def test_fill_in_the_middle_is_in_names_and_objects(text_and_json, prefixes):
    fim = (prefixes[0], *SPLIT[:2], "--fim-rate", 0.5, "--targets-only")
    text, content = text_and_json("index", *fim)
    (index,) = content["datasets"][0]["indexes"]
    assert index["name"].endswith("-t-fim0.5-1234") and (index["fim_rate"], index["fim_seed"]) == (0.5, 1234)
    assert index["fim_documents"] > 0 and "too long" in "\n".join(text)
    (other,) = text_and_json("index", *fim, "--seed", 7)[1]["datasets"][0]["indexes"]
    assert other["name"].endswith("-fim0.5-7") and other["path"] != index["path"]
    text, content = text_and_json("verify", prefixes[0])
    verified = content["datasets"][0]["indexes"]
    assert {row["fim_seed"] for row in verified} >= {7, 1234} and "fim" in "\n".join(text)


def test_even_sequences_are_in_names_and_objects(text_and_json, prefixes):
    even = (prefixes[1], *SPLIT, "--even-sequences")
    indexes = text_and_json("index", *even)[1]["datasets"][0]["indexes"]
    assert all(index["even_sequences"] and index["name"].endswith("-e") for index in indexes)
    content = text_and_json("show", prefixes[1], "--seq-length", 64, *SPLIT[3:], "--even-sequences", "--sequence", 0)[1]
    assert content["index"].endswith("s64-d0-32-e")
    verified = text_and_json("verify", prefixes[1])[1]["datasets"][0]["indexes"]
    assert {index["name"] for index in verified if index["even_sequences"]} == {index["name"] for index in indexes}


def test_show_has_the_texts_of_a_tokenizer(text_and_json, tmp_path):
    pytest.importorskip("tokenizers")
    prefix = write(tmp_path / "data", [[1, 2, 3], [2, 3]]).prefix
    text_and_json("index", prefix, "--seq-length", 8)
    which = (prefix, "--seq-length", 8, "--sequence", 0, "--tokenizer-model", DATA / "bos_tokenizer.json")
    lines, content = text_and_json("show", *which, "--html", tmp_path / "page.html")
    texts = [chunk["text"] for chunk in content["chunks"]]
    assert len(texts) == 2 and all(any(line.endswith(f"  {text}") for line in lines) for text in texts)
    assert (tmp_path / "page.html").exists() and lines[-1].startswith("wrote ")


def test_report_has_the_numbers_of_its_tables(text_and_json, prefixes, tmp_path):
    output = tmp_path / "report"
    options = ("--seq-length", 64, 16, "--split", "9,1", "--max-documents-per-sequence", 2, "--output", output)
    lines, content = text_and_json("report", prefixes[0], *options, "--ranks", "2x2", "3x1", "--hidden-size", 64)
    headline = [integers(NUMBER.findall(line)) for line in lines[4:8] if NUMBER.search(line)]
    for report, row in zip(content["reports"], headline, strict=True):
        needless, packing = report["cut_needlessly"], report["packings"][0]
        extra = packing["sequences"] - report["concatenated_sequences"]
        assert row[:4] == [report["seq_length"], needless["concatenation"], needless["packing"], extra]
        assert [entry["max_documents_per_sequence"] for entry in report["packings"]] == [None, 2]
        even = report["even"]
        assert even["max_documents_per_sequence"] is None and even["padding"] >= packing["padding"]
        at = lines.index(f"## seq_length {report['seq_length']}")
        spreads = rows_of([line.replace("|", " ") for line in lines[at:]], ["documents", "p50"])
        for name, entry in (("packing", packing), ("even", even)):
            spread, more = entry["documents_per_sequence"], entry["sequences"] - packing["sequences"]
            assert integers(spreads[name][0][:4]) == [spread["median"], spread["p99"], spread["maximum"], more]
        tails = [report["distribution"][-1][key] for key in ("documents", "documents_even")]
        assert tails == [entry["documents_per_sequence"]["maximum"] for entry in (packing, even)]
        assert [(row["data_parallel_size"], row["micro_batches"]) for row in report["waiting"]] == [(2, 2), (3, 1)]
    assert (content["hidden_size"], content["attention_coefficient"]) == (64, 0.16)
    at = lines.index("## Time lost by waiting")
    lost = [line for line in lines[at:] if re.match(r"\|[ 0-9]+\| [23]x", line)]
    expected = [
        [f"{100 * plan[order][meeting]:.1f}" for order in ORDERS for meeting in ("once_per_step", "every_micro_step")]
        for report in content["reports"]
        for row in report["waiting"]
        for plan in (row["best_fit"], row["even"])
    ]
    assert [re.findall(r"\d+\.\d", line) for line in lost] == expected and float(expected[0][1]) > float(expected[0][3])
    assert (content["dataset"], content["documents"], content["seed"]) == (prefixes[0], [0, 270], 1234)
    assert content["documents"][1] == content["reports"][0]["documents"] < IndexedDataset(prefixes[0]).num_documents
    assert sorted(content["files"]) == sorted(map(str, output.iterdir()))
    on_disk = json.loads((output / "report.json").read_text())
    without = [{key: value for key, value in entry.items() if key != "cut_needlessly"} for entry in content["reports"]]
    assert on_disk["reports"] == without
    assert text_and_json("report", prefixes[0], "--seq-length", 64)[1]["files"] == []


@pytest.mark.parametrize("verb", ["index", "verify", "show", "report"])
def test_an_error_prints_no_object(monkeypatch, capsys, tmp_path, verb):
    options = {"index": "--seq-length 8", "show": "--seq-length 8 --sequence 0", "report": "--seq-length 8"}.get(
        verb, ""
    )
    assert call(monkeypatch, f"megatron-bfp {verb}", tmp_path / "gone", *options.split(), "--json") == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"megatron-bfp {verb}: error: ")
