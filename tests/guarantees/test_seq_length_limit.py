"""``--seq-length`` beyond what memory holds is refused in one line wherever it can be given."""

import argparse

import pytest
from helpers.datasets import documents_of, write

from megatron_bfp import OptionError
from megatron_bfp.arguments import MOST_TOKENS
from megatron_bfp.commands import report as report_command
from megatron_bfp.commands import show as show_command
from megatron_bfp.integrations.megatron_deepspeed import options as megatron_deepspeed
from megatron_bfp.integrations.megatron_lm import options as megatron_lm

LINE = r"--seq-length must be an integer from 1 to 16,777,216 tokens, got {}"


def by_tool(prefix, seq_length):
    command = pytest.importorskip("megatron_bfp.commands.preprocess")
    command.main(["--indexed", prefix, "--seq-length", str(seq_length)])


def by_report(prefix, seq_length):
    report_command.main([prefix, "--seq-length", str(seq_length)])


def by_show(prefix, seq_length):
    parser = argparse.ArgumentParser()
    show_command.add_arguments(parser)
    show_command.execute(parser.parse_args([prefix, "--seq-length", str(seq_length), "--sequence", "0"]))


def by_trainer(prefix, seq_length):
    from trainer.arguments import parse_arguments

    options = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --train-iters 1"
    options += f" --data-path {prefix} --seq-length {seq_length} --tokenizer-model t.json"
    parse_arguments(options.split())


def by_megatron_lm(prefix, seq_length):
    megatron_lm.check(argparse.Namespace(dataloader_inter_document_masking=True, seq_length=seq_length))


def by_megatron_deepspeed(prefix, seq_length):
    megatron_deepspeed.check(argparse.Namespace(seq_length=seq_length))


BORDERS = [by_tool, by_report, by_show, by_trainer, by_megatron_lm, by_megatron_deepspeed]


@pytest.mark.parametrize("border", BORDERS, ids=lambda border: border.__name__)
@pytest.mark.parametrize("seq_length", [MOST_TOKENS + 1, 2147483647])
def test_fault_B09_a_length_that_memory_cannot_hold_is_refused(border, seq_length, tmp_path):
    prefix = write(tmp_path / "data", documents_of([3, 4])).prefix
    with pytest.raises(OptionError, match=LINE.format(seq_length)) as error:
        border(prefix, seq_length)
    assert "\n" not in str(error.value)


def test_fault_B09_the_longest_is_taken():
    options = {"dataloader_inter_document_masking": True, "balance_batches": 1, "seq_length": MOST_TOKENS}
    megatron_lm.check(argparse.Namespace(**options))
