"""The plan, the estimate and preflight read the command line that the trainer gets."""

import argparse
import dataclasses
import os
import shlex
import subprocess
import sys

import pytest

pytest.importorskip("tokenizers")

from cluster import memory
from cluster.layout import Layout
from cluster.memory import Model, estimate, model_of, num_parameters
from cluster.options import REPLACED, run_options, trainer_and_words
from cluster.plan import epochs, numbers, training_sequences
from cluster.recipe import read_recipe
from helpers.datasets import ROOT, documents_of, write

from megatron_bfp.commands.main import main as command_line
from megatron_bfp.errors import InputError, OptionError, SequenceIndexError
from megatron_bfp.samples.fill_in_the_middle import FimDocuments
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import (
    SPLIT_NAMES,
    IndexKey,
    build_command,
    cached_index_directory,
    index_directory,
    split_range,
)
from megatron_bfp.sequence_index.reader import SequenceIndex

TINY = str(ROOT / "examples/cluster/recipes/tiny.sh")
EXAMPLE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 --global-batch-size 8 "
EXAMPLE += "--train-iters 10 --seq-length 8 --split 80,20 --data-path data --tokenizer-model t.json"
LENGTHS = [7, 4, 2, 6, 3, 8, 1, 5, 2, 2]


def of(trainer, *words):
    return run_options(trainer, [*EXAMPLE.split(), *words])


def of_the_example(*words):
    return of("pretrain_gpt", *words)


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path / "data", documents_of(LENGTHS))


def test_fault_C06_what_comes_last_counts():
    """The recipe's options come first, those after it later."""
    usual = of_the_example()
    assert (usual.micro_batch_size, usual.global_batch_size, usual.train_iters, usual.seq_length) == (2, 8, 10, 8)
    words = "--micro-batch-size 4 --global-batch-size=16 --train-it 7 --seq-length 32 --split 1,1 --data-path 1 x 2 y"
    changed = of_the_example(*words.split(), "--num-layers", "3", "--max-documents-per-sequence", "5")
    assert (changed.micro_batch_size, changed.global_batch_size, changed.train_iters) == (4, 16, 7)
    assert (changed.seq_length, changed.split, changed.data_path) == (32, "1,1", ("1", "x", "2", "y"))
    assert (changed.num_layers, changed.max_documents_per_sequence) == (3, 5)
    assert (usual.even_sequences, usual.balance_batches) == (False, 1)
    assert (usual.context_parallel, usual.gathers_keys) == (1, False)
    changed = of_the_example("--context-parallel-size", "2", "--cp-comm-type", "all_gather")
    assert (changed.context_parallel, changed.gathers_keys) == (2, True)
    changed = of_the_example("--even-sequences", "--balance-batches", "0", "--balance-batches", "4")
    assert (changed.even_sequences, changed.balance_batches) == (True, 4)


@pytest.mark.parametrize("words", ["--micro-batch-size 0", "--no-such-option", "--split 0,0", "--hidden-size 63"])
def test_fault_C06_what_the_trainer_refuses_is_refused(words):
    with pytest.raises(OptionError):
        of_the_example(*words.split())


def test_fault_C06_the_zero_stage_is_the_configurations(tmp_path):
    config = tmp_path / "deepspeed.json"
    config.write_text('{"zero_optimization": {"stage": 3}}')
    assert of_the_example().zero_stage == 0
    assert of_the_example("--deepspeed_config", str(config)).zero_stage == 3
    assert of_the_example("--zero-stage", "2").zero_stage == 2
    config.write_text("{")
    with pytest.raises(InputError, match=f"^--deepspeed_config {config}: "):
        of_the_example("--deepspeed_config", str(config))


@pytest.mark.parametrize("trainer", ["megatron_lm", "megatron_deepspeed"])
def test_fault_A15_megatrons_options_after_the_recipe_are_known(trainer):
    words = "--unknown-option a b --bf16 --data-cache-path cache --max-documents-per-sequence 7 --seq-length=16"
    words += " --even-sequences --targets-only --balance-batches 4"
    words += " --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --recompute-granularity full --save CKPT"
    words += " --global-batch-size 32 --data-path 0.5 x 0.5 y"
    options = of(trainer, *words.split())
    assert (options.seq_length, options.max_documents_per_sequence, options.data_cache_path) == (16, 7, "cache")
    assert (options.even_sequences, options.targets_only, options.balance_batches) == (True, True, 4)
    assert (options.tensor_parallel, options.pipeline_parallel, options.global_batch_size) == (2, 2, 32)
    assert options.half_precision and options.full_recomputation and options.save == "CKPT"
    assert options.data_path == ("0.5", "x", "0.5", "y") and not options.needs_eod
    layout = Layout.of(options, 1, 8)
    assert (layout.data_parallel, layout.accumulation) == (2, 8)
    # Megatron's parsers take no abbreviations: this one is unknown to them, and to ours
    assert of(trainer, "--micro-batch", "4").micro_batch_size == 2


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--context-parallel-size 2", {"context_parallel": 2, "pipeline_parallel": 1, "gathers_keys": False}),
        ("--context-parallel-size 2 --cp-comm-type all_gather", {"context_parallel": 2, "gathers_keys": True}),
        ("--ds-sequence-parallel-size 4", {"context_parallel": 4}),
        ("--group-query-attention --num-query-groups 2", {"num_query_groups": 2}),
        ("--num-query-groups 2", {"num_query_groups": 4}),
        ("--num-key-value-heads 1", {"num_query_groups": 1}),
        ("--num-experts 8", {"has_experts": True}),
        ("--num-experts 1", {"has_experts": False}),
        ("--use-distributed-optimizer", {"zero_stage": 1}),
        ("--zero-stage 3", {"zero_stage": 3}),
        ("--rampup-batch-size 2 2 100", {"batch_size_grows": True}),
        ("--ffn-hidden-size 80", {"ffn_hidden_size": 80}),
        ("--fp16", {"half_precision": True}),
        ("--data-impl bfp --data-impl bfp", {"data_impl": "bfp"}),
        ("--eval-iters 0", {"used_splits": ("train",)}),
        ("", {"used_splits": ("train", "valid", "test"), "pipeline_parallel": 1, "ffn_hidden_size": 256}),
    ],
)
def test_fault_A15_megatrons_options_mean_what_they_mean_there(words, expected):
    options = of("megatron_lm", *words.split())
    assert {name: getattr(options, name) for name in expected} == expected


def test_fault_A15_each_trainer_reads_its_own_splits():
    assert of("pretrain_gpt").used_splits == ("train",)
    assert of("pretrain_gpt", "--eval-interval", "5").used_splits == ("train", "valid")
    assert of("megatron_deepspeed", "--eval-iters", "0").used_splits == ("train", "valid", "test")
    assert of("megatron_deepspeed", "--split", "80/10/10").split == "80,10,10"
    assert of("megatron_deepspeed", "--tokenizer-type", "HFTokenizer").tokenizer_type == "HuggingFaceTokenizer"


@pytest.mark.parametrize("name", REPLACED)
def test_fault_A15_options_beside_which_megatron_ignores_the_launchers_are_refused(name):
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(OptionError, match=f"^{option} cannot be used with the launchers"):
        of("megatron_lm", option, "x")


def test_fault_A15_two_values_of_data_impl_are_refused_for_megatron():
    with pytest.raises(OptionError, match="--data-impl is given as bfp and mmap"):
        of("megatron_lm", "--data-impl", "bfp", "--data-impl", "mmap")


def test_fault_A15_another_trainer_is_refused():
    with pytest.raises(OptionError, match="^TRAINER=nanogpt: give one of pretrain_gpt, megatron_lm, mega"):
        run_options("nanogpt", [])
    assert trainer_and_words(["a", "b"]) == ("a", ["b"])
    with pytest.raises(OptionError, match="--trainer"):
        trainer_and_words([])


def test_fault_A15_the_plan_looks_where_training_looks(dataset, tmp_path):
    """With the cap, under the cache path, for the split and the sequence length that come last."""
    prefix, cache = dataset.prefix, str(tmp_path / "cache")
    words = ("--data-path", prefix, "--max-documents-per-sequence", "1", "--seq-length", "16", "--split", "70,30")
    key = IndexKey(16, 0, 7, 1)
    with pytest.raises(SequenceIndexError) as error:
        training_sequences(prefix, of_the_example(*words))
    command = shlex.split(str(error.value).partition("Build it: ")[2])
    assert command[1:] == ["index", prefix, "--seq-length", "16", *words[2:4], *words[-2:]]
    for directory in (index_directory(prefix), cached_index_directory(dataset, cache)):
        index = build(dataset, key, directory)
        options = of_the_example(*words, "--data-cache-path", cache)
        assert training_sequences(prefix, options) == len(index) == 7
        os.rename(index.path, tmp_path / f"gone{len(os.listdir(tmp_path))}")
        with pytest.raises(SequenceIndexError):
            training_sequences(prefix, options)
    build(dataset, IndexKey(16, 0, 7), index_directory(prefix))  # without the cap: of another run
    with pytest.raises(SequenceIndexError, match="there is no sequence index s16-d0-7-m1"):
        training_sequences(prefix, options)


def test_the_plan_looks_for_even_sequences(dataset):
    prefix = dataset.prefix
    words = ("--data-path", prefix, "--seq-length", "16", "--split", "70,30")
    build(dataset, IndexKey(16, 0, 7), index_directory(prefix))
    for trainer in ("pretrain_gpt", "megatron_lm"):
        with pytest.raises(SequenceIndexError, match="no sequence index s16-d0-7-e.* --even-sequences --split 70,30$"):
            training_sequences(prefix, of(trainer, *words, "--data-impl", "bfp", "--even-sequences"))
    index = build(dataset, IndexKey(16, 0, 7, None, True), index_directory(prefix))
    assert training_sequences(prefix, of_the_example(*words, "--even-sequences")) == len(index)


def test_the_plan_looks_for_targets_only(dataset):
    words = ("--data-path", dataset.prefix, "--seq-length", "16", "--split", "70,30", "--targets-only")
    for trainer in ("pretrain_gpt", "megatron_lm", "megatron_deepspeed"):
        with pytest.raises(SequenceIndexError, match="no sequence index s16-d0-7-t.* --targets-only --split 70,30$"):
            training_sequences(dataset.prefix, of(trainer, *words, "--data-impl", "bfp"))
    index = build(dataset, IndexKey(16, 0, 7, targets_only=True), index_directory(dataset.prefix))
    assert training_sequences(dataset.prefix, of_the_example(*words)) == len(index)


def test_the_plan_looks_for_fill_in_the_middle(dataset):
    words = (
        "--data-path",
        dataset.prefix,
        "--seq-length",
        "16",
        "--split",
        "70,30",
        "--fim-rate",
        "0.5",
        "--seed",
        "7",
    )
    for trainer in ("pretrain_gpt", "megatron_lm", "megatron_deepspeed"):
        with pytest.raises(SequenceIndexError, match="s16-d0-7-fim0.5-7.* --fim-rate 0.5 --seed 7 --split 70,30$"):
            training_sequences(dataset.prefix, of(trainer, *words, "--data-impl", "bfp"))
    key = IndexKey(16, 0, 7, fim=FimDocuments(0.5, 7))
    index = build(dataset, key, index_directory(dataset.prefix))
    assert training_sequences(dataset.prefix, of_the_example(*words)) == len(index)


def test_the_plan_says_that_batches_are_composed_by_cost():
    def said(*words):
        options = of_the_example(*words)
        return dict(numbers(Layout.of(options, 1, 1), options)).get("batches")

    assert said("--balance-batches", "4") == "composed by cost, 4 at a time (--balance-batches)"
    assert said() is said("--balance-batches", "0") is None
    with pytest.raises(OptionError, match="--balance-batches must not be negative"):
        of("megatron_lm", "--balance-batches", "-1")


def test_fault_A15_a_split_without_a_sequence_is_said(dataset):
    for words in (("--split", "0,1"), ("--split", "0,1", "--data-impl", "mmap"), ("--split", "0.01,1")):
        if words[1] == "0.01,1":
            build(dataset, IndexKey(8, 0, 0), index_directory(dataset.prefix))
        with pytest.raises(OptionError, match=f"--split {words[1]}: the train split of .*data has no sequence"):
            training_sequences(dataset.prefix, of_the_example(*words))


def test_concatenation_splits_by_sequences_as_megatron_does(tmp_path):
    """A document of three sequences: megatron-core's split of 80 % has 4 of 5 of these, 20 tokens."""
    dataset = write(tmp_path / "data", [[[1] * 5, [2] * 5, [3] * 5], [4] * 5, [5] * 5])
    for seq_length, expected in ((4, 4), (5, 3), (19, 1)):
        options = of_the_example("--data-impl", "mmap", "--seq-length", str(seq_length))
        assert training_sequences(dataset.prefix, options) == expected
    with pytest.raises(OptionError, match="has no sequence"):
        training_sequences(dataset.prefix, of_the_example("--data-impl", "mmap", "--seq-length", "20"))


def rows(dataset, *words):
    options = of_the_example("--data-path", *dataset, *words)
    return [text for _, text in epochs(options, Layout.of(options, 1, 1))]


def test_fault_C06_more_than_four_epochs_are_said(tmp_path):
    prefix = write(tmp_path / "data", documents_of([8] * 10)).prefix
    build(write(tmp_path / "data", documents_of([8] * 10)), IndexKey(8, 0, 8), index_directory(prefix))
    assert rows([prefix], "--train-iters", "4") == [f"1.0 steps for the 8 sequences of {prefix}, seen 4.00 times"]
    seen, warning = rows([prefix], "--train-iters", "5")
    assert seen.endswith("seen 5.00 times")
    assert warning == f"MORE THAN 4 EPOCHS of {prefix}: take fewer steps, or more data"
    (seen,) = rows([prefix], "--train-iters", "5", "--global-batch-size", "2")
    assert seen == f"4.0 steps for the 8 sequences of {prefix}, seen 1.25 times"


def test_fault_C06_each_corpus_of_a_blend_has_its_epochs(tmp_path):
    prefixes = []
    for name, count in (("a", 10), ("b", 20)):
        dataset = write(tmp_path / name, documents_of([8] * count))
        build(dataset, IndexKey(8, 0, count * 4 // 5), index_directory(dataset.prefix))
        prefixes.append(dataset.prefix)
    first, warning, second = rows(["3", prefixes[0], "1", prefixes[1]], "--train-iters", "8")
    assert first.endswith(f"8 sequences of {prefixes[0]}, seen 6.00 times") and "MORE THAN 4" in warning
    assert second == f"8.0 steps for the 16 sequences of {prefixes[1]}, seen 1.00 times"
    one_epoch = rows(prefixes, "--train-iters", "3")
    assert len(one_epoch) == 2 and all(text.endswith("seen 1.00 times") for text in one_epoch)
    warning, *both = rows(prefixes, "--train-iters", "4")  # without weights megatron-core blends one epoch
    assert warning.startswith("MORE THAN ONE EPOCH of a blend without weights") and len(both) == 2


def test_fault_A15_a_recipe_that_reads_the_environment_gives_what_the_run_gets(tmp_path, monkeypatch):
    recipe = tmp_path / "my recipe.sh"
    recipe.write_text(f'source "{TINY}"\nmicro_batch_size=${{MICRO:-4}}\necho hello\n')
    usual = read_recipe(str(recipe))
    assert (usual.options.micro_batch_size, usual.device, usual.vocab_size) == (4, "cpu", 8192)
    monkeypatch.setenv("MICRO", "1")
    monkeypatch.chdir(tmp_path)
    assert read_recipe("my recipe.sh").options.micro_batch_size == 1
    assert read_recipe(str(recipe), ["--micro-batch-size", "2"]).options.micro_batch_size == 2
    recipe.write_text(f'source "{TINY}"\nunset num_layers\n')
    with pytest.raises(InputError, match="my recipe.sh: not a recipe: .*num_layers"):
        read_recipe(str(recipe))
    recipe.write_text(f'source "{TINY}"\nvocab_size=many\n')
    with pytest.raises(InputError, match="vocab_size is 'many'"):
        read_recipe(str(recipe))


def test_fault_C06_the_estimate_knows_what_comes_after_the_recipe(monkeypatch, capsys):
    def of_recipe(*words):
        recipe = read_recipe(TINY, words)
        return estimate(model_of(recipe), Layout.of(recipe.options, 1, 2))

    usual = of_recipe()
    assert of_recipe("--micro-batch-size", "2").activations * 2 == usual.activations
    assert of_recipe("--num-layers", "8").weights > usual.weights
    assert of_recipe("--bf16").weights * 2 == usual.weights
    assert of_recipe("--zero-stage", "3").optimizer == usual.optimizer != of_recipe("--zero-stage", "0").optimizer
    assert of_recipe("--recompute-granularity", "full").activations < usual.activations
    command_line = ["estimate_memory", TINY, "--nodes", "1", "--gpus-per-node", "2", "--micro-batch-size", "2"]
    monkeypatch.setattr(sys, "argv", command_line)
    memory.main()
    assert capsys.readouterr().out == f"{of_recipe('--micro-batch-size', '2')}\n" != f"{usual}\n"


def test_fault_C06_what_is_not_estimated_is_said():
    options = of("megatron_lm", "--pipeline-model-parallel-size", "2")
    for other in (options, dataclasses.replace(options, pipeline_parallel=1, has_experts=True)):
        with pytest.raises(OptionError, match="^not estimated"):
            estimate(Model(other, 100, False), Layout.of(other, 1, 2))
    alone = Model(dataclasses.replace(options, pipeline_parallel=1), 100, False)
    assert estimate(alone, Layout.of(alone.options, 1, 2)).total > 12 * num_parameters(alone)


def test_fault_C06_a_batch_of_one_micro_batch_a_rank_follows_from_the_cluster():
    options = run_options("pretrain_gpt", EXAMPLE.replace("--global-batch-size 8 ", "").split())
    assert (options.global_batch_size, Layout.of(options, 2, 3).global_batch_size) == (None, 12)
    for nodes, gpus in ((0, 8), (1, 0), (-1, 8)):
        with pytest.raises(OptionError, match="give at least one of each"):
            Layout.of(options, nodes, gpus)


def words_in_bash(command, folder):
    """What a command's program gets when the command is given to bash as it stands."""
    tool = folder / command.split()[0]
    tool.write_text("#!/usr/bin/env bash\nprintf '%s\\0' \"$@\"\n")
    tool.chmod(0o755)
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("name", ["my data", "$(touch owned)", "`touch owned`", "it's", "a;b", "<|x|>", "*", "-x"])
@pytest.mark.parametrize(
    "first, end, cap, split",
    [(0, 10, None, None), (0, 8, None, "80, 20"), (0, 8, None, None), (3, 5, 2, None), (8, 10, None, None)],
)
def test_fault_B12_the_command_in_a_message_builds_the_index(tmp_path, name, first, end, cap, split):
    dataset = write(tmp_path / name, documents_of(LENGTHS))
    key = IndexKey(8, first, end, cap)
    words = words_in_bash(build_command(dataset, key, split), tmp_path)
    assert words[:2] == ["index", dataset.prefix] and (split is None or words[-1] == split)
    command_line(words)
    index = SequenceIndex(os.path.join(index_directory(dataset.prefix), key.name), dataset)
    with open(os.path.join(index.path, "runs.npy"), "r+b") as file:  # its message has a command that mends it
        file.write(b"\0")
    with pytest.raises(SequenceIndexError) as error:
        SequenceIndex(index.path, dataset)
    words = words_in_bash(str(error.value).partition("Rebuild it: ")[2], tmp_path)
    assert words[-1] == "--overwrite"
    command_line(words)
    assert len(SequenceIndex(index.path, dataset)) == len(index)
    assert not (tmp_path / "owned").exists() and not os.path.exists("owned")


def test_fault_B12_any_range_of_documents_is_a_part_of_the_split_that_a_command_gives(tmp_path):
    """Also where the split was not told, and for a range that rounding has left empty."""
    dataset = write(tmp_path / "data", documents_of([1] * 37))
    for first in range(38):
        for end in range(first, 38):
            words = shlex.split(build_command(dataset, IndexKey(8, first, end)))
            split = words[words.index("--split") + 1] if "--split" in words else None
            ranges = [split_range(37, split, name) for name in SPLIT_NAMES]
            assert (first, end) in ranges, (first, end, split)


def test_fault_B12_the_command_that_shows_a_spike_is_quoted(tmp_path):
    pytest.importorskip("deepspeed")
    from trainer.reports import show_command

    fields = {"split": "80, 20", "max_documents_per_sequence": 3, "data_cache_path": "a b"}
    fields |= {"even_sequences": True, "targets_only": True, "fim_rate": None}
    options = argparse.Namespace(seq_length=8, **fields)
    words = words_in_bash(show_command(options), tmp_path)
    assert words[:6] == ["show", "PREFIX", "--seq-length", "8", "--split", "80, 20"]
    assert words[6:10] == ["--max-documents-per-sequence", "3", "--data-cache-path", "a b"]
    assert words[10:12] == ["--even-sequences", "--targets-only"]
    fields = {"split": "1", "max_documents_per_sequence": None, "data_cache_path": None}
    fields |= {"even_sequences": False, "targets_only": False, "fim_rate": None}
    options = argparse.Namespace(seq_length=8, **fields)
    assert not any(word in show_command(options) for word in ("cap", "None", "even", "targets"))
