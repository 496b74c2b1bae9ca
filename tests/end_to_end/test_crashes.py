"""A crash ends: no process of a run is left ten seconds after an accident, and its launcher says so.

Each accident has one launch under each launcher. Seconds are counted from the accident, which the trainer notes.
"""

import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

from helpers.launching import ENVIRONMENT, FAULTY_TRAINER, BackgroundRun, free_port, make_corpus, trainer

SECONDS = 10
AT_ONCE = 4
"""Launches. They import for longer than they train."""
LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", "A_PORT"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", "A_PORT"],
}
BY_HAND = {
    "no launcher": [
        "bash",
        "-c",
        """
    for rank in 0 1; do
        RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=A_PORT python "$@" &
        ranks+=($!)
    done
    for rank in "${ranks[@]}"; do wait "$rank" || status=1; done
    exit "${status:-0}"
""",
        "bash",
    ]
}
HALF_WRITTEN = "iter_0000002/zero_pp_rank_1_mp_rank_00_optim_states.pt"
ACCIDENTS = {
    "exception in a step": "1 RAISE 3",
    "exception in a worker": "1 RAISE worker",
    "exception in a save": f"1 RAISE {HALF_WRITTEN}",
    "worker killed": "0 SIGKILL worker",
    "rank killed": "1 SIGKILL 3",
}
QUICK = [(launcher, accident) for launcher in ("deepspeed", "torchrun") for accident in ACCIDENTS]
RARER = {
    "exception of rank 0 in a step": "0 RAISE 3",
    "rank 0 killed": "0 SIGKILL 3",
    "worker of rank 1 killed": "1 SIGKILL worker",
    "exception in an evaluation": "1 RAISE evaluation",
    "exception while rank 0 looks at the data": "0 RAISE dataset",
    "exception on loading": "1 RAISE load",
    "rank killed while it saves": f"1 SIGKILL {HALF_WRITTEN}",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


class Crash:
    """A run with an accident: the launcher's exit status, seconds from the accident to the end of the last process."""

    def __init__(self, corpus, folder, launcher, fault):
        folder.mkdir()
        name, moment = uuid.uuid4().hex, folder / "moment"
        environment = ENVIRONMENT | {"FAULT": fault, "FAULT_TIME": str(moment), "NAME_OF_RUN": name}
        command = [part.replace("A_PORT", str(free_port())) for part in (LAUNCHERS | BY_HAND)[launcher]]
        options = ("--num-workers", 2, "--zero-stage", 1, "--save", folder / "saved", "--save-interval", 2)
        options += ("--eval-interval", 3, "--load", folder / "saved")
        command += trainer(corpus, *options, train_iters=1000, script=FAULTY_TRAINER)
        run = BackgroundRun(command, folder / "log", corpus, environment)
        try:
            wait_until(lambda: moment.exists() and moment.read_text() or run.process.poll() is not None, 240)
            wait_until(lambda: not processes_of(name), 60)
            self.seconds = time.time() - float(moment.read_text())
            self.status = run.process.wait(1)
        finally:
            self.output = run.output()
            for process in processes_of(name):
                process.kill()


def wait_until(is_true, seconds):
    end = time.monotonic() + seconds
    while not is_true() and time.monotonic() < end:
        time.sleep(0.1)


def processes_of(name):
    """All processes that were started with a NAME_OF_RUN, whoever started them."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("NAME_OF_RUN") == name:
                processes.append(process)
        except psutil.Error:
            pass
    return processes


def crash_all(corpus, folder, kinds):
    """(launcher, accident) -> Crash, for some of them."""

    def crash(number, launcher, accident):
        run = Crash(corpus, folder / str(number), launcher, (ACCIDENTS | RARER)[accident])
        if launcher == "deepspeed" and run.status == 256 - signal.SIGKILL:
            # its launcher looked at the killed rank in the very moment, before a rank that is left had told it to end
            run = Crash(corpus, folder / f"{number} again", launcher, (ACCIDENTS | RARER)[accident])
        return run

    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = [pool.submit(crash, number, *kind) for number, kind in enumerate(kinds)]
    return {kind: run.result() for kind, run in zip(kinds, runs, strict=True)}


@pytest.fixture(scope="module")
def crashes(corpus, tmp_path_factory):
    return crash_all(corpus, tmp_path_factory.mktemp("crashes"), QUICK)


def check(crash, launcher, accident):
    print(f"{accident}, {launcher}: exit status {crash.status} after {crash.seconds:.1f} s")
    assert crash.seconds < SECONDS, crash.output[-5000:]
    assert crash.status == 1, crash.output[-5000:]


@pytest.mark.parametrize("launcher, accident", QUICK)
def test_fault_C02_an_accident_ends_all_processes(crashes, launcher, accident):
    check(crashes[launcher, accident], launcher, accident)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS | BY_HAND)
def test_fault_C02_all_accidents_end_all_processes(corpus, tmp_path, launcher):
    kinds = [(launcher, accident) for accident in ACCIDENTS | RARER if (launcher, accident) not in QUICK]
    assert set(RARER) <= {accident for _, accident in kinds}
    for (_, accident), crash in crash_all(corpus, tmp_path, kinds).items():
        check(crash, launcher, accident)
