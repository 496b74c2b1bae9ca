"""The trainer with context parallelism: losses are those of one rank, whatever else is parallel, and runs go on.

The quick tests of context parallelism are those of attention.
"""

import hashlib
import json
import shutil

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

from helpers.launching import in_folder, launch, make_corpus, steps, train

pytestmark = pytest.mark.slow

STEPS, TOKENS_PER_STEP = 10, 8 * 128
SPLIT_IN_TWO = ("--context-parallel-size", 2)
TENSORS_TOO = (*SPLIT_IN_TWO, "--tensor-model-parallel-size", 2)
RECOMPUTED = ("--recompute-granularity", "full")
ONE_HEAD = ("--num-attention-heads", 1, "--num-query-groups", 1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def index(corpus):
    """What is in the folder of the sequence index, before anything is trained."""
    return files_of(corpus / "data_text_document.bfp")


def files_of(folder):
    """Of each file its time of change and its digest."""
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


def trained(log):
    """The loss and the gradient norm of each step, from the JSON log of one run or of several, one after another."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return {event["iteration"]: (event["loss"], event["grad_norm"]) for event in events if event["event"] == "train"}


@pytest.fixture(scope="module")
def of_one_rank(corpus, tmp_path_factory):
    """The steps of one rank, by the options of its model."""
    runs = {}

    def run(*options):
        if options not in runs:
            log = tmp_path_factory.mktemp("one rank") / "log.jsonl"
            train(corpus, "--zero-stage", 1, "--json-log", log, *options, ranks=1, train_iters=STEPS)
            runs[options] = trained(log)
        return runs[options]

    return run


def largest_differences(one, other):
    """Of losses, and of gradient norms relative to them."""
    assert list(range(1, STEPS + 1)) == sorted(one) == sorted(other)
    losses = max(abs(one[step][0] - other[step][0]) for step in one)
    return losses, max(abs(one[step][1] / other[step][1] - 1) for step in one)


def assert_alike(what, one, other):
    loss, norm = largest_differences(one, other)
    print(f"{what}: losses differ by {loss:.1e}, gradient norms by {norm:.1e}")
    assert loss <= 1e-5 and norm <= 1e-4


def test_the_number_of_ranks_must_be_a_multiple(corpus):
    status, output = launch(corpus, "--context-parallel-size", 4, ranks=2, launcher="ranks")
    assert status == 2
    assert "--tensor-model-parallel-size 1 times --context-parallel-size 4 does not divide 2 ranks" in output


LAYOUTS = {
    "cp 2, dp 2": (4, SPLIT_IN_TWO, ()),
    "cp 2, tp 2": (4, TENSORS_TOO, ()),
    "cp 4": (4, ("--context-parallel-size", 4), ()),
    "cp 2, recomputed, keys gathered": (2, (*SPLIT_IN_TWO, *RECOMPUTED, "--cp-comm-type", "all_gather"), ()),
    "cp 2, one head, keys gathered": (2, SPLIT_IN_TWO, ONE_HEAD),
}
CASES = [(layout, zero_stage) for layout in LAYOUTS for zero_stage in (1, 3)]
CASES += [("cp 2, dp 2", 0), ("cp 2, dp 2", 2)]


@pytest.mark.parametrize("layout, zero_stage", CASES)
def test_every_layout_trains_as_one_rank(corpus, index, of_one_rank, tmp_path, layout, zero_stage):
    ranks, options, model = LAYOUTS[layout]
    log = tmp_path / "log.jsonl"
    options = (*options, *model, "--zero-stage", zero_stage, "--json-log", log)
    status, output = launch(corpus, *options, ranks=ranks, train_iters=STEPS)
    assert status == 0, output[-3000:]
    assert_alike(f"{layout}, ZeRO {zero_stage}", trained(log), of_one_rank(*model))
    seen = "as the first step showed: 2 x DocumentAttention by sdpa; rotary positions run on through the sequence\n"
    assert seen in output
    way = "keys and values are gathered" if "gathered" in layout else "attention heads are exchanged"
    assert f"{options[1]} context-parallel ranks share each sequence: {way}\n" in output
    for line in log.read_text().splitlines():  # a token counts once, however many ranks share its sequence
        speed = json.loads(line)
        tokens = speed["tokens_per_second_per_device"] * speed["seconds_per_step"] * ranks
        assert tokens == pytest.approx(TOKENS_PER_STEP)
    assert files_of(corpus / "data_text_document.bfp") == index  # one index serves every layout


def test_control_another_seed_has_other_losses(corpus, of_one_rank, tmp_path):
    log = tmp_path / "log.jsonl"
    options = ("--seed", 5, "--json-log", log, *SPLIT_IN_TWO)
    train(corpus, *options, ranks=2, train_iters=STEPS, launcher="ranks")
    assert largest_differences(trained(log), of_one_rank())[0] > 1e-2


FIM = ("--fim-rate", 0.5, "--fim-prefix-token", "!", "--fim-middle-token", "#", "--fim-suffix-token", "$")


def test_all_that_changes_samples_goes_together(corpus, of_one_rank, tmp_path):
    """Fill-in-the-middle, targets only, even sequences and balanced batches."""
    copied = shutil.copytree(corpus, tmp_path / "corpus")  # it gets another index
    steps_of = {}
    for ranks, options in ((1, ()), (4, SPLIT_IN_TWO)):
        log = tmp_path / f"{ranks}.jsonl"
        together = (*FIM, "--targets-only", "--even-sequences", "--balance-batches", 1)
        options = (*options, *together, "--zero-stage", 1, "--json-log", log)
        train(copied, *options, ranks=ranks, train_iters=STEPS, launcher="ranks")
        steps_of[ranks] = trained(log)
    assert_alike("together", steps_of[4], steps_of[1])
    assert largest_differences(steps_of[4], of_one_rank())[0] > 1e-2  # the control
    names = [path.name for path in (copied / "data_text_document.bfp").iterdir()]
    assert any(name.endswith("-e-t-fim0.5-1234") for name in names)


def test_evaluations_are_those_of_one_rank(corpus):
    def validations(*options, ranks):
        status, output = launch(corpus, "--eval-interval", 6, *options, ranks=ranks, launcher="ranks")
        assert status == 0, output[-2000:]
        return [line.split(" | ")[:4] for line in output.splitlines() if line.startswith("validation")]

    alone, shared = validations(ranks=1), validations(*SPLIT_IN_TWO, ranks=2)
    assert len(alone) == 1 and alone[0][0] == shared[0][0] and alone[0][3] == shared[0][3]  # iteration, targets
    assert float(alone[0][1].split()[1]) == pytest.approx(float(shared[0][1].split()[1]), abs=1e-5)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_run_goes_on_with_another_context_parallel_size(corpus, of_one_rank, tmp_path, zero_stage):
    """CP 2, the same again, one rank, two data-parallel ranks, CP 2."""
    log = tmp_path / "log.jsonl"
    run = ("--zero-stage", zero_stage, "--json-log", log, *in_folder(tmp_path / "checkpoints"))
    parts, converted = [], []
    for exit_interval, ranks, options in [(2, 2, SPLIT_IN_TWO), (4, 2, SPLIT_IN_TWO), (6, 1, ()), (8, 2, ())]:
        status, output = launch(
            corpus, *run, *options, "--exit-interval", exit_interval, ranks=ranks, train_iters=STEPS
        )
        assert status == 0, output[-3000:]
        parts.append(steps(output))
        converted.append("converting" in output)
    parts.append(train(corpus, *run, *SPLIT_IN_TWO, train_iters=STEPS))
    assert [list(part) for part in parts] == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    assert converted == [False, False, zero_stage > 0, zero_stage > 0]  # a part of ZeRO's state for each rank
    assert_alike(f"ZeRO {zero_stage}, stopped four times", trained(log), of_one_rank())


def test_a_killed_run_goes_on(corpus, of_one_rank, tmp_path):
    log = tmp_path / "log.jsonl"
    run = ("--zero-stage", 1, *in_folder(tmp_path / "checkpoints"), *SPLIT_IN_TWO, "--save-interval", 2)
    run += ("--json-log", log)
    micro_batches = 4  # of a step: 8 sequences, 2 at once
    status, output = launch(corpus, *run, fault=f"1 SIGKILL {5 * micro_batches + 2}", train_iters=STEPS)
    assert status != 0 and list(steps(output)) == [1, 2, 3, 4, 5]
    assert list(train(corpus, *run, train_iters=STEPS)) == [5, 6, 7, 8, 9, 10]
    assert_alike("killed in step 6", trained(log), of_one_rank())


def watched(corpus, folder, *options, ranks):
    """Of each rank, of each step what ``watched_trainer.py`` records."""
    folder.mkdir()
    status, output = launch(corpus, *options, ranks=ranks, train_iters=3, watched=folder, launcher="ranks")
    assert status == 0, output[-3000:]
    return [[json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()] for rank in range(ranks)]


def boundaries(steps):
    return [step["cu_seqlens"] for step in steps]


@pytest.mark.parametrize("balance_batches", [0, 1, 3])
def test_ranks_that_share_sequences_are_balanced_as_one(corpus, tmp_path, balance_batches):
    options = ("--balance-batches", balance_batches)
    shared = watched(corpus, tmp_path / "shared", *options, *SPLIT_IN_TWO, ranks=4)
    alone = watched(corpus, tmp_path / "alone", *options, ranks=2)
    for group, steps_alone in enumerate(alone):
        members = shared[2 * group : 2 * group + 2]
        for member in members:
            assert boundaries(member) == boundaries(steps_alone)
        for first, second, whole in zip(*members, steps_alone, strict=True):
            for name in ("tokens", "position_ids"):  # zigzag: the first and last quarter, and the two between them
                for outer, inner, rows in zip(first[name], second[name], whole[name], strict=True):
                    assert [a[:32] + b + a[32:] for a, b in zip(outer, inner, strict=True)] == rows
            assert first["work"] == second["work"] == whole["work"] and first["work"][0] == TOKENS_PER_STEP
            assert first["num_targets"] == whole["num_targets"]
    assert boundaries(shared[0]) != boundaries(shared[2])
    by_four = watched(corpus, tmp_path / "by four", *options, ranks=4)  # the control: each rank has its own sequences
    assert boundaries(by_four[0]) != boundaries(shared[0])
    if balance_batches == 3:  # and what is in a batch depends on the number of sequences at once
        assert samples(by_four) != samples(shared[::2])


def samples(ranks):
    """Of each step, the boundaries of all its sequences."""
    return [
        sorted(row for step in steps for rows in step["cu_seqlens"] for row in rows)
        for steps in zip(*ranks, strict=True)
    ]
