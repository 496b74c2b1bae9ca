"""Training on balanced batches: the same samples in each step, the same losses, and resumption at any sample."""

import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import dataclasses

from helpers.datasets import documents_of, write
from helpers.launching import steps
from helpers.megatron_helpers import Tokenizer, initialize_megatron
from helpers.trainer_in_process import run_trainer
from trainer.checkpoints.history import DataHistory, changed_blocks
from trainer.data import GlobalOrderSampler, build_train_dataset, build_valid_dataset, micro_batches, origin_of

from megatron_bfp import BalancedDataset, OptionError
from megatron_bfp.commands.main import main as command_line

LENGTHS = [5, 40, 1, 17, 31, 32, 9, 70, 3, 12, 25, 8]
BATCH, STEPS = 8, 6


@pytest.fixture
def config(blend_config, write_dataset):
    """A run of some epochs of two datasets, of sequences that differ in work."""
    lengths = np.random.default_rng(0).integers(1, 40, 200).tolist()
    prefixes = [write_dataset(documents_of(part), name).prefix for part, name in ((lengths, "a"), (lengths[60:], "b"))]
    return dataclasses.replace(
        blend_config,
        data_path=("0.6", prefixes[0], "0.4", prefixes[1]),
        global_batch_size=BATCH,
        micro_batch_size=2,
        train_iters=STEPS,
        tensor_model_parallel_size=1,
    )


def origins_of(config, **changes):
    """Where each sample of each step comes from, as [step][slot]; and the dataset."""
    initialize_megatron()
    config = dataclasses.replace(config, **changes)
    train = build_train_dataset(config, Tokenizer())
    origins = [origin_of(train, sample) for sample in range(STEPS * config.global_batch_size)]
    return [origins[first : first + BATCH] for first in range(0, STEPS * BATCH, BATCH)], train


def test_each_global_batch_keeps_its_samples(config):
    plain, _ = origins_of(config, balance_batches=0)
    balanced, train = origins_of(config)
    assert isinstance(train, BalancedDataset) and balanced != plain
    assert [sorted(batch) for batch in balanced] == [sorted(batch) for batch in plain]
    assert [batch for batch, other in zip(balanced, plain) if batch != other]
    composed, _ = origins_of(config, balance_batches=3)
    assert [sorted(batch) for batch in composed] != [sorted(batch) for batch in plain]
    for first in (0, 3):
        assert sorted(sum(composed[first : first + 3], [])) == sorted(sum(plain[first : first + 3], []))


def test_a_sample_is_traced_through_the_balanced_order(config):
    origins, train = origins_of(config)
    for sample, origin in enumerate(sum(origins, [])):
        chunks = sum(1 for length in np.diff(train[sample]["cu_seqlens"].numpy()) if length)
        assert len(origin.documents) <= chunks <= len(origin.documents) + 1  # the padding is a chunk
    with pytest.raises(IndexError):
        origin_of(train, len(train))


def test_show_names_the_sequence_of_a_sample(config, capsys):
    """By its number without balancing."""
    config = dataclasses.replace(config, data_path=config.data_path[1:2])
    _, train = origins_of(config)
    capsys.readouterr()
    for sample in (0, 11):
        words = ["show", config.data_path[0], "--seq-length", str(config.seq_length), "--split", config.split]
        command_line([*words, "--seed", str(config.seed), "--sample", str(train.sample_of(sample)), "--json"])
        assert json.loads(capsys.readouterr().out)["sequence"] == origin_of(train, sample).sequence


def test_evaluation_and_concatenation_are_not_balanced(config):
    initialize_megatron()
    valid = build_valid_dataset(config, Tokenizer())
    assert not any(isinstance(dataset, BalancedDataset) for dataset in valid.datasets)
    concatenated = build_train_dataset(dataclasses.replace(config, data_impl="mmap"), Tokenizer())
    assert not isinstance(concatenated, BalancedDataset)


@pytest.mark.parametrize("name, end", [("even_sequences", "-e"), ("targets_only", "-t")])
def test_other_packings_have_an_index_of_their_own(config, name, end):
    initialize_megatron()
    for build in (build_train_dataset, build_valid_dataset):
        for is_on in (True, False):
            datasets = build(dataclasses.replace(config, **{name: is_on}), Tokenizer()).datasets
            assert all(dataset.sequence_index.path.endswith(end) == is_on for dataset in datasets)


@pytest.mark.parametrize("balance_batches, num_workers", [(1, 0), (1, 2), (2, 0)])
def test_batches_go_on_at_any_step(config, balance_batches, num_workers):
    initialize_megatron()
    config = dataclasses.replace(config, balance_batches=balance_batches)

    def tokens(first_step, num_workers):
        train = build_train_dataset(config, Tokenizer())
        sampler = GlobalOrderSampler(first_step * BATCH, STEPS * BATCH, 2, BATCH, 0, 1)
        return [batch["tokens"].tolist() for batch in micro_batches(train, sampler, num_workers, torch.device("cpu"))]

    whole = tokens(0, 0)
    for step in range(STEPS) if not num_workers else (0, 3):
        assert tokens(step, num_workers) == whole[step * BATCH // 2 :]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two datasets whose sequences of 32 tokens differ in work; returns their folder."""
    folder = tmp_path_factory.mktemp("data")
    lengths = np.random.default_rng(1).permutation([*LENGTHS, *[2] * 40, *[31] * 9]).tolist()
    for name, part in (("first", lengths), ("second", lengths[:40])):
        write(folder / name, [[1 + token % 479 for token in document] for document in documents_of(part)])
    return folder


def losses_of(data, log, *options):
    blend = ("--data-path", 0.5, data / "first", 0.5, data / "second")
    run_trainer(None, *blend, "--train-iters", 10, "--json-log", log, "--micro-batch-size", 1, *options)
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def test_balancing_changes_no_loss(data, tmp_path):
    plain = losses_of(data, tmp_path / "0", "--balance-batches", 0)
    balanced = losses_of(data, tmp_path / "1")
    print(f"losses differ by {max(abs(a - b) for a, b in zip(plain, balanced)):.1e} in 10 steps")
    assert len(plain) == 10 and plain[-1] < plain[0] - 0.1
    assert balanced[0] == pytest.approx(plain[0], abs=1e-6) and balanced == pytest.approx(plain, abs=1e-4)
    other = losses_of(data, tmp_path / "2", "--seed", 5)
    assert abs(other[0] - plain[0]) > 1e-3


def run_of(data, *options):
    return run_trainer(None, "--data-path", 0.5, data / "first", 0.5, data / "second", *options)


@pytest.fixture(scope="module")
def composed(data, tmp_path_factory):
    """A run over blocks of two batches: its steps, what it printed, and its checkpoints of each step."""
    folder = tmp_path_factory.mktemp("composed")
    _, output = run_of(data, "--balance-batches", 2, "--save", folder, "--save-interval", 1)
    return steps(output), output, folder


def up_to(folder, iteration, target):
    """A copy of the checkpoints up to a step."""
    shutil.copytree(folder, target)
    for later in range(iteration + 1, 5):
        shutil.rmtree(target / f"iter_{later:07d}")
    return target


def test_the_log_says_that_batches_are_composed_by_cost(data, composed):
    line = "batches are composed by cost: 2 global batches of 4 samples are balanced together, for 2 samples at once"
    assert line in composed[1]
    assert "composed by cost" not in run_of(data, "--train-iters", 1)[1]


@pytest.mark.parametrize("iteration", [1, 2, 3])
def test_a_run_of_composed_batches_resumes_exactly_at_any_step(data, composed, tmp_path, iteration):
    whole, _, folder = composed
    _, output = run_of(data, "--balance-batches", 2, "--load", up_to(folder, iteration, tmp_path / "saved"))
    assert steps(output) == {step: whole[step] for step in range(iteration + 1, 5)}


@pytest.mark.parametrize(
    "options, named",
    [
        (["--balance-batches", 1], "--balance-batches 2, not 1 (can change after a multiple of 2 steps)"),
        (["--balance-batches", 3], "--balance-batches 2, not 3 (can change after a multiple of 6 steps)"),
        (["--balance-batches", 2, "--micro-batch-size", 1], "--micro-batch-size 2, not 1 (can change"),
    ],
)
def test_blocks_that_are_not_finished_go_on_under_the_same_sizes_only(data, composed, tmp_path, options, named):
    saved = up_to(composed[2], 3, tmp_path / "saved")
    with pytest.raises(OptionError) as error:
        run_of(data, "--load", saved, *options)
    assert f"it was saved with {named}" in str(error.value) and "--override-checkpoint-args" in str(error.value)
    status, output = run_of(data, "--load", saved, *options, "--override-checkpoint-args")
    assert status == 0 and list(steps(output)) == [4]


@pytest.mark.parametrize("options", [[], ["--balance-batches", 2, "--micro-batch-size", 1]])
def test_blocks_may_change_where_both_begin(data, composed, tmp_path, options):
    saved = up_to(composed[2], 2, tmp_path / "saved")
    status, output = run_of(data, "--load", saved, *options)
    assert status == 0 and list(steps(output)) == [3, 4] and "override" not in output


def test_an_end_that_moves_inside_a_block_is_refused(data, tmp_path):
    """A blend is as long as its run: what is left of it at the end is no whole block, until the run gets longer."""
    options = ("--balance-batches", 4, "--save", tmp_path, "--load", tmp_path)
    run_of(data, *options, "--train-iters", 6)
    with pytest.raises(OptionError, match="--balance-batches above 1, --train-iters may change it"):
        run_of(data, *options, "--train-iters", 8)
    assert list(steps(run_of(data, *options, "--train-iters", 7)[1])) == [7]


def test_balancing_inside_batches_may_be_switched_on_and_off(data, tmp_path):
    whole = steps(run_of(data, "--balance-batches", 0)[1])
    run_of(data, "--balance-batches", 0, "--save", tmp_path, "--exit-interval", 1)
    record = tmp_path / "iter_0000001" / "complete.json"
    content = json.loads(record.read_text())
    del content["data"]["blocks"], content["data"]["options"]["--even-sequences"]
    record.write_text(json.dumps(content))  # as before there was balancing
    options = ("--load", tmp_path, "--save", tmp_path)
    rest = steps(run_of(data, *options, "--exit-interval", 2)[1]) | steps(
        run_of(data, *options, "--balance-batches", 0)[1]
    )
    assert list(rest) == [2, 3, 4]
    for step, (loss, norm, consumed) in rest.items():
        assert float(loss) == pytest.approx(float(whole[step][0]), abs=1e-5) and consumed == whole[step][2]
        assert float(norm) == pytest.approx(float(whole[step][1]), rel=1e-4)


def test_a_checkpoint_that_did_not_record_its_data_goes_on_in_blocks_where_one_begins(data, tmp_path):
    run_of(data, "--save", tmp_path, "--save-interval", 1, "--exit-interval", 2)
    for iteration in (1, 2):
        record = tmp_path / f"iter_{iteration:07d}" / "complete.json"
        content = json.loads(record.read_text())
        del content["data"]
        record.write_text(json.dumps(content))
    options = ("--load", tmp_path, "--balance-batches", 2)
    assert list(steps(run_of(data, *options)[1])) == [3, 4]
    shutil.rmtree(tmp_path / "iter_0000002")
    with pytest.raises(OptionError, match="saved with --balance-batches 0, not 2"):
        run_of(data, *options)
    assert "samples consumed so far: 4; the run" in run_of(data, *options, "--override-checkpoint-args")[1]


@pytest.mark.parametrize("option", ["--even-sequences", "--targets-only"])
def test_other_packings_may_not_be_switched_on_in_a_run(data, tmp_path, option):
    run_of(data, "--save", tmp_path, "--exit-interval", 1)
    record = tmp_path / "iter_0000001" / "complete.json"
    content = json.loads(record.read_text())
    for is_recorded in (True, False):
        if not is_recorded:
            del content["data"]["options"][option]
            record.write_text(json.dumps(content))
        with pytest.raises(OptionError, match=f"it was saved with {option} off, not on"):
            run_of(data, "--load", tmp_path, option)


def test_blocks_are_compared_by_what_orders_them():
    def blocks(batches, micro_batch_size=2, ranks=2):
        sizes = {"--balance-batches": batches, "--global-batch-size": 8, "--micro-batch-size": micro_batch_size}
        return {"blocks": sizes | {"data-parallel ranks": ranks}}

    for same in ((blocks(0), blocks(1, 4)), (blocks(4), blocks(4)), ({}, blocks(1))):
        assert changed_blocks(*same, iteration=3) == []
    (change,) = changed_blocks(blocks(4), blocks(4, 4, 1), 3)  # other samples share a micro-batch
    assert change.startswith("--micro-batch-size 2, not 4, data-parallel ranks 2, not 1")
    assert changed_blocks(blocks(4), blocks(4, 2, 4), 3) == [
        "data-parallel ranks 2, not 4 (can change after a multiple of 4 steps)"
    ]
    assert changed_blocks({}, blocks(4), 6) == ["--balance-batches 0, not 4 (can change after a multiple of 4 steps)"]
    (change,) = changed_blocks(blocks(4), blocks(6), 8)
    assert change.startswith("--balance-batches 4, not 6 ") and "multiple of 12 steps" in change
    assert changed_blocks(blocks(4), blocks(6), 24) == []


def test_samples_consumed_are_counted_inside_a_block(config):
    """Of each dataset of a blend, also where a run stops and resumes inside a block."""
    origins, train = origins_of(config, balance_batches=3)
    prefixes = config.data_path[1::2]
    blocks = {"--balance-batches": 3, "--global-batch-size": BATCH}
    description = {"corpora": [{"prefix": prefix} for prefix in prefixes], "blocks": blocks}
    for first in range(STEPS):
        run = DataHistory(description, train, first * BATCH)
        for step in range(first, STEPS + 1):
            seen = [origin.prefix for batch in origins[first:step] for origin in batch]
            assert run.consumed(step * BATCH) == {prefix: seen.count(prefix) for prefix in prefixes}


def test_the_order_inside_an_unfinished_block_is_part_of_the_digest(config):
    _, plain = origins_of(config, balance_batches=0)
    digests = {}
    for batches, dataset in ((1, plain), (1, origins_of(config)[1]), (3, origins_of(config, balance_batches=3)[1])):
        blocks = {"--balance-batches": batches, "--global-batch-size": BATCH}
        corpora = [{"prefix": prefix} for prefix in config.data_path[1::2]]
        run = DataHistory({"corpora": corpora, "blocks": blocks}, dataset)
        for step in range(1, 5):
            digests.setdefault(step, []).append(run.order(step * BATCH))
    for step, (without, balanced, composed) in digests.items():
        assert without == balanced and (without == composed) == (step % 3 == 0)
