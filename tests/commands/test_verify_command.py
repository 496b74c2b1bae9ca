"""``megatron-bfp verify``: with ``--tokens`` the .bin is read, too."""

import shutil

import numpy as np
import pytest
from helpers.datasets import write

from megatron_bfp import BFPError
from megatron_bfp.commands import main as commands
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.verify import verify_tokens
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, index_directory

EOD = 9
BY_NUMBERS = ("--tokens", "--vocab-size", "10", "--eod-id", str(EOD))


@pytest.fixture
def verify(tmp_path):
    """Write a dataset and its index and verify them with these options."""

    def run(documents, *options):
        dataset = write(tmp_path / "data", documents, np.int32)
        shutil.rmtree(index_directory(dataset.prefix), ignore_errors=True)
        build(dataset, IndexKey(8, 0, dataset.num_documents), index_directory(dataset.prefix))
        commands.main(["verify", dataset.prefix, *options])

    return run


@pytest.mark.case(5)
def test_tokens_that_are_right_pass(verify, capsys):
    verify([[], [1, EOD], [], [1, EOD, 2, EOD], [EOD], []], *BY_NUMBERS)
    assert "7 tokens of 6 documents are right" in capsys.readouterr().out
    verify([[1, 2], [3]], "--tokens", "--vocab-size", "4")


@pytest.mark.case(5, 6)
@pytest.mark.parametrize(
    "documents, reason",
    [
        ([[1, EOD], [2, 3], [4, EOD]], r"document 1 does not end in EOD \(9\)"),
        ([[], [2]], "document 1 does not end in EOD"),
        ([[1, EOD], [10, EOD]], "holds token 10, outside the 10 of the tokenizer, at token 2 of the file;"),
        ([[1, EOD], [1, -1, EOD]], "holds token -1, outside .* at token 3 of the file;"),
    ],
)
def test_tokens_that_are_wrong_are_named(verify, documents, reason):
    with pytest.raises(BFPError, match=f"data.bin: {reason}"):
        verify(documents, *BY_NUMBERS)
    verify(documents)  # its indexes are whole


def test_the_tokenizer_says_what_is_right(verify, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "<eod>": 2}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = ("--tokens", "--tokenizer-model", str(tmp_path / "tokenizer.json"), "--eod-token", "<end>")
    verify([[1, 3], [0, 1, 3]], *options)
    with pytest.raises(BFPError, match="outside the 4 of the tokenizer"):
        verify([[1, 3], [4, 3]], *options)


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--tokens"], "either --tokenizer-model or --vocab-size"),
        (["--tokens", "--vocab-size", "4", "--tokenizer-model", "x"], "either"),
        (["--tokens", "--vocab-size", "0"], "--vocab-size must be"),
        (["--tokens", "--vocab-size", "4", "--eod-id", "4"], "--eod-id 4: is outside"),
        (["--tokens", "--tokenizer-model", "x", "--eod-id", "4"], "goes with --vocab-size"),
        (["--vocab-size", "4"], "for --tokens"),
    ],
)
def test_bad_options_are_named(verify, options, reason):
    with pytest.raises(BFPError, match=reason):
        verify([[1]], *options)


def test_ids_above_a_dtype_s_range_do_not_matter(write_dataset):
    dataset = write_dataset([[1, 65_535]])
    assert verify_tokens(dataset, 100_000, 65_535) == 1
    assert verify_tokens(IndexedDataset(dataset.prefix), 65_536) == 0


def test_documents_must_begin_with_the_tokenizer_s_bos(verify, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<bos>", "<eod>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = ("--tokens", "--tokenizer-model", str(tmp_path / "tokenizer.json"))
    options += ("--eod-token", "<eod>", "--bos-token", "<bos>")
    verify([[2, 1, 3], [2, 3]], *options, "--append-bos")
    verify([[2, 1, 3], [1, 3]], *options)
    for option in (("--append-bos",), ()):
        documents = [[2, 1, 3], [1, 3]] if option else [[2, 1, 3], [1, 1]]
        with pytest.raises(BFPError, match="document 1 does not begin with BOS" if option else "does not end in EOD"):
            verify(documents, *options, *option)
