"""Runs that are stopped, killed and started again, also on other numbers of ranks: losses go on as without that."""

import os
import random
import re
import shutil
import signal
import time
from functools import partial

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

from helpers.launching import (
    BackgroundRun,
    as_numbers,
    free_port,
    in_folder,
    launch,
    make_corpus,
    steps,
    together,
    train,
    trainer,
)

STEPS = 8
ZERO = ("--zero-stage", 1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    whole = partial(train, corpus, *ZERO, train_iters=STEPS, launcher="ranks")
    return together(whole, lambda: stop_and_kill(corpus, folder))


@pytest.fixture(scope="module")
def reference(runs):
    return runs[0]


@pytest.fixture(scope="module")
def stopped_and_killed(runs):
    return runs[1]


def stop_and_kill(corpus, folder):
    """SIGTERM during a step, then SIGKILL during a write: the folder, both outputs and exit statuses."""
    options = (*ZERO, *in_folder(folder))
    micro_batch = 5  # two in each step: it is in the third
    stopped = launch(corpus, *options, "--num-workers", 1, train_iters=STEPS, fault=f"1 SIGTERM {micro_batch}")
    half_written = "iter_0000005/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    killed = launch(corpus, *options, "--save-interval", 1, train_iters=STEPS, fault=f"1 SIGKILL {half_written}")
    return folder, stopped, killed


def test_a_signal_lets_the_step_end_and_saves_it(stopped_and_killed, reference):
    _, (status, output), _ = stopped_and_killed
    assert status == 128 + signal.SIGTERM, output[-3000:]
    assert "stopped by SIGTERM after iteration 3, which is saved" in output
    assert steps(output) == {step: reference[step] for step in (1, 2, 3)}


def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    corpus, stopped_and_killed, reference, tmp_path
):
    folder, (_, first), (status, second) = stopped_and_killed
    assert status not in (0, 2, 143) and list(steps(second)) == [4, 5], second[-3000:]
    assert sorted(os.listdir(folder))[:4] == ["iter_0000003", "iter_0000004", "iter_0000005", "latest"]
    shutil.copytree(folder, tmp_path / "checkpoints")
    folder = in_folder(tmp_path / "checkpoints")
    status, third = launch(corpus, *ZERO, *folder, train_iters=STEPS, launcher="ranks")
    assert status == 0, third[-3000:]
    assert re.search(r"skipped \S+iter_0000005: it has no complete.json", third)
    assert steps(first) | steps(second) | steps(third) == reference
    assert steps(second)[5] == steps(third)[5]


@pytest.mark.slow
def test_other_numbers_of_ranks_go_on_with_the_same_samples(corpus, stopped_and_killed, reference, tmp_path):
    shutil.copytree(stopped_and_killed[0], tmp_path / "checkpoints")
    options = (*ZERO, *in_folder(tmp_path / "checkpoints"))
    resumed = train(corpus, *options, "--exit-interval", 6, ranks=1, train_iters=STEPS)
    resumed |= train(corpus, *options, ranks=2, train_iters=STEPS)
    assert_close(resumed, {step: reference[step] for step in (5, 6, 7, 8)})
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if "universal" in name]


def samples_of(printed):
    """Iteration -> consumed samples."""
    return {step: consumed for step, (_, _, consumed) in printed.items()}


def assert_close(printed, expected):
    """Same iterations and samples; losses and gradient norms up to the order of sums."""
    assert samples_of(printed) == samples_of(expected)
    for (loss, norm), (expected_loss, expected_norm) in zip(as_numbers(printed), as_numbers(expected), strict=True):
        assert loss == pytest.approx(expected_loss, abs=2e-5) and norm == pytest.approx(expected_norm, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, tensor_parallel, precision",
    [
        (0, 1, []),
        (0, 1, ["--bf16"]),
        (1, 1, ["--bf16"]),
        (2, 1, []),
        (3, 1, []),
        (3, 1, ["--bf16"]),
        (1, 2, []),
        (2, 2, []),
    ],
)
def test_every_kind_of_run_goes_on_with_other_numbers_of_ranks(corpus, tmp_path, stage, tensor_parallel, precision):
    kind = ("--zero-stage", stage, "--tensor-model-parallel-size", tensor_parallel, *precision)
    options = (*kind, *in_folder(tmp_path / "checkpoints"))
    whole = train(corpus, *kind, ranks=2 * tensor_parallel)
    parts = train(corpus, *options, "--exit-interval", 2, ranks=2 * tensor_parallel)
    parts |= train(corpus, *options, "--exit-interval", 4, ranks=tensor_parallel)
    parts |= train(corpus, *options, ranks=2 * tensor_parallel)
    if precision:
        assert list(samples_of(parts).values()) == list(samples_of(whole).values())
        losses, expected = ([loss for loss, _ in as_numbers(printed)] for printed in (parts, whole))
        assert losses == pytest.approx(expected, abs=0.01)
    else:
        assert_close(parts, whole)


@pytest.mark.slow
def test_zero_3_with_tensor_parallelism_is_refused_on_other_numbers_of_ranks(corpus, tmp_path):
    options = ("--zero-stage", 3, "--tensor-model-parallel-size", 2, *in_folder(tmp_path / "checkpoints"))
    train(corpus, *options, "--exit-interval", 2, ranks=4)
    status, output = launch(corpus, *options, ranks=2)
    assert status == 2 and "resume with the 2 data-parallel ranks that saved it" in output, output[-3000:]


LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", "PORT"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", "PORT"],
}
LAUNCHERS["torchrun for SLURM"] = [*LAUNCHERS["torchrun"], "--signals-to-handle", "SIGTERM,SIGUSR1"]
LAUNCHERS["torchrun for SLURM"] += ["--shutdown-timeout", "600"]
SCHEDULE = (*ZERO, "--lr-decay-iters", 1000)
"""For runs whose end is not known when they begin."""


@pytest.fixture
def start(corpus, tmp_path):
    """Starts a run without end under a launcher, and waits for two steps of it."""
    started = []

    def start(launcher, *options):
        command = [part.replace("PORT", str(free_port())) for part in LAUNCHERS[launcher]]
        command += trainer(corpus, *SCHEDULE, *in_folder(tmp_path / "checkpoints"), *options, train_iters=100_000)
        run = BackgroundRun(command, tmp_path / f"{len(started)}.log", cwd=corpus)
        started.append(run)
        run.wait_for_steps(2)
        return run

    yield start
    for run in started:
        run.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, number, to",
    [
        ("deepspeed", signal.SIGTERM, "launcher"),
        ("deepspeed", signal.SIGTERM, "all"),
        ("deepspeed", signal.SIGUSR1, "rank"),
        ("torchrun", signal.SIGTERM, "launcher"),
        ("torchrun", signal.SIGTERM, "all"),
        ("torchrun", signal.SIGUSR1, "rank"),
        ("torchrun for SLURM", signal.SIGUSR1, "launcher"),
    ],
)
def test_launchers_and_signals(corpus, start, tmp_path, launcher, number, to):
    """Whoever gets the signal, the run is saved and goes on exactly."""
    run = start(launcher, "--num-workers", 1)
    ranks = run.ranks()
    receivers = {"launcher": [ranks[0].parent()], "rank": [ranks[1]], "all": run.processes()}[to]
    for process in receivers:
        process.send_signal(number)
    status = run.end()
    output = run.output()
    print(f"{launcher}, {number.name} to {to}: exit status {status}")
    assert status == (128 + number if (launcher, to) == ("deepspeed", "rank") else 1) or to == "all"
    stopped = re.search(rf"stopped by {number.name} after iteration (\d+), which is saved", output)
    assert stopped, output[-3000:]
    last = int(stopped[1])
    resumed = train(corpus, *SCHEDULE, *in_folder(tmp_path / "checkpoints"), train_iters=last + 2)
    assert list(resumed) == [last + 1, last + 2]
    assert steps(output) | resumed == train(corpus, *SCHEDULE, train_iters=last + 2)


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(corpus, start, tmp_path):
    rng = random.Random(7)
    outputs = []
    for _ in range(6):
        run = start("deepspeed", "--save-interval", 1)
        time.sleep(rng.random())
        run.kill()
        outputs.append(run.output())
    last = max(max(steps(output)) for output in outputs)
    whole = train(corpus, *SCHEDULE, train_iters=last + 2)
    resumed = train(corpus, *SCHEDULE, *in_folder(tmp_path / "checkpoints"), train_iters=last + 2)
    for printed in [*map(steps, outputs), resumed]:
        assert printed == {step: whole[step] for step in printed}
    print(f"{sum('skipped' in output for output in outputs)} of {len(outputs)} kills left a half-written checkpoint")
