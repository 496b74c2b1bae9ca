"""``--fim-rate`` in Megatron-LM and Megatron-DeepSpeed: options, sentinels by name, and the samples they give."""

import argparse
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.datasets import documents_of
from helpers.megatron_deepspeed_stand_ins import LENGTH, module_with

from megatron_bfp.errors import OptionError
from megatron_bfp.integrations.fill_in_the_middle import sentinel_ids
from megatron_bfp.integrations.megatron_deepspeed import builder as builder_of_deepspeed
from megatron_bfp.integrations.megatron_deepspeed import options as options_of_deepspeed
from megatron_bfp.integrations.megatron_lm import builder as builder_of_lm
from megatron_bfp.integrations.megatron_lm import options as options_of_lm

NAMES = {"fim_prefix_token": "<p>", "fim_middle_token": "<m>", "fim_suffix_token": "<s>"}
IDS = {"<p>": 901, "<m>": 902, "<s>": 903}


def args(**changes):
    return SimpleNamespace(**({"fim_rate": 0.5, "fim_spm_rate": 0.25} | NAMES | changes))


class Library:
    """As much of a tokenizer's library as Megatron-LM's own FIM dataset asks for; 0 is the unknown token."""

    def tokens_to_ids(self, tokens):
        return [IDS.get(token, 0) for token in tokens]

    def ids_to_tokens(self, ids):
        return [{number: token for token, number in IDS.items()}.get(number, "<unk>") for number in ids]


def test_sentinels_are_named_and_must_be_tokens_of_their_own():
    assert sentinel_ids(args(), lambda texts: [IDS.get(text) for text in texts]) == {
        "prefix": 901,
        "middle": 902,
        "suffix": 903,
    }
    assert sentinel_ids(args(fim_rate=None), None) is None
    for changes, option in (
        ({"fim_suffix_token": "<x>"}, "--fim-suffix-token '<x>'"),
        ({"fim_middle_token": "<p>"}, "--fim-middle-token '<p>'"),
    ):
        with pytest.raises(OptionError, match=option):
            sentinel_ids(args(**changes), lambda texts: [IDS.get(text) for text in texts])


def test_megatron_lm_s_tokenizer_gives_the_ids():
    tokenizer = SimpleNamespace(_tokenizer=Library())
    settings = builder_of_lm._fim_settings(args(), tokenizer)
    assert settings == {
        "fim_rate": 0.5,
        "fim_spm_rate": 0.25,
        "fim_extra_tokens": {"prefix": 901, "middle": 902, "suffix": 903},
    }
    assert builder_of_lm._fim_settings(args(fim_rate=None), None)["fim_extra_tokens"] is None
    with pytest.raises(OptionError, match="--fim-prefix-token '<x>': .* the tokenizer has none"):
        builder_of_lm._fim_settings(args(fim_prefix_token="<x>"), tokenizer)  # the id of the unknown token


def test_megatron_lm_s_own_default_is_kept_for_its_own_samples():
    parser = argparse.ArgumentParser()

    def add_data_args(parser):
        parser.add_argument("--fim-rate", type=float, default=0.5)
        return parser

    parser = options_of_lm.add_options(add_data_args)(parser)
    assert parser.parse_args(["--data-impl", "bfp"]).fim_rate is None
    assert parser.parse_args(["--data-impl", "bfp", "--fim-rate", "0.5"]).fim_rate == 0.5
    seen = []
    validate = options_of_lm.check_options(lambda args, defaults: seen.append(args.fim_rate), [])
    for words, expected in (([], 0.5), (["--fim-rate", "0.7"], 0.7)):
        validate(parser.parse_args(words))
        assert seen.pop() == expected


def test_megatron_deepspeed_declares_the_options():
    parser = argparse.ArgumentParser()

    def add_data_args(parser):
        parser.add_argument("--data-impl", choices=["mmap"])
        return parser

    parsed = options_of_deepspeed.add_options(add_data_args)(parser).parse_args([])
    assert (parsed.fim_rate, parsed.fim_spm_rate, parsed.fim_middle_token) == (None, 0.5, "<fim_middle>")


@pytest.mark.parametrize("targets_only", [False, True])
def test_megatron_deepspeed_s_samples_are_rearranged(write_dataset, monkeypatch, targets_only):
    prefix = write_dataset(documents_of([5, 9, 12, 3, 16, 7, 11] * 4)).prefix
    given = args(fim_rate=1.0, max_documents_per_sequence=None, even_sequences=False, data_path=[prefix])
    given.targets_only, given.padded_vocab_size = targets_only, 1000
    tokenizer = SimpleNamespace(vocab=IDS, eod=900)
    monkeypatch.setattr(builder_of_deepspeed, "parsed_options", lambda: given)
    monkeypatch.setitem(sys.modules, "megatron", module_with("megatron", get_tokenizer=lambda: tokenizer))
    train, *_ = builder_of_deepspeed.build_packed_splits(None)(prefix, "bfp", "1,0,0", [1, 1, 1], LENGTH, 7, True)
    whole = builder_of_deepspeed.build_packed_split(None)("train", prefix, "bfp", "", 1, LENGTH, 7, True)
    rearranged = 0
    for number in range(train.samples_per_epoch):
        sample = train[number]
        assert all(np.array_equal(sample[name], whole[number][name]) for name in sample)
        labels = sample["labels"] if targets_only else sample["text"][1:]
        begun = int((sample["text"][:-1] == 901).sum())
        assert np.isin(labels[sample["loss_mask"] > 0], [902, 903]).sum() == 2 * begun
        rearranged += begun
    fits = [length for length in [5, 9, 12, 3, 16, 7, 11] * 4 if length <= LENGTH - 3 + targets_only]
    assert rearranged == len(fits)
    given.padded_vocab_size = 903
    with pytest.raises(OptionError, match="not all sentinels, 901, 902, 903, are in the model's vocabulary"):
        builder_of_deepspeed.build_packed_split(None)("train", prefix, "bfp", "", 1, LENGTH, 7, True)
    tokenizer.vocab = None
    given.padded_vocab_size, given.fim_prefix_token = 1000, "904"  # NullTokenizer: tokens are numbers
    with pytest.raises(OptionError, match="--fim-middle-token '<m>'"):
        builder_of_deepspeed.build_packed_split(None)("train", prefix, "bfp", "", 1, LENGTH, 7, True)
