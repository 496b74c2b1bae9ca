"""``--balance-batches`` and ``--even-sequences`` in Megatron-DeepSpeed's own pretrain_gpt.py, on the CPU.

Its loss is the mean of the means of micro-batches, so losses are compared at a micro-batch of one sample: each sample
then counts the same wherever it is in its global batch.

MEGATRON_DEEPSPEED_PATH=CHECKOUT bash tests/run.sh --integration
"""

import pytest
from helpers.real_megatron.deepspeed import ALONG, NEEDS_CHECKOUT, PACKED, STEP, launch, losses, train
from helpers.real_megatron.lm import same_batches, samples_in_order

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
BATCHES = 10
EVALUATED = 2 * 8 * 2  # two global batches on each of the valid and test splits
COUNTS_SAMPLES = ("--lr-warmup-iters", "--lr-decay-iters")
"""Options of runs that count iterations; those whose batches grow count samples."""


@pytest.fixture(scope="module")
def checkout(megatron_deepspeed):
    return megatron_deepspeed


@pytest.fixture(scope="module")
def corpus(megatron_deepspeed_corpus):
    return megatron_deepspeed_corpus


@pytest.fixture(scope="module")
def run(checkout, corpus):
    """Losses, samples in order and output of a run; each is made once."""
    kept = {}

    def run_once(*options, ranks=1, **keywords):
        key = (options, ranks, tuple(keywords.items()))
        if key not in kept:
            keywords = {"watched": "batches", "micro_batch": 1} | keywords
            steps, output = train(checkout, corpus, *PACKED, *ALONG, *options, ranks=ranks, **keywords)
            kept[key] = losses(steps), samples_in_order(output, ranks), output
        return kept[key]

    return run_once


def test_balancing_changes_the_order_inside_a_batch_alone(run):
    balanced, samples, output = run()
    in_seeded_order, plain, output_of_plain = run("--balance-batches", 0)
    assert balanced[0] == pytest.approx(in_seeded_order[0], abs=1.01e-6)  # six digits are printed
    assert balanced[:BATCHES] == pytest.approx(in_seeded_order[:BATCHES], abs=1e-4)
    assert same_batches(samples[:80], plain[:80], [8] * BATCHES) and samples[:80] != plain[:80]
    assert samples[80:] == plain[80:] and len(samples[80:]) == EVALUATED  # evaluation is left as it is
    assert output.count("balanced inside each global batch of 8") == 1 and "composed by cost" not in output
    assert "balanced inside" not in output_of_plain


def test_two_ranks_have_the_batches_of_one(run):
    one, samples, _ = run()
    two, samples_of_two, _ = run(ranks=2)
    assert samples_of_two == samples and two[:BATCHES] == pytest.approx(one[:BATCHES], abs=1e-4)
    assert two[0] == pytest.approx(one[0], abs=1.01e-6)


def test_batches_that_are_composed_by_cost_have_other_losses(run):
    """The control of the tests above."""
    in_seeded_order, plain, _ = run("--balance-batches", 0)
    dealt, samples, output = run("--balance-batches", 5)
    assert abs(dealt[0] - in_seeded_order[0]) > 1e-5
    assert not same_batches(samples[:80], plain[:80], [8] * BATCHES)
    assert same_batches(samples[:80], plain[:80], [40] * 2) and samples[80:] == plain[80:]
    assert "balanced over every 5 global batches of 8" in output and output.count("batches are composed by cost") == 1


def test_batches_that_grow_keep_their_samples(run):
    growing = ["--rampup-batch-size", 4, 4, 16, "--train-samples", 64]
    keywords = {"without": COUNTS_SAMPLES, "iters": None}
    balanced, samples, output = run(*growing, **keywords)
    in_seeded_order, plain, _ = run(*growing, "--balance-batches", 0, **keywords)
    sizes = [4] * 4 + [8] * 5
    seen = sum(sizes)
    assert same_batches(samples[:seen], plain[:seen], sizes) and samples[:seen] != plain[:seen]
    assert not same_batches(samples[:32], run()[1][:32], sizes[:4] + [16])  # blocks of the final size from the start
    assert balanced[0] == pytest.approx(in_seeded_order[0], abs=1.01e-6)
    assert balanced[: len(sizes)] == pytest.approx(in_seeded_order[: len(sizes)], abs=1e-4)
    assert "balanced inside each global batch of 4 to 8" in output


def test_growing_batches_are_not_composed_by_cost(checkout, corpus):
    growing = ["--rampup-batch-size", 4, 4, 16, "--train-samples", 64, "--balance-batches", 4]
    keywords = {"script": [checkout / "with_install.py"], "without": COUNTS_SAMPLES, "iters": None}
    status, output = launch(checkout, corpus, *PACKED, *ALONG, *growing, **keywords)
    assert status != 0 and not STEP.findall(output)
    assert output.count("--rampup-batch-size cannot be used with --balance-batches 4") == 1


@pytest.fixture(scope="module")
def saved(checkout, corpus, tmp_path_factory):
    """The folder of a checkpoint after five steps, in the middle of an epoch, for each value of the option."""
    kept = {}

    def save(num_batches):
        if num_batches not in kept:
            folder = kept[num_batches] = tmp_path_factory.mktemp("saved")
            options = ["--balance-batches", num_batches, "--save", folder, "--save-interval", 5, "--exit-interval", 5]
            train(checkout, corpus, *PACKED, *ALONG, *options, micro_batch=1)
        return kept[num_batches]

    return save


def test_a_run_that_is_resumed_inside_a_block_continues_exactly(run, saved):
    uninterrupted, samples, _ = run("--balance-batches", 4)
    resumed, samples_of_resumed, _ = run("--balance-batches", 4, "--load", saved(4))
    assert samples_of_resumed[:40] == samples[40:80]
    assert resumed[:5] == uninterrupted[5:BATCHES]


def test_a_resume_with_another_batch_size_keeps_its_batches(run, saved):
    resumed = ["--load", saved(1), "--override-opt_param-scheduler"]
    resumed += ["--global-batch-size", 16]  # sample 40 is no multiple of 16
    keywords = {"without": ("--global-batch-size",), "iters": 8}
    balanced, samples, output = run(*resumed, **keywords)
    in_seeded_order, plain, _ = run(*resumed, "--balance-batches", 0, **keywords)
    assert "balanced inside each global batch of 16" in output
    assert same_batches(samples[:48], plain[:48], [16] * 3) and samples[:48] != plain[:48]
    assert plain[:40] == run("--balance-batches", 0)[1][40:80]
    assert balanced[:3] == pytest.approx(in_seeded_order[:3], abs=1e-4)


@pytest.mark.parametrize(
    "before, changes, ranks",
    [(4, ["--balance-batches", 4], 2), (4, [], 1), (1, ["--balance-batches", 4], 1)],
    ids=["dp 2", "N to 1", "1 to N"],
)
def test_a_resume_that_would_lose_samples_is_refused_in_one_line(checkout, corpus, saved, before, changes, ranks):
    keywords = {"script": [checkout / "with_install.py"], "micro_batch": 1, "ranks": ranks}
    status, output = launch(checkout, corpus, *PACKED, *ALONG, *changes, "--load", saved(before), **keywords)
    assert status != 0 and not STEP.findall(output) and "Traceback" not in output
    assert (
        output.count(f"its checkpoint has --balance-batches {before}, a global batch size of 8, a micro-batch size of")
        == 1
    )
    assert "Sample 40 is inside a block of batches that are balanced together" in output


def test_the_check_of_checkpoints_is_needed(run, saved):
    balanced, *_ = run("--load", saved(4), watched="without=checkpointing.check_checkpoint_args")
    assert len(balanced) == 5 + 2  # steps and evaluations


def test_a_blend_of_three_keeps_its_batches_with_even_sequences(run):
    keywords = {"data": "0.5 part0 0.3 part1 0.2 part2", "iters": 4}
    _, samples, output = run("--even-sequences", "--data-cache-path", "cache", **keywords)
    _, plain, _ = run("--even-sequences", "--data-cache-path", "cache", "--balance-batches", 0, **keywords)
    assert same_batches(samples[:32], plain[:32], [8] * 4) and samples[:32] != plain[:32]
    assert samples[32:] == plain[32:]
    assert "train: 3 indexes" in output and "balanced inside each global batch of 8" in output


def test_the_option_of_even_sequences_arrives(checkout, corpus):
    options = ["--even-sequences", "--max-documents-per-sequence", 9]
    _, output = train(checkout, corpus, *PACKED, *ALONG, *options, iters=1)
    lines = [line for line in output.splitlines() if "best-fit packing: t" in line]
    assert len(lines) == 2 and all("-m9-e (1 built" in line for line in lines)
    _, output = train(checkout, corpus, *PACKED, *ALONG, *options, "--train-data-path", "text", data="", iters=1)
    assert "best-fit packing: train: text.bfp/s128-d0-" in output and "-m9-e (1 built" in output
