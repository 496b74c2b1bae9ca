"""The tokens of a dataset are those of Megatron's own tool: what it writes around each document is written."""

import json

import numpy as np
import pytest
from helpers.datasets import DATA

pytest.importorskip("tokenizers")
pytest.importorskip("sentencepiece")
pytest.importorskip("tiktoken")

from helpers.tokenizer_zoo import TEXTS, make_zoo

from megatron_bfp import IndexedDatasetError, OptionError
from megatron_bfp.commands import main as commands
from megatron_bfp.commands import preprocess as command
from megatron_bfp.indexed_dataset import verify as token_verification
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.tokenizers import long_texts
from megatron_bfp.tokenizers.registry import load_tokenizer
from megatron_bfp.tokenizers.special_tokens import DocumentTemplate, document_template

FAULT = ["--tokenizer-model", str(DATA / "bos_tokenizer.json"), "--eod-token", "<eod>"]
RIVER = [85, 73, 70, 322]
"""Ids of "the river" in that tokenizer, whose BOS is 1 and EOD 0."""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return make_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def preprocess(tmp_path):
    """Documents of a dataset, lists of ids, that the tool writes of texts with these options."""

    def run(texts, *options):
        source = tmp_path / "texts.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prefix = str(tmp_path / "out")
        command.main(
            ["--input", str(source), "--output-prefix", prefix, "--overwrite", "--seq-length", "64", *map(str, options)]
        )
        dataset = IndexedDataset(f"{prefix}_text_document")
        ends = np.cumsum(dataset.document_lengths[:]).tolist()
        tokens = dataset.tokens(0, dataset.num_tokens).tolist()
        return [tokens[begin:end] for begin, end in zip([0, *ends], ends)]

    return run


def test_fault_A06_tokens_are_those_of_the_library_as_megatron_calls_it(zoo, preprocess):
    texts = ["", *TEXTS, " \n"]
    assert len(zoo) >= 10
    for kind in zoo:
        documents = preprocess(texts, *kind.ours, "--append-eod")
        assert documents == [kind.document(text) for text in TEXTS], kind.name
        with_eod = preprocess(texts, *kind.ours)
        assert with_eod == [kind.library(text) for text in TEXTS], kind.name
    of_bos = [kind.name for kind in zoo if kind.library("a")[0] == kind.library("b")[0]]
    assert {"byte-level with BOS", "Llama", "Gemma", "SentencePiece with add_bos"} <= set(of_bos)
    assert not {"byte-level", "SentencePiece", "tiktoken"} & {kind.name for kind in zoo if kind.library("a")[0] == 1}


def test_fault_A06_bos_of_a_post_processor_is_written(preprocess, capsys):
    assert preprocess(["the river"], *FAULT, "--append-eod") == [[1, *RIVER, 0]]
    assert "Each document: BOS <bos> (1), its text, EOD <eod> (0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, document, said",
    [
        (["--append-bos", "--append-eod"], [1, *RIVER, 0], "BOS <bos> (1), its text, EOD <eod> (0)"),
        (["--no-append-bos", "--append-eod"], [*RIVER, 0], "no BOS, its text, EOD <eod> (0)"),
        (["--no-append-bos"], RIVER, "no BOS, its text, no EOD"),
        ([], [1, *RIVER], "BOS <bos> (1), its text, no EOD"),
        (["--bos-token", "<eod>", "--append-bos"], [0, 1, *RIVER], "BOS EOD <eod> (0), <bos> (1), its text, no EOD"),
    ],
)
def test_fault_A06_options_say_otherwise_and_the_summary_says_which(
    preprocess, tmp_path, capsys, options, document, said
):
    assert preprocess(["the river"], *FAULT, *options) == [document]
    assert f"Each document: {said}" in capsys.readouterr().out
    described = json.loads((tmp_path / "out.summary.json").read_text())["each_document"]
    assert described["begins_with_bos"] == (document[:1] != RIVER[:1])
    assert described["ends_with_eod"] == (document[-1:] == [0])
    assert ", ".join([*described["before"], "its text"]) in said.replace("no BOS, ", "")


def test_a_job_with_another_bos_is_another_job(preprocess, tmp_path):
    before = preprocess(["the river"], *FAULT, "--append-eod")
    source = ["--input", str(tmp_path / "texts.jsonl"), "--output-prefix", str(tmp_path / "out"), "--seq-length", "64"]
    command.main([*source, *FAULT, "--append-eod", "--append-bos"])  # what the default did: nothing to do
    with pytest.raises(OptionError, match="a dataset of this name exists"):
        command.main([*source, *FAULT, "--append-eod", "--no-append-bos"])
    assert before == [[1, *RIVER, 0]]


def test_empty_documents_yield_no_bos(preprocess, zoo):
    assert preprocess(["", "the river", "  \n"], *FAULT, "--append-eod") == [[1, *RIVER, 0]]
    (kind,) = (kind for kind in zoo if kind.name == "SentencePiece with add_bos")
    no_token = "\u200b"  # though it is not white space: this model removes it
    assert preprocess([no_token, "a"], *kind.ours, "--append-eod") == [kind.document("a")]


def test_an_eod_that_the_library_adds_is_written_once(zoo):
    (kind,) = (kind for kind in zoo if kind.name == "RoBERTa")
    tokenizer = load_tokenizer(*kind.ours[1::2])
    assert tokenizer.library_adds_after == (tokenizer.eod,) == (1,)
    assert document_template(tokenizer, None, True).after == document_template(tokenizer, None, False).after == (1,)


def test_a_long_text_has_one_bos(preprocess, zoo, monkeypatch):
    """Which the library encodes in parts."""
    monkeypatch.setattr(long_texts, "LONG", 400)
    monkeypatch.setattr(long_texts, "PART", 100)
    kind = next(kind for kind in zoo if kind.name == "Llama")
    text = "the river and the path, " * 100
    (document,) = preprocess([text], *kind.ours, "--append-eod")
    assert document == kind.document(text) and document.count(document[0]) == 1


def test_texts_of_bos_stay_text(preprocess, zoo):
    (document,) = preprocess(["a<bos>b<eod>c"], *FAULT, "--append-eod")
    assert (document.count(1), document.count(0)) == (1, 1) and document[0] == 1
    for kind in zoo:
        name = kind.config.get("bos_token")
        if name:
            (document,) = preprocess([f"x {name} y"], *kind.ours, "--append-eod")
            (reference,) = preprocess(["x"], *kind.ours, "--append-eod")
            assert document.count(reference[0]) == reference.count(reference[0]), kind.name


def test_an_ordinary_token_named_as_bos_stays_text_inside_documents(preprocess, zoo):
    kind = next(kind for kind in zoo if kind.name == "ordinary added tokens")
    (plain,) = preprocess(["the river"], *kind.ours)
    bos = plain[-1]
    (document,) = preprocess(["the river"], *kind.ours, "--append-bos", "--bos-token", "river")
    assert document[0] == bos and bos not in document[1:]


def test_the_post_processor_s_bos_is_not_written_twice(zoo):
    kind = next(kind for kind in zoo if kind.name == "two tokens before")
    tokenizer = load_tokenizer(*kind.ours[1::2])
    assert tokenizer.library_adds_before == (0, 1) and tokenizer.bos == 0
    assert document_template(tokenizer, True, True) == DocumentTemplate((0, 1), (2,))
    assert document_template(tokenizer, False, True) == DocumentTemplate((), (2,))
    assert document_template(load_tokenizer(*kind.ours[1::2], bos_token="<b>"), True, False).before == (0, 1)
    assert document_template(load_tokenizer(*kind.ours[1::2], bos_token="<|end|>"), True, False).before == (2, 0, 1)


def test_without_a_bos_the_option_is_named(zoo, preprocess):
    kind = next(kind for kind in zoo if kind.name == "byte-level")
    with pytest.raises(OptionError, match="--append-bos: .* names no BOS token; give it with --bos-token"):
        preprocess(["a"], *kind.ours, "--append-bos")
    with pytest.raises(OptionError, match="--bos-token '<x>': not in the vocabulary"):
        preprocess(["a"], *kind.ours, "--append-bos", "--bos-token", "<x>")
    kind = next(kind for kind in zoo if kind.name == "tiktoken")
    with pytest.raises(OptionError, match="--bos-token '<x>': no special token of .* are <|endoftext|>"):
        preprocess(["a"], *kind.ours, "--append-bos", "--bos-token", "<x>")
    kind = next(kind for kind in zoo if kind.name == "SentencePiece")
    with pytest.raises(OptionError, match="--bos-token '<x>': not in the vocabulary"):
        preprocess(["a"], *kind.ours, "--bos-token", "<x>")


def test_bos_of_each_library(zoo):
    """Megatron's names: HuggingFaceTokenizer's bos_token, SentencePiece's bos_id, TikTokenizer's <s>."""
    bos = {}
    for kind in zoo:
        if "small.tiktoken" not in " ".join(kind.ours):
            bos[kind.name] = load_tokenizer(*kind.ours[1:4:2], needs_eod=False).bos
    assert bos["byte-level"] is None and bos["byte-level with BOS"] == 0 and bos["Llama"] == 1
    assert bos["BERT"] == 0 and bos["fault"] == 1
    (bert,) = (kind for kind in zoo if kind.name == "BERT")
    assert load_tokenizer(*bert.ours[1:4:2]).eod == 1  # its [SEP]
    assert bos["SentencePiece"] == 1 and bos["tiktoken in Megatron's form"] == 1


@pytest.mark.parametrize("adds", [True, False])
def test_a_configuration_that_disagrees_is_said(tokenizer_folder, adds):
    folder = tokenizer_folder({"add_bos_token": adds, "bos_token": "<|pad|>", "eos_token": "<|endoftext|>"})
    tokenizer = load_tokenizer("HuggingFaceTokenizer", folder)
    assert tokenizer.bos == 1 and tokenizer.library_adds_before == ()
    if adds:
        assert "adds no BOS" in tokenizer.warning and "add_bos_token true" in tokenizer.warning
    else:
        assert tokenizer.warning is None


def test_special_tokens_are_also_read_from_their_map(tokenizer_folder, tmp_path):
    folder = tokenizer_folder({"bos_token": None})
    named = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<|pad|>"}}
    (tmp_path / "model" / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer = load_tokenizer("HuggingFaceTokenizer", folder)
    assert (tokenizer.eod, tokenizer.bos) == (0, 1)
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|pad|>"}))
    assert load_tokenizer("HuggingFaceTokenizer", folder).eod == 1  # which comes first
    (tmp_path / "model" / "special_tokens_map.json").write_text("[]")
    with pytest.raises(OptionError, match="special_tokens_map.json: not a tokenizer's configuration"):
        load_tokenizer("HuggingFaceTokenizer", folder)


def test_a_post_processor_that_repeats_the_text_is_refused(tokenizer_file, tmp_path):
    import tokenizers

    library = tokenizers.Tokenizer.from_file(tokenizer_file)
    library.post_processor = tokenizers.processors.TemplateProcessing(single="$A $A", special_tokens=[])
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(OptionError, match="its post-processor does more than"):
        load_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"), needs_eod=False)


def test_truncation_of_the_file_does_not_hide_its_bos(tmp_path):
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(DATA / "bos_tokenizer.json"))
    library.enable_truncation(1)
    library.enable_padding(length=9, pad_token="<eod>")
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"), "<eod>")
    assert (tokenizer.library_adds_before, tokenizer.library_adds_after) == ((1,), ())


def test_verification_knows_the_template(write_dataset):
    from megatron_bfp.preprocessing.write import verify_documents

    template = DocumentTemplate((9, 1), (9,))  # BOS is EOD, as in OPT's tokenizer
    dataset = write_dataset([[9, 1, 3, 9], [9, 1, 9]])
    assert verify_documents(dataset.prefix, 10, 9, template=template).num_documents == 2
    for number, documents in enumerate(([[9, 1, 3, 9], [9, 2, 9]], [[9, 1, 3, 9], [1, 3, 9]], [[9, 1, 3, 9], [9]])):
        wrong = write_dataset(documents, name=f"wrong{number}")
        with pytest.raises(IndexedDatasetError, match=r"document 1 does not begin with BOS \(9, 1\)"):
            verify_documents(wrong.prefix, 10, 9, template=template)
    more = write_dataset([[9, 1, 9, 3, 9], [9, 1, 9]], name="more")
    with pytest.raises(IndexedDatasetError, match="holds 5 EOD tokens"):
        verify_documents(more.prefix, 10, 9, template=template)


@pytest.fixture
def of_fault(write_dataset):
    """Datasets of the fault's tokenizer, with their indexes."""
    from megatron_bfp.sequence_index.builder import build
    from megatron_bfp.sequence_index.key import IndexKey, index_directory

    def make(documents, name):
        dataset = write_dataset(documents, name=name)
        build(dataset, IndexKey(16, 0, dataset.num_documents), index_directory(dataset.prefix))
        return dataset.prefix

    return make


def test_fault_A06_verify_knows_bos(of_fault, capsys):
    verify = ["verify", "--tokens", *FAULT]
    right, without = of_fault([[1, *RIVER, 0], [], [1, 0]], "right"), of_fault([[1, *RIVER, 0], [5, 0]], "without")
    commands.main([*verify, right])
    assert "are right" in capsys.readouterr().out
    for options in ([], ["--append-bos"]):
        with pytest.raises(IndexedDatasetError, match=r"document 1 does not begin with BOS \(1\); .*--no-append-bos"):
            commands.main([*verify, without, *options])
    commands.main([*verify, without, "--no-append-bos"])
    by_numbers = ["verify", "--tokens", "--vocab-size", "400", "--eod-id", "0"]
    commands.main([*by_numbers, without])
    commands.main([*by_numbers, right, "--bos-id", "1"])
    with pytest.raises(IndexedDatasetError, match=r"document 1 does not begin with BOS \(1\)"):
        commands.main([*by_numbers, without, "--bos-id", "1"])
    with pytest.raises(IndexedDatasetError, match=r"document 0 does not begin with BOS \(0, 1\)"):
        commands.main([*verify, right, "--append-bos", "--bos-token", "<eod>"])


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--eod-token", "x"], "--eod-token is for --tokens"),
        (["--no-append-bos"], "--append-bos is for --tokens"),
        (["--tokens", "--vocab-size", "9", "--eod-token", "x"], "--eod-token is of a tokenizer"),
        (["--tokens", "--vocab-size", "9", "--append-bos"], "--append-bos is of a tokenizer"),
        (["--tokens", "--vocab-size", "9", "--bos-id", "9"], "--bos-id 9: is outside"),
        (["--tokens", "--tokenizer-model", "x", "--bos-id", "1"], "--bos-id goes with --vocab-size"),
    ],
)
def test_fault_C09_options_of_verify_that_would_change_nothing_are_refused(of_fault, options, reason):
    with pytest.raises(OptionError, match=reason):
        commands.main(["verify", of_fault([[1]], "data"), *options])


def test_fault_C10_show_takes_the_eod_and_names_it(of_fault, tmp_path, capsys):
    prefix, page = of_fault([[1, *RIVER, 0]], "data"), tmp_path / "page.html"
    show = ["show", prefix, "--seq-length", "16", "--sequence", "0"]
    commands.main([*show, *FAULT, "--html", str(page)])
    assert "<bos>the river<eod>" in capsys.readouterr().out
    titles = page.read_text()
    assert "token 1 “&lt;bos&gt;”, BOS, target" in titles and "token 0 “&lt;eod&gt;”, EOD, no target" in titles
    commands.main([*show, *FAULT[:2], "--bos-token", "<eod>", "--html", str(page)])
    titles = page.read_text()
    assert "token 0 “&lt;eod&gt;”, BOS" in titles and ", EOD" not in titles
    for option in ("--eod-token", "--bos-token"):
        with pytest.raises(OptionError, match=f"{option} needs --tokenizer-model"):
            commands.main([*show, option, "x"])
        with pytest.raises(OptionError, match=f"{option} '<x>': not in the vocabulary"):
            commands.main([*show, *FAULT[:2], option, "<x>"])


def test_ends_are_checked_in_every_block(write_dataset, monkeypatch):
    """The first tokens of documents in a later block, beside empty ones."""
    monkeypatch.setattr(token_verification, "BLOCK_DOCUMENTS", 2)
    dataset = write_dataset([[], [1, 2], [1, 3], [], [1], [2, 9]])
    with pytest.raises(IndexedDatasetError, match=r"document 4 does not begin with BOS \(1, 1\)"):
        right_but_one = write_dataset([[], [1, 1], [1, 1, 3], [], [1]], name="short")
        token_verification.verify_tokens(right_but_one, 10, before=(1, 1))
    token_verification.verify_tokens(dataset, 10)
    with pytest.raises(IndexedDatasetError, match=r"document 5 does not begin with BOS \(1\)"):
        token_verification.verify_tokens(dataset, 10, before=(1,))
    with pytest.raises(IndexedDatasetError, match=r"document 2 does not begin with BOS \(1, 2\)"):
        token_verification.verify_tokens(dataset, 10, before=(1, 2))


def test_a_post_processor_that_adds_no_token_of_the_vocabulary_is_refused(tmp_path):
    description = json.loads((DATA / "bos_tokenizer.json").read_text())
    description["post_processor"]["special_tokens"]["<bos>"]["ids"] = [70_000]
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(OptionError, match="its post-processor adds token 70000, which is not in its vocabulary"):
        load_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"), "<eod>")
