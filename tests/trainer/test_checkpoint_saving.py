"""Saving checkpoints: the order in which files reach the disk, and a run without room for them stops at once."""

import dataclasses
import json
import os
import shutil
from collections import namedtuple

import pytest

pytest.importorskip("deepspeed")

from helpers.disk_order import watched_disk
from helpers.trainer_in_process import SmallTokenizer, alone, run_trainer
from helpers.trainer_parts import Trainer
from trainer import training
from trainer.checkpoints import failed_writes, save_folder, saving
from trainer.checkpoints.history import DataHistory, describe_run

from megatron_bfp import BFPError


@pytest.fixture
def saved(prefix, tmp_path):
    """A trainer after a step, and the folder for its checkpoints, where a run of more ranks has left files."""
    folder = tmp_path / "saved"
    with alone():
        trainer = Trainer(prefix, "--save", folder, "--zero-stage", 1)
        trainer.step(trainer.batches(), 0)
        yield trainer, folder


def save(trainer, iteration):
    history = DataHistory(describe_run(trainer.config, SmallTokenizer()), trainer.dataset)
    saving.save_checkpoint(trainer.engine, trainer.config, iteration, history)


def test_a_checkpoint_is_on_disk_before_it_is_complete_and_complete_before_it_is_the_latest(saved):
    trainer, folder = saved
    with watched_disk() as disk:
        save(trainer, 1)
    path = folder / "iter_0000001"
    assert disk.unforced == [] and disk.names_not_forced() == []
    complete, latest = disk.index("name", "complete.json"), disk.index("name", "latest")
    content = json.loads((path / "complete.json").read_text())
    assert len(content["files"]) == 2
    for name in [*content["files"], ""]:
        assert ("force", str(path / name).rstrip("/")) in disk.events[:complete], name
    assert ("force", str(folder)) in disk.events[:complete]  # the name of the checkpoint's folder
    assert ("force", str(path)) in disk.events[complete:latest]  # the name complete.json
    assert ("force", str(folder)) in disk.events[latest:]
    assert (folder / "latest").read_text() == path.name


def test_a_checkpoint_s_files_are_forced_as_they_are_listed(saved, monkeypatch):
    """What another rank still writes when files are forced would be listed and not be on disk."""
    trainer, _ = saved
    with watched_disk() as disk:
        complete = saving._complete
        lists = []

        def watched(path, saved_run):
            lists.extend(os.path.join(path, name) for name in saving._sizes(path))
            assert all(disk.is_forced(name) for name in [*lists, path])
            complete(path, saved_run)

        monkeypatch.setattr(saving, "_complete", watched)
        save(trainer, 1)
    assert lists


def test_older_checkpoints_go_after_the_new_one_is_there_and_their_mark_goes_first(saved):
    trainer, folder = saved
    trainer.config = dataclasses.replace(trainer.config, keep_last=1)
    save(trainer, 1)
    with watched_disk() as disk:
        save(trainer, 2)
    removed = [event for event in disk.events if event[0] == "remove"]
    assert removed[0] == ("remove", str(folder / "iter_0000001" / "complete.json"))
    assert disk.events.index(("force", str(folder)), disk.index("name", "latest")) < disk.events.index(removed[0])
    assert [name for name in os.listdir(folder) if name.startswith("iter_")] == ["iter_0000002"]


@pytest.mark.parametrize(
    "keep_last, retained, expected",
    [(None, None, "123456"), (2, None, "56"), (None, 2, "246"), (2, 2, "2456"), (2, 3, "356"), (1, 4, "46")],
)
def test_checkpoints_of_the_interval_stay_beside_the_last(saved, keep_last, retained, expected):
    trainer, folder = saved
    trainer.config = dataclasses.replace(trainer.config, keep_last=keep_last, save_retain_interval=retained)
    for iteration in range(1, 7):
        save(trainer, iteration)
    assert "".join(sorted(name[-1] for name in os.listdir(folder) if name.startswith("iter_"))) == expected


def test_what_a_killed_run_has_left_goes_too_and_what_is_not_ours_stays(saved):
    trainer, folder = saved
    save(trainer, 1)
    shutil.copytree(folder / "iter_0000001", folder / "iter_0000002")
    (folder / "iter_0000002" / "complete.json").rename(folder / "iter_0000002" / "complete.json.0f.part")
    (folder / "iter_0000003").mkdir()  # its removal was cut off
    (folder / "iter_0000004" / "mp_rank_00").mkdir(parents=True)  # Megatron-LM's
    (folder / "iter_0000009").mkdir()  # of a run that was further
    save(trainer, 5)
    assert "".join(sorted(name[-1] for name in os.listdir(folder) if name.startswith("iter_"))) == "123459"
    trainer.config = dataclasses.replace(trainer.config, keep_last=2)
    save(trainer, 6)
    assert "".join(sorted(name[-1] for name in os.listdir(folder) if name.startswith("iter_"))) == "4569"


def test_the_first_checkpoint_is_not_begun_without_room_for_the_parameters(saved, monkeypatch):
    trainer, folder = saved
    folder.mkdir()
    usage = namedtuple("usage", "total free")(10**12, 100_000)
    monkeypatch.setattr(failed_writes.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(saving, "_save", lambda *_: pytest.fail("too late"))
    history = DataHistory(describe_run(trainer.config, SmallTokenizer()), trainer.dataset)
    reason = saving.save_checkpoint(trainer.engine, trainer.config, 1, history)
    assert reason.startswith("0.0 GB are free, a checkpoint takes ")


def test_what_another_number_of_ranks_has_left_is_gone_when_a_checkpoint_is_saved_again(saved):
    trainer, folder = saved
    path = folder / "iter_0000001"
    path.mkdir(parents=True)
    strange = "zero_pp_rank_7_mp_rank_00_optim_states.pt"
    (path / strange).write_bytes(b"x")
    (path / "complete.json").write_text("{}")
    save(trainer, 1)
    assert strange not in os.listdir(path) and strange not in json.loads((path / "complete.json").read_text())["files"]


def test_fault_C03_the_run_stops_before_anything_is_built(prefix, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(training, "build_train_dataset", lambda *_: pytest.fail("too late"))
    for options, named in (
        (["--save", tmp_path / "file"], "--save .*file: not a folder"),
        (["--json-log", tmp_path / "file" / "log"], "--json-log .*log: Not a directory"),
        (["--tensorboard-dir", tmp_path / "file"], "--tensorboard-dir .*file: "),
    ):
        with pytest.raises(BFPError, match=named):
            run_trainer(prefix, *options)


def test_fault_C03_the_room_of_a_checkpoint_is_known_before_it_is_made(saved):
    trainer, folder = saved
    save(trainer, 1)
    least = saving.smallest_of(trainer.config, SmallTokenizer.vocab_size)
    written = sum(os.path.getsize(folder / "iter_0000001" / name) for name in os.listdir(folder / "iter_0000001"))
    assert 0.7 * written < least < written


def test_fault_C03_a_folder_without_room_stops_the_run_before_anything_is_built(prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "build_train_dataset", lambda *_: pytest.fail("too late"))
    usage = namedtuple("usage", "total free")(10**12, 100_000)
    monkeypatch.setattr(save_folder.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(BFPError, match="has 0.0 GB free, a checkpoint takes at least"):
        run_trainer(prefix, "--save", tmp_path / "saved")


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"checkpoint": {"writer": {"type": "python", "decoupled": True}}}, "checkpoint.writer"),
        ({"datastates_ckpt": {"host_cache_size": 16}}, "datastates_ckpt"),
    ],
)
def test_writers_that_hide_failed_writes_are_refused(prefix, tmp_path, settings, named):
    (tmp_path / "deepspeed.json").write_text(json.dumps(settings))
    with pytest.raises(BFPError, match=f"--deepspeed_config .*: {named} writes checkpoints in ways"):
        run_trainer(prefix, "--save", tmp_path / "saved", "--deepspeed_config", tmp_path / "deepspeed.json")


def test_inner_folders_of_a_checkpoint_are_forced_too(tmp_path):
    inner = tmp_path / "inner" / "most"
    inner.mkdir(parents=True)
    (inner / "file").write_bytes(b"x")
    with watched_disk() as disk:
        saving._sync(str(tmp_path))
    order = [path for _, path in disk.events]
    assert order == [str(inner / "file"), str(inner), str(inner.parent), str(tmp_path)]
