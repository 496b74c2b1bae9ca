"""SLURM's warning before the time limit: the run saves and stops, the job is requeued, and the next start resumes."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers.cluster_stand_ins import environment, install, slurm_job, tiny_run
from helpers.datasets import ROOT
from helpers.launching import steps
from helpers.recipes import LAUNCH, RECIPES

REQUEUED = "requeue 4711"
PROGRAM = """#!{python}
# A node's torchrun, or its preflight: it ends at the warning with a status, or by itself with another one.
import os, pathlib, signal, sys, time
folder = pathlib.Path(__file__).parent
if "plan_run.py" in " ".join(sys.argv):
    sys.exit()
stage = "preflight" if "preflight.py" in " ".join(sys.argv) else "training"
def stop(number, frame):
    (folder / f"got_{{signal.Signals(number).name}}").touch()
    sys.exit(int(os.environ["AT_WARNING"]))
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, stop)
if os.environ["STAGE"] == stage:
    (folder / f"ready_{{os.environ['SLURM_NODEID']}}").touch()
    time.sleep(float(os.environ.get("SECONDS_TO_END", 60)))
    sys.exit(int(os.environ.get("AT_END", 0)))
"""


class Job:
    """A job's script, running in the background."""

    def __init__(self, folder, recipe, *words, **variables):
        self.folder, self.log = folder, folder / "slurm.log"
        command = ["bash", str(LAUNCH / "slurm.sh"), str(recipe), *words]
        settings = {"stdout": open(self.log, "a"), "stderr": subprocess.STDOUT, "cwd": folder}
        self.process = subprocess.Popen(command, env=environment(variables), start_new_session=True, **settings)

    def warn(self):
        """SIGUSR1 to the script alone, as with ``--signal=B:USR1@600``."""
        os.kill(self.process.pid, signal.SIGUSR1)

    def wait_for(self, is_there, seconds=60):
        end = time.monotonic() + seconds
        while not is_there():
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()[-5000:]
            time.sleep(0.02)

    def end(self, seconds=60):
        """Exit status, and what scontrol was asked for."""
        status = self.process.wait(seconds)
        asked = (self.folder / "scontrol.log").read_text().splitlines()
        return status, [line for line in asked if not line.startswith("show hostnames")]


def job(folder, stage="training", recipe=RECIPES / "llama_7b_code_2k.sh", **variables):
    """A job whose programs are stand-ins, and are at a stage on both nodes."""
    job_variables = slurm_job(folder)
    install(folder, dict.fromkeys(("python", "torchrun"), PROGRAM.format(python=sys.executable)))
    settings = {"DATA_PATH": "data", "TOKENIZER_MODEL": "t.model", "STAGE": stage, "AT_WARNING": 1}
    started = Job(folder, recipe, **job_variables | settings | variables)
    started.wait_for(lambda: len(list(folder.glob("ready_*"))) == 2)
    return started


@pytest.mark.parametrize("stage", ["preflight", "training"])
def test_a_warned_job_stops_and_is_requeued_once(tmp_path, stage):
    running = job(tmp_path, stage)
    running.warn()
    assert running.end() == (0, [REQUEUED])
    assert running.log.read_text().count("the time limit is near") == 1
    assert [path.name for path in tmp_path.glob("got_*")] == ["got_SIGUSR1"]


def test_a_job_that_is_not_warned_is_not_requeued(tmp_path):
    """Neither when it ends nor when it fails, whose status is kept."""
    for status in (0, 3):
        assert job(tmp_path, SECONDS_TO_END=0.1, AT_END=status).end() == (status, [])
        for path in tmp_path.glob("ready_*"):
            path.unlink()


def test_a_run_that_finishes_after_the_warning_is_not_requeued(tmp_path):
    running = job(tmp_path, AT_WARNING=0)
    running.warn()
    assert running.end() == (0, [])


def test_megatron_lm_saves_and_ends_with_zero_and_is_requeued(tmp_path):
    running = job(tmp_path, AT_WARNING=0, TRAINER="megatron_lm", MEGATRON_PATH="m")
    running.warn()
    assert running.end() == (0, [REQUEUED])


def test_megatron_deepspeed_is_stopped_by_the_signal_that_it_knows(tmp_path):
    running = job(tmp_path, TRAINER="megatron_deepspeed", MEGATRON_PATH="m")
    running.warn()
    assert running.end() == (0, [REQUEUED])
    assert [path.name for path in tmp_path.glob("got_*")] == ["got_SIGTERM"]


def test_a_warning_before_training_starts_requeues_the_job(tmp_path):
    """With preflight done, too: a trainer that starts now would not be warned."""
    running = job(tmp_path, "preflight", AT_WARNING=0)
    running.warn()
    assert running.end() == (0, [REQUEUED])
    assert "torchrun_node.sh" not in running.log.read_text()


def test_slurm_is_asked_to_warn_the_script_alone():
    lines = (LAUNCH / "slurm.sh").read_text().splitlines()
    assert {"#SBATCH --signal=B:USR1@600", "#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(lines)


@pytest.mark.slow
def test_a_requeued_job_has_the_losses_of_one_that_was_never_stopped(tmp_path):
    """Real training: warned after its second step, requeued, started again by SLURM with the same script."""
    pytest.importorskip("deepspeed")
    folders = [tmp_path / name for name in ("whole", "warned")]
    logs = []
    for folder in folders:
        folder.mkdir()
    for folder in folders:
        recipe, variables = tiny_run(folder, train_iters=30)
        variables |= slurm_job(folder) | {"SLURM_SUBMIT_DIR": ROOT}
        running = Job(folder, recipe, **variables)
        if folder.name == "warned":
            running.wait_for(lambda: len(steps(running.log.read_text())) >= 2, 150)
            running.warn()
            assert running.end(120) == (0, [REQUEUED]), running.log.read_text()[-5000:]
            stopped = len(steps(running.log.read_text()))
            assert 2 <= stopped < 30 and (folder / f"run/checkpoints/iter_{stopped:07d}/complete.json").exists()
            running = Job(folder, recipe, **variables, SLURM_RESTART_COUNT=1)
        status, asked = running.end(200)
        assert status == 0 and len(asked) == (folder.name == "warned"), running.log.read_text()[-5000:]
        logs.append(running.log.read_text())
    whole, warned = map(steps, logs)
    assert len(whole) == 30 and whole == warned
    numbers = [int(number) for number in re.findall(r"iteration (\d+)/30 \| loss", logs[1])]
    assert numbers == list(range(1, 31))  # none was trained twice
