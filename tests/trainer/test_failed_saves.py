"""A checkpoint that cannot be written: the run goes on, the checkpoint before it stays, and the next one works."""

import errno
import os
import shutil
from collections import namedtuple

import pytest

pytest.importorskip("deepspeed")

from helpers.launching import launch as launch_ranks
from helpers.launching import make_corpus
from helpers.launching import steps as steps_of
from helpers.small_disks import small_disk
from helpers.trainer_in_process import alone, run_trainer
from helpers.trainer_parts import Trainer
from trainer.checkpoints import failed_writes, saving
from trainer.checkpoints.failed_writes import FailedWrites
from trainer.checkpoints.folder import open_checkpoint

from megatron_bfp.errors import InputError

EVERY_STEP = ("--save-interval", 1)


def checkpoints(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("iter_"))


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


def fill(disk, free):
    """Leave so many bytes of a disk."""
    (disk / "filling").write_bytes(bytes(shutil.disk_usage(disk).free - free))


@pytest.fixture
def failing(monkeypatch):
    """Lets something fail in one checkpoint, by its iteration."""

    def fail(owner, name, iteration):
        original = getattr(owner, name)

        def failed(path, *rest):
            if os.path.basename(path) == f"iter_{iteration:07d}":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(path, *rest)

        monkeypatch.setattr(owner, name, failed)

    return fail


@pytest.mark.parametrize("name", ["_sync", "_complete"])
def test_the_run_goes_on_and_the_checkpoint_before_stays(prefix, tmp_path, failing, name):
    failing(saving, name, 3)
    status, output = run_trainer(prefix, "--save", tmp_path, *EVERY_STEP, "--keep-last", 1)
    assert status == 0 and "iteration 4/4" in output
    assert f"{tmp_path}/iter_0000003 could not be saved: No space left on device (node " in output
    removals = [line for line in output.splitlines() if line.startswith("removed ")]
    assert [line.split()[1][-1] for line in removals] == ["1", "2"]  # the second when the fourth was there
    assert checkpoints(tmp_path) == ["iter_0000004"]


@pytest.mark.parametrize("exit_interval", [None, 4])
def test_a_run_does_not_end_without_its_last_checkpoint(prefix, tmp_path, failing, exit_interval):
    failing(saving, "_sync", 4)
    options = ("--exit-interval", exit_interval, "--train-iters", 6) if exit_interval else ()
    with pytest.raises(saving.NotSaved, match="the last iteration, 4, could not be saved: No space left on device"):
        run_trainer(prefix, "--save", tmp_path, *EVERY_STEP, *options)
    assert checkpoints(tmp_path) == ["iter_0000001", "iter_0000002", "iter_0000003"]


def test_nothing_is_written_where_the_last_checkpoint_would_not_fit(prefix, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total free")

    def disk_usage(folder):
        return usage(10**12, 0 if "iter_0000002" in checkpoints(folder) else 10**11)

    monkeypatch.setattr(failed_writes.shutil, "disk_usage", disk_usage)
    written = []
    original = saving._save
    monkeypatch.setattr(saving, "_save", lambda *arguments: written.append(arguments[-1]) or original(*arguments))
    with pytest.raises(saving.NotSaved, match="0.0 GB are free, a checkpoint takes 0.0 GB"):
        run_trainer(prefix, "--save", tmp_path, *EVERY_STEP)
    assert [path[-1] for path in written] == ["1", "2"]


@pytest.mark.parametrize("serialization", [True, False])
def test_the_errors_of_torch_s_writers_are_noted_and_others_are_not(prefix, disk, tmp_path, serialization):
    with alone():
        trainer = Trainer(prefix, "--save", tmp_path)
        trainer.engine.checkpoint_engine.zipfile_serialization = serialization
        fill(disk, 10_000)
        failed = FailedWrites()
        with failed.noted_in(trainer.engine):
            trainer.engine.checkpoint_engine.save({"weights": trainer.weights()}, str(disk / "file"))
        assert failed.of_any_rank()
        with pytest.raises(RuntimeError, match="an accident"), failed.noted():
            raise RuntimeError("an accident")
        with pytest.raises(RuntimeError):  # the control: without it the error is raised, as DeepSpeed raises it
            trainer.engine.checkpoint_engine.save({"weights": trainer.weights()}, str(disk / "file"))


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_disk_that_fills_while_two_ranks_write_ends_neither(tmp_path, disk, zero_stage):
    corpus = make_corpus(tmp_path)
    options = ("--zero-stage", zero_stage, "--save", disk, "--load", disk)
    status, output = launch_ranks(corpus, *options, train_iters=1)
    assert status == 0 and checkpoints(disk) == ["iter_0000001"], output[-3000:]
    size = sum(saving._sizes(str(disk / "iter_0000001")).values())
    shutil.rmtree(disk / "iter_0000001")
    fill(disk, size - 20_000)  # the start asks for less, as it cannot know all that DeepSpeed adds
    status, output = launch_ranks(corpus, *options, "--save-interval", 2, train_iters=3)
    assert status == 2 and "the last iteration, 3, could not be saved: " in output, output[-3000:]
    assert list(steps_of(output)) == [1, 2, 3] and "iter_0000002 could not be saved: " in output
    assert checkpoints(disk) == []
    (disk / "filling").unlink()
    status, output = launch_ranks(corpus, *options, train_iters=3)
    assert status == 0 and checkpoints(disk) == ["iter_0000003"], output[-3000:]


def test_a_disk_with_room_for_one_checkpoint_keeps_that_one_and_the_run(prefix, disk):
    """``--keep-last`` removes nothing in advance: the only whole checkpoint would be at risk."""
    fill(disk, 1_200_000)  # the start writes 1 MiB to try
    options = ("--save", disk, "--load", disk, *EVERY_STEP, "--keep-last", 1)
    with pytest.raises(saving.NotSaved, match="the last iteration, 4, could not be saved: 0.0 GB are free"):
        run_trainer(prefix, *options)
    assert checkpoints(disk) == ["iter_0000001"]
    (disk / "filling").unlink()
    status, output = run_trainer(prefix, *options)
    assert status == 0 and list(steps_of(output)) == [2, 3, 4] and checkpoints(disk) == ["iter_0000004"]


@pytest.mark.slow
def test_ten_saves_with_a_kill_leave_two_whole_checkpoints(tmp_path):
    corpus, folder = make_corpus(tmp_path), tmp_path / "saved"
    options = ("--zero-stage", 1, "--num-workers", 2, "--save", folder, "--load", folder, *EVERY_STEP, "--keep-last", 2)
    unfinished = "iter_0000005/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    status, output = launch_ranks(corpus, *options, train_iters=10, fault=f"1 SIGKILL {unfinished}", launcher="ranks")
    assert status and list(steps_of(output)) == [1, 2, 3, 4, 5], output[-3000:]
    assert checkpoints(folder) == ["iter_0000003", "iter_0000004", "iter_0000005"]
    with pytest.raises(InputError, match="complete.json"):
        open_checkpoint(str(folder / "iter_0000005"))
    shutil.copytree(folder / "iter_0000005", folder / "iter_0000002")  # as a kill leaves it in a removal
    status, output = launch_ranks(corpus, *options, train_iters=10, launcher="ranks")
    assert status == 0 and list(steps_of(output)) == [5, 6, 7, 8, 9, 10], output[-3000:]
    assert checkpoints(folder) == ["iter_0000009", "iter_0000010"]
    for name in checkpoints(folder):
        open_checkpoint(str(folder / name))
    (folder / "iter_0000010" / "complete.json").unlink()
    status, again = launch_ranks(corpus, *options, train_iters=10, launcher="ranks")
    assert status == 0 and steps_of(again) == {10: steps_of(output)[10]}, again[-3000:]
