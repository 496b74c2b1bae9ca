"""A run goes on only with the data, the order and the model of its checkpoint. Runs are one rank in this process."""

import json
import os
import re
import shutil

import pytest

pytest.importorskip("deepspeed")

from helpers.datasets import documents_of, write
from helpers.launching import steps
from helpers.trainer_in_process import SmallTokenizer, run_trainer
from trainer.checkpoints import history
from trainer.checkpoints.history import DataHistory
from trainer.data import Origin

from megatron_bfp import OptionError
from megatron_bfp.huggingface.checkpoint import reading

LENGTHS = [5, 40, 1, 17, 31, 32, 9, 70, 3, 12, 25, 8]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two datasets, "first" and "second", and "copy" of the first; returns their folder."""
    folder = tmp_path_factory.mktemp("data")
    write(folder / "first", documents_of(LENGTHS))
    write(folder / "second", documents_of(LENGTHS[::-1]))
    for suffix in (".bin", ".idx"):
        shutil.copy(folder / f"first{suffix}", folder / f"copy{suffix}")
    return folder


def blend_of(data, first, second):
    return ["--data-path", first, data / "first", second, data / "second"]


@pytest.fixture(scope="module")
def whole(data):
    """Steps of a run without a stop, on a blend."""
    return steps(run_trainer(None, *blend_of(data, 0.5, 0.5))[1])


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """The checkpoints of a run on a blend that was stopped after two of four steps."""
    folder = tmp_path_factory.mktemp("saved")
    run_trainer(None, *blend_of(data, 0.5, 0.5), "--save", folder, "--exit-interval", 2)
    return folder


def resumed(saved, *options, **keywords):
    return run_trainer(None, "--load", saved, *options, **keywords)


def test_fault_A12_the_same_run_goes_on(data, saved, whole):
    status, output = resumed(saved, *blend_of(data, 0.5, 0.5))
    assert status == 0 and list(steps(output)) == [3, 4]
    assert steps(output) == {step: whole[step] for step in (3, 4)}


@pytest.mark.parametrize(
    "change", [["--split", "0.5,0.5,0"], ["--lr", "0.02"], ["--num-workers", "1"], "copy", "weights"]
)
def test_fault_A12_what_decides_no_data_may_change(data, saved, change):
    """Shares of a split and weights may be written otherwise, and data be moved."""
    paths = blend_of(data, 0.5, 0.5)
    if change == "copy":
        paths[2], change = data / "copy", []
    elif change == "weights":
        paths, change = blend_of(data, 3, 3), []
    status, output = resumed(saved, *paths, *change)
    assert status == 0 and list(steps(output)) == [3, 4]


REFUSED = {
    "seed": (["--seed", 99], "--seed 1234, not 99"),
    "split": (["--split", "2,1,0"], "--split 1,1,0, not 2,1,0"),
    "empty split": (["--split", "1,0,1"], "--split 1,1,0, not 1,0,1"),
    "sequence length": (["--seq-length", 64], "--seq-length 32, not 64"),
    "cap": (["--max-documents-per-sequence", 3], "--max-documents-per-sequence not given, not 3"),
    "concatenation": (["--data-impl", "mmap"], "--data-impl bfp, not mmap"),
    "concatenation with a mask": (
        ["--data-impl", "mmap", "--dataloader-inter-document-masking"],
        "--data-impl bfp, not mmap; --dataloader-inter-document-masking off, not on",
    ),
    "mask of EOD": (["--eod-mask-loss"], "--eod-mask-loss off, not on"),
    "layers": (["--num-layers", 3], "--num-layers 2, not 3"),
    "heads": (["--num-attention-heads", 2], "--num-attention-heads 4, not 2; --num-query-groups 4, not 2"),
    "groups": (["--group-query-attention", "--num-query-groups", 4, "--rotary-base", 5], "--rotary-base 10000, not 5"),
    "epsilon": (["--norm-epsilon", 0.1], "--norm-epsilon 1e-05, not 0.1"),
    "one corpus": (["--data-path", "first"], "--data-path of 2 datasets, not 1"),
    "weights": (["--data-path", 1, "first", 3, "second"], "--data-path with 50 % of PREFIX, not 25 %"),
    "no weights": (["--data-path", "first", "second"], "--data-path with 50 % of PREFIX, not all samples"),
    "order of corpora": (["--data-path", 1, "second", 1, "first"], "first (12 documents, .idx "),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_fault_A12_what_decides_data_or_model_is_refused(data, saved, kind):
    options, named = REFUSED[kind]
    options = [data / option if option in ("first", "second") else option for option in options]
    paths = [] if "--data-path" in options else blend_of(data, 0.5, 0.5)
    with pytest.raises(OptionError) as error:
        resumed(saved, *paths, *options)
    message = str(error.value)
    assert message.startswith(f"--load {saved}/iter_0000002: it was saved with ")
    assert named.replace("PREFIX", str(data / "first")) in message and "\n" not in message
    assert "--override-checkpoint-args" in message


def test_fault_A12_another_corpus_under_the_same_name_is_refused(data, saved, tmp_path):
    for name in ("first", "second"):
        for suffix in (".bin", ".idx"):
            shutil.copy(data / f"{name}{suffix}", tmp_path / f"{name}{suffix}")
    write(tmp_path / "second", documents_of([*LENGTHS[::-1], 4]))
    with pytest.raises(
        OptionError, match=r"second \(12 documents, .idx \w+\), not \S+second \(13 documents, .idx \w+\)"
    ):
        resumed(saved, *blend_of(tmp_path, 0.5, 0.5))


@pytest.mark.parametrize(
    "changes, named",
    [({"vocab_size": 319}, "(size of its vocabulary) 480, not 319"), ({"eod": 1}, "--eod-token (its id) 0, not 1")],
)
def test_fault_A12_another_tokenizer_is_refused(data, saved, changes, named):
    other = type("OtherTokenizer", (SmallTokenizer,), changes)()
    with pytest.raises(OptionError) as error:
        resumed(saved, *blend_of(data, 0.5, 0.5), tokenizer=other)
    assert named in str(error.value)


def test_fault_A12_a_run_goes_on_with_other_data_where_that_is_said(data, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "saved")
    record = json.loads((folder / "iter_0000002" / "complete.json").read_text())["data"]
    counts = {str(data / "first"): 4, str(data / "second"): 4}
    assert record["consumed"] == counts
    other = ["--data-path", data / "second", "--seed", 99]
    status, output = resumed(folder, *other, "--override-checkpoint-args", "--save", folder)
    assert status == 0 and list(steps(output)) == [3, 4]
    assert "was saved with --seed 1234, not 99; --data-path of 2 datasets, not 1" in output
    said = ", ".join(f"{count} of {prefix}" for prefix, count in counts.items())
    assert f"samples consumed so far: {said}; the run goes on at sample 8 of the new order" in output
    # what it consumed since is added, and it goes on with its new data without being told again
    record = json.loads((folder / "iter_0000004" / "complete.json").read_text())["data"]
    assert record["consumed"] == counts | {str(data / "second"): 4 + 8}
    status, output = resumed(folder, *other, "--train-iters", 5)
    assert status == 0 and list(steps(output)) == [5] and "override" not in output


def test_fault_A12_an_order_that_changed_for_any_other_reason_is_refused(data, saved, tmp_path, monkeypatch):
    """As by another version of the package."""
    from megatron_bfp.sequence_index import split as packed_split

    before = packed_split.sequence_of_sample
    monkeypatch.setattr(packed_split, "sequence_of_sample", lambda i, n, *rest: n - 1 - before(i, n, *rest))
    with pytest.raises(OptionError, match="the order of samples is another one than that of its run; resume with"):
        resumed(saved, *blend_of(data, 0.5, 0.5))
    status, output = resumed(saved, *blend_of(data, 0.5, 0.5), "--override-checkpoint-args")
    assert status == 0 and "the order of samples is another one than before; samples consumed so far: 4 of" in output


def test_fault_A12_the_order_is_looked_at_in_all_parts_of_what_was_consumed(monkeypatch):
    blocks = {"--balance-batches": 1, "--global-batch-size": 1}
    run = DataHistory({"corpora": [{"prefix": "data"}], "blocks": blocks}, dataset=None)

    def digest(changed, num_samples=1000):
        def origin_of(_, sample):
            return Origin("data", -1 if sample in changed else sample, [sample])

        monkeypatch.setattr(history, "origin_of", origin_of)
        return run.order(num_samples)

    same = digest([])
    for changed in ([0], [999], range(450, 550), range(900, 1000)):
        assert digest(changed) != same
    assert digest([1000]) == same
    assert digest([0], num_samples=1) != digest([], num_samples=1) and run.order(0)


def test_fault_A12_with_concatenation_the_number_of_epochs_decides_the_order(data, tmp_path):
    options = ("--data-path", data / "first", "--data-impl", "mmap", "--save", tmp_path, "--load", tmp_path)
    run_trainer(None, *options, "--exit-interval", 1)
    with pytest.raises(OptionError, match="--train-iters may change it"):
        run_trainer(None, *options, "--train-iters", 40)
    assert list(steps(run_trainer(None, *options)[1])) == [2, 3, 4]


def test_fault_A12_checkpoints_of_older_versions_go_on_with_a_line(data, saved, tmp_path, whole):
    folder = shutil.copytree(saved, tmp_path / "saved")
    path = folder / "iter_0000002" / "complete.json"
    content = json.loads(path.read_text())
    del content["data"]
    path.write_text(json.dumps(content))
    status, output = resumed(folder, *blend_of(data, 0.5, 0.5))
    assert status == 0 and steps(output) == {step: whole[step] for step in (3, 4)}
    assert re.search(rf"^--load {path.parent}: saved by a version that did not record its data; ", output, re.MULTILINE)


def test_fault_C11_the_last_checkpoints_are_kept(data, tmp_path):
    options = ("--data-path", data / "first", "--save", tmp_path, "--save-interval", 1)
    run_trainer(None, *options, "--train-iters", 2)
    (tmp_path / "iter_0000002" / "complete.json").unlink()
    (tmp_path / "iter_0000009").mkdir()
    _, output = run_trainer(None, *options, "--load", tmp_path, "--train-iters", 6, "--keep-last", 2)
    kept = ["iter_0000005", "iter_0000006", "iter_0000009", "latest"]
    assert sorted(os.listdir(tmp_path)) == kept  # number 2 was not complete, and was saved again
    removed = re.findall(r"^removed \S+/iter_000000(\d) \(--keep-last 2\)$", output, re.MULTILINE)
    assert removed == ["1", "2", "3", "4"]


def test_fault_C11_a_checkpoint_that_another_process_reads_is_kept(data, tmp_path):
    options = ("--data-path", data / "first", "--save", tmp_path, "--save-interval", 1, "--keep-last", 1)
    run_trainer(None, *options, "--train-iters", 1)
    with reading(str(tmp_path / "iter_0000001")):
        _, output = run_trainer(None, *options, "--load", tmp_path, "--train-iters", 3)
    assert f"kept {tmp_path}/iter_0000001, which another process reads" in output
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", "iter_0000003", "latest"]
    run_trainer(None, *options, "--load", tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000004", "latest"]
