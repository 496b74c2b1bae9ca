"""``--balance-batches`` and ``--even-sequences`` in Megatron-LM's own pretrain_gpt.py, on the CPU.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import pytest
from helpers.launching import make_corpus
from helpers.real_megatron.lm import (
    NEEDS_CHECKOUT,
    ON_CPU,
    STEP,
    by_way,
    launch,
    losses,
    same_batches,
    samples_in_order,
    train,
)

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
PACKED = ["--data-impl", "bfp"]
BATCHES = 10
EVALUATED = 2 * 8 * 2  # two global batches on each of the valid and test splits


@pytest.fixture(scope="module")
def checkout(megatron_lm):
    return megatron_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(checkout, corpus):
    """Losses, samples in order and output of a run; each is made once."""
    kept = {}

    def run_once(*options, ranks=1, **keywords):
        key = (options, ranks, tuple(keywords.items()))
        if key not in kept:
            script = [ON_CPU / "watched.py", "batches", checkout / "pretrain_gpt.py", *PACKED]
            steps, output = train(checkout, corpus, script, *options, ranks=ranks, **keywords)
            kept[key] = losses(steps), samples_in_order(output, ranks), output
        return kept[key]

    return run_once


def test_balancing_changes_the_order_inside_a_batch_alone(run):
    balanced, samples, output = run()
    in_seeded_order, plain, output_of_plain = run("--balance-batches", 0)
    assert balanced[0] == pytest.approx(in_seeded_order[0], abs=1.01e-6)  # six digits are printed
    assert balanced == pytest.approx(in_seeded_order, abs=1e-4)
    assert same_batches(samples[:80], plain[:80], [8] * BATCHES) and samples[:80] != plain[:80]
    assert samples[80:] == plain[80:] and len(samples[80:]) == EVALUATED  # evaluation is left as it is
    assert output.count("balanced inside each global batch of 8") == 1 and "composed by cost" not in output
    assert "balanced inside" not in output_of_plain


def test_two_ranks_have_the_batches_of_one(run):
    one, samples, _ = run()
    two, samples_of_two, _ = run(ranks=2)
    assert samples_of_two == samples and two == pytest.approx(one, abs=1e-4)
    assert two[0] == pytest.approx(one[0], abs=1.01e-6)


def test_other_batches_have_other_losses(run):
    """The controls: another seed, and batches that are composed by cost."""
    in_seeded_order, plain, _ = run("--balance-batches", 0)
    seeded, samples, _ = run("--seed", 4321, "--train-iters", 2)
    assert abs(seeded[0] - in_seeded_order[0]) > 1e-4
    assert not same_batches(samples[:16], plain[:16], [8] * 2)
    dealt, samples, output = run("--balance-batches", 5)
    assert abs(dealt[0] - in_seeded_order[0]) > 1e-5
    assert not same_batches(samples[:80], plain[:80], [8] * BATCHES)
    assert same_batches(samples[:80], plain[:80], [40] * 2) and samples[80:] == plain[80:]
    assert "balanced over every 5 global batches of 8" in output and output.count("batches are composed by cost") == 1


def test_batches_that_grow_keep_their_samples(run):
    """4 samples up to sample 16, 8 up to sample 48, then 16; the schedule counts tokens, 128 a sample."""
    growing = ["--step-batch-size-schedule", "0:4 2048:8 6144:16"]
    keywords = {"without": ("--global-batch-size",)}
    balanced, samples, output = run(*growing, **keywords)
    in_seeded_order, plain, _ = run(*growing, "--balance-batches", 0, **keywords)
    sizes = [4] * 4 + [8] * 4 + [16] * 2
    seen = sum(sizes)
    assert same_batches(samples[:seen], plain[:seen], sizes) and samples[:seen] != plain[:seen]
    assert balanced[0] == pytest.approx(in_seeded_order[0], abs=1.01e-6)
    assert balanced == pytest.approx(in_seeded_order, abs=1e-4)
    assert "balanced inside each global batch of 4 to 16" in output


def test_growing_batches_are_not_composed_by_cost(checkout, corpus):
    growing = ["--step-batch-size-schedule", "0:4 2048:8", "--balance-batches", 4]
    status, output = launch(
        checkout, corpus, by_way(checkout, "-m"), *PACKED, *growing, without=("--global-batch-size",), ranks=2
    )
    assert status != 0 and not STEP.findall(output)
    assert output.count("--step-batch-size-schedule cannot be used with --balance-batches 4") == 1


@pytest.fixture(scope="module")
def saved(checkout, corpus, tmp_path_factory):
    """The folder of a checkpoint after five steps, in the middle of an epoch, for each value of the option."""
    kept = {}

    def save(num_batches):
        if num_batches not in kept:
            folder = kept[num_batches] = tmp_path_factory.mktemp("saved")
            script = [*by_way(checkout, "-m"), *PACKED, "--balance-batches", num_batches, "--save", folder]
            train(checkout, corpus, script, "--save-interval", 5, "--exit-interval", 5)
        return kept[num_batches]

    return save


def test_a_resume_with_another_batch_size_keeps_its_batches(run, saved):
    resumed = ["--load", saved(1), "--override-opt_param-scheduler"]
    resumed += ["--global-batch-size", 16, "--train-iters", 8]  # sample 40 is no multiple of 16
    balanced, samples, output = run(*resumed)
    in_seeded_order, plain, _ = run(*resumed, "--balance-batches", 0)
    assert len(balanced) == 3 and "balanced inside each global batch of 16" in output
    assert same_batches(samples[:48], plain[:48], [16] * 3) and samples[:48] != plain[:48]
    assert plain[:40] == run("--balance-batches", 0)[1][40:80]
    assert balanced == pytest.approx(in_seeded_order, abs=1e-4)


def test_a_run_that_is_resumed_inside_a_block_continues_exactly(run, saved):
    uninterrupted, samples, _ = run("--balance-batches", 4)
    resumed, samples_of_resumed, _ = run("--balance-batches", 4, "--load", saved(4))
    assert samples_of_resumed[:40] == samples[40:80]
    assert resumed[0] == uninterrupted[5] and resumed[2:] == uninterrupted[7:]  # the second printed one is a mean


@pytest.mark.parametrize(
    "before, changes, ranks",
    [
        (4, ["--balance-batches", 4], 2),
        (4, ["--balance-batches", 2], 1),
        (4, ["--balance-batches", 4, "--global-batch-size", 20], 1),
        (4, [], 1),
        (1, ["--balance-batches", 4], 2),
    ],
    ids=["dp 2", "other N", "other global batch", "N to 1", "1 to N"],
)
def test_a_resume_that_would_lose_samples_is_refused_in_one_line(checkout, corpus, saved, before, changes, ranks):
    script = by_way(checkout, "install")
    status, output = launch(checkout, corpus, script, *PACKED, *changes, "--load", saved(before), ranks=ranks)
    assert status != 0 and not STEP.findall(output) and "[rank" not in output
    assert (
        output.count(f"its checkpoint has --balance-batches {before}, a global batch size of 8, a micro-batch size of")
        == 1
    )
    assert "Sample 40 is inside a block of batches that are balanced together" in output


def test_the_check_of_checkpoints_is_needed(checkout, corpus, saved):
    script = [ON_CPU / "watched.py", "without=check_checkpoint_args", checkout / "pretrain_gpt.py", *PACKED]
    steps, _ = train(checkout, corpus, script, "--load", saved(4))
    assert len(steps) == 5


def test_a_blend_of_three_keeps_its_batches_and_gets_even_sequences(run):
    blend = "0.5 data_text_document 0.3 data_text_document 0.2 data_text_document"
    options = ["--even-sequences", "--train-iters", 4]
    _, samples, output = run(*options, data=blend)
    _, plain, _ = run(*options, "--balance-batches", 0, data=blend)
    assert same_batches(samples[:32], plain[:32], [8] * 4) and samples[:32] != plain[:32]
    assert samples[32:] == plain[32:]
    assert "train: 3 indexes" in output and "balanced inside each global batch of 8" in output


def test_the_option_of_even_sequences_arrives(checkout, corpus):
    options = ["--even-sequences", "--train-iters", 1, "--max-documents-per-sequence", 9]
    _, output = train(checkout, corpus, by_way(checkout, "-m"), *PACKED, *options)
    assert "best-fit packing: train: data_text_document.bfp/s128-d0-" in output
    lines = [line for line in output.splitlines() if "best-fit packing: t" in line]
    assert len(lines) == 2 and all("-m9-e (1 built" in line for line in lines)
