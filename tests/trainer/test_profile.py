"""``--profile-steps``: a trace of the steps that were asked for, in whatever way the run ends."""

import json
import os

import pytest

pytest.importorskip("deepspeed")

from helpers.trainer_in_process import run_trainer
from trainer.arguments import parse_arguments

from megatron_bfp import OptionError


def steps_in(path):
    """The steps that a trace names, and the operations in it."""
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    return sorted({name for name in names if name.startswith("step ")}), set(names)


@pytest.mark.parametrize(
    "options, name, steps",
    [
        (["--profile-steps", "2:3"], "steps_2_to_3.json", ["step 2", "step 3"]),
        (["--profile-steps", "4:9", "--exit-interval", 2, "--train-iters", 6], None, []),
        (["--profile-steps", "3:9"], "steps_3_to_4.json", ["step 3", "step 4"]),
    ],
)
def test_the_trace_holds_the_steps(prefix, tmp_path, options, name, steps):
    folder = tmp_path / "profile"
    saved = ["--save", tmp_path / "saved"] if "--exit-interval" in options else []
    status, output = run_trainer(prefix, *options, *saved, "--profile-dir", folder)
    assert status == 0
    written = os.listdir(folder) if folder.exists() else []
    assert written == [name] * bool(name)
    if name:
        seen, operations = steps_in(folder / name)
        assert seen == steps and any("aten::mm" in operation for operation in operations)
        assert f"wrote {folder / name}: " in output


def test_a_trace_that_cannot_be_written_does_not_end_the_run(prefix, tmp_path):
    (tmp_path / "file").write_text("")
    status, output = run_trainer(prefix, "--profile-steps", "1:1", "--profile-dir", tmp_path / "file")
    assert status == 0 and "iteration 4/4" in output
    assert f"--profile-dir {tmp_path}/file: the trace could not be written: File exists" in output


@pytest.mark.parametrize("text", ["3", "3:2", "0:1", "a:b", "1:2:3", "-1:2", ":"])
def test_steps_that_are_none_are_refused(text):
    needed = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --train-iters 100"
    needed += f" --data-path data --seq-length 64 --tokenizer-model none --profile-steps={text}"
    with pytest.raises(OptionError, match=f"^--profile-steps {text}: give the first and the last step as A:B"):
        parse_arguments(needed.split())
