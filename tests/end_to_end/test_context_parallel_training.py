"""The trainer with context parallelism: losses are those of one rank, whatever else is parallel, and runs go on.

The quick tests of context parallelism are those of attention.
"""

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

from helpers.launching import as_numbers, in_folder, launch, make_corpus, steps, train

SPLIT_IN_TWO = ("--context-parallel-size", 2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def assert_alike(one, other):
    assert one.keys() == other.keys()
    for first, second in zip(as_numbers(one), as_numbers(other), strict=True):
        assert first[0] == pytest.approx(second[0], abs=1e-5) and first[1] == pytest.approx(second[1], rel=1e-3)


@pytest.mark.slow
def test_the_number_of_ranks_must_be_a_multiple(corpus):
    status, output = launch(corpus, "--context-parallel-size", 4, ranks=2, launcher="ranks")
    assert status == 2
    assert "--tensor-model-parallel-size 1 times --context-parallel-size 4 does not divide 2 ranks" in output


@pytest.fixture(scope="module")
def of_one_rank(corpus):
    return train(corpus, "--zero-stage", 1, ranks=1, train_iters=10)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize(
    "ranks, options",
    [
        (4, SPLIT_IN_TWO),
        (4, (*SPLIT_IN_TWO, "--tensor-model-parallel-size", 2)),
        (4, ("--context-parallel-size", 4)),
        (2, (*SPLIT_IN_TWO, "--recompute-granularity", "full")),
        (2, (*SPLIT_IN_TWO, "--num-attention-heads", 1, "--num-query-groups", 1)),
    ],
    ids=["cp 2, dp 2", "cp 2, tp 2", "cp 4", "recomputed", "one head: keys gathered"],
)
def test_every_layout_trains_as_one_rank(corpus, of_one_rank, zero_stage, ranks, options):
    expected = of_one_rank
    if "--num-attention-heads" in options:
        expected = train(corpus, "--zero-stage", zero_stage, *options[2:], ranks=1, train_iters=10)
    status, output = launch(corpus, "--zero-stage", zero_stage, *options, ranks=ranks, train_iters=10)
    assert status == 0, output[-3000:]
    assert "rotary positions run on through the sequence" in output
    assert_alike(steps(output), expected)


@pytest.mark.slow
def test_evaluations_are_those_of_one_rank(corpus):
    def validations(*options, ranks):
        status, output = launch(corpus, "--eval-interval", 6, *options, ranks=ranks, launcher="ranks")
        assert status == 0, output[-2000:]
        return [line.split(" | ")[:4] for line in output.splitlines() if line.startswith("validation")]

    alone, shared = validations(ranks=1), validations(*SPLIT_IN_TWO, ranks=2)
    assert len(alone) == 1 and alone[0][0] == shared[0][0] and alone[0][3] == shared[0][3]  # iteration, targets
    assert float(alone[0][1].split()[1]) == pytest.approx(float(shared[0][1].split()[1]), abs=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_another_context_parallel_size(corpus, of_one_rank, tmp_path):
    run = ("--zero-stage", 1, *in_folder(tmp_path / "checkpoints"))
    first = train(corpus, *run, *SPLIT_IN_TWO, "--exit-interval", 3, train_iters=10)
    second = train(corpus, *run, "--exit-interval", 6, ranks=1, train_iters=10)
    third = train(corpus, *run, *SPLIT_IN_TWO, train_iters=10)
    assert [list(part) for part in (first, second, third)] == [[1, 2, 3], [4, 5, 6], [7, 8, 9, 10]]
    assert_alike(first | second | third, of_one_rank)
