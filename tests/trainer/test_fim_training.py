"""Fill-in-the-middle in the trainer: sentinels by name, what may change in a resume, and what show shows of it."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from helpers.datasets import documents_of
from helpers.launching import steps
from helpers.megatron_helpers import Tokenizer, initialize_megatron
from helpers.trainer_in_process import SmallTokenizer, run_trainer
from trainer.data import build_train_dataset, build_valid_dataset

from megatron_bfp import OptionError

IDS = {"<fim_prefix>": 470, "<fim_middle>": 471, "<fim_suffix>": 472}


class WithSentinels(SmallTokenizer):
    def token_id(self, text):
        return IDS.get(text)


def test_documents_are_rearranged_in_training_and_validation(blend_config):
    initialize_megatron()
    tokenizer = type("", (Tokenizer,), {"token_id": lambda self, text: IDS.get(text)})()
    for build in (build_train_dataset, build_valid_dataset):
        datasets = build(dataclasses.replace(blend_config, fim_rate=0.5), tokenizer).datasets
        for dataset in datasets:
            assert dataset.sequence_index.path.endswith("-fim0.5-3")
            samples = [dataset[i]["tokens"] for i in range(dataset.samples_per_epoch)]
            shown = sum(int((tokens == 470).sum()) for tokens in samples)
            assert shown == dataset.sequence_index.counts["fim_documents"]
        plain = build(blend_config, tokenizer).datasets
        assert not any((dataset[0]["tokens"] == 470).any() for dataset in plain)


def test_it_trains_resumes_exactly_and_may_not_be_switched_on(write_dataset, tmp_path):
    prefix = write_dataset(documents_of([5, 9, 12, 3, 16, 7, 11, 30, 21] * 3)).prefix
    fim, tokenizer = ("--fim-rate", 0.5, "--targets-only"), WithSentinels()
    _, whole = run_trainer(prefix, *fim, tokenizer=tokenizer)
    run_trainer(prefix, *fim, "--save", tmp_path / "a", "--exit-interval", 2, tokenizer=tokenizer)
    _, resumed = run_trainer(prefix, *fim, "--load", tmp_path / "a", tokenizer=tokenizer)
    whole, resumed = steps(whole), steps(resumed)
    assert list(whole) == [1, 2, 3, 4] and resumed == {3: whole[3], 4: whole[4]}
    _, plain = run_trainer(prefix, "--targets-only", tokenizer=tokenizer)
    assert steps(plain) != whole
    with pytest.raises(OptionError, match="it was saved with --fim-rate 0.5, not"):
        run_trainer(prefix, "--targets-only", "--load", tmp_path / "a", tokenizer=tokenizer)


def test_what_cannot_be_is_refused(write_dataset):
    prefix = write_dataset(documents_of([5, 9, 12])).prefix
    for options, message in (
        (("--fim-rate", 2), "--fim-rate 2.0: give a number above 0"),
        (("--fim-rate", 0.5, "--data-impl", "mmap"), "--fim-rate needs --data-impl bfp"),
        (("--fim-rate", 0.5, "--fim-middle-token", "<x>"), "--fim-middle-token '<x>': --fim-rate needs a token"),
        (("--fim-rate", 0.5, "--fim-spm-rate", 2), "--fim-spm-rate 2.0"),
    ):
        with pytest.raises(OptionError, match=message):
            run_trainer(prefix, *options, tokenizer=WithSentinels())
