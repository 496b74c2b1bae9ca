"""Megatron-LM's own pretrain_gpt.py with ``--data-impl bfp``, from a real checkout, on the CPU.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import re
import subprocess
import sys

import pytest
from helpers.launching import ENVIRONMENT, make_corpus
from helpers.real_megatron.lm import NEEDS_CHECKOUT, ON_CPU, STEP, by_way, launch, losses, train, watched

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
CPU_LAYERS = ["--spec", "layer_spec", "packed"]
SEEN = "best-fit packing: attention inside documents, as the first step showed: "


@pytest.fixture(scope="module")
def checkout(megatron_lm):
    return megatron_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def by_module(checkout, corpus):
    """The run that others are compared with."""
    return train(checkout, corpus, ["-m", "megatron_bfp", checkout / "pretrain_gpt.py"], "--data-impl", "bfp")


def test_three_ways_in_have_the_same_losses(checkout, corpus, by_module, plugin_enabled):
    steps, output = by_module
    assert len(steps) == 10 and losses(steps)[-1] < losses(steps)[0] - 0.3
    assert "best-fit packing: train: data_text_document.bfp/s128-d0-" in output
    assert train(checkout, corpus, [checkout / "with_install.py"], "--data-impl", "bfp")[0] == steps
    assert train(checkout, corpus, [checkout / "pretrain_gpt.py"], "--data-impl=bfp")[0] == steps


@pytest.mark.parametrize("layout", [[], ["--tensor-model-parallel-size", 2]], ids=["dp 2", "tp 2"])
def test_three_ways_in_with_two_ranks(checkout, corpus, plugin_enabled, layout):
    first, second, third = (
        train(checkout, corpus, script, "--data-impl", "bfp", *layout, ranks=2)[0]
        for script in (
            ["-m", "megatron_bfp", checkout / "pretrain_gpt.py"],
            [checkout / "with_install.py"],
            [checkout / "pretrain_gpt.py"],
        )
    )
    assert len(first) == 10
    assert first == second == third


def test_without_the_flag_nothing_changes(checkout, corpus, plugin_enabled):
    masking = ["--dataloader-inter-document-masking", *CPU_LAYERS]  # the layers that run on the CPU need boundaries
    enabled_only, _ = train(checkout, corpus, [checkout / "pretrain_gpt.py"], *masking)
    subprocess.run([sys.executable, "-m", "megatron_bfp", "disable"], check=True, env=ENVIRONMENT)
    untouched, _ = train(checkout, corpus, [checkout / "pretrain_gpt.py"], *masking)
    by_module = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py"]
    assert len(untouched) == 10
    assert untouched == enabled_only
    assert untouched == train(checkout, corpus, by_module, *masking)[0]
    assert untouched == train(checkout, corpus, by_module, *masking, "--data-impl", "mmap")[0]


FIM = ["--fim-rate", 0.5, "--fim-prefix-token", 520, "--fim-middle-token", 521, "--fim-suffix-token", 522]
"""NullTokenizer's tokens are numbers; the embedding has 600 rows."""


def index_names(output):
    """The endings of the names of the indexes that a run says it uses."""
    return " ".join(re.findall(r"/s128-d\d+-\d+(\S*) \(", output))


@pytest.mark.parametrize(
    "options",
    [[], ["--reset-position-ids", "--eod-mask-loss"], ["--targets-only"], ["--targets-only", *FIM]],
    ids=["plain", "reset", "targets only", "fill-in-the-middle"],
)
def test_the_first_loss_is_that_of_the_chunks_alone(checkout, corpus, options):
    script = [ON_CPU / "watched.py", "alone", checkout / "pretrain_gpt.py"]
    steps, output = train(checkout, corpus, script, "--data-impl", "bfp", "--train-iters", 1, *options)
    batches = watched(output)
    assert len(batches) == 4
    assert ("-t" in index_names(output)) == ("--targets-only" in options)
    assert ("-t-fim0.5-1234" in index_names(output)) == ("--fim-rate" in options)
    targets = sum(batch["targets"] for batch in batches)
    for positions in ("alone", "unchanged"):
        assert losses(steps)[0] == pytest.approx(sum(batch[positions] for batch in batches) / targets, rel=1e-6)


@pytest.mark.parametrize("layout", [[], ["--tensor-model-parallel-size", 2]], ids=["dp 2", "tp 2"])
def test_two_ranks_train_as_one(checkout, corpus, by_module, layout):
    script = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py"]
    steps, _ = train(checkout, corpus, script, "--data-impl", "bfp", *layout, ranks=2)
    assert losses(steps) == pytest.approx(losses(by_module[0]), abs=1e-5)


def test_two_pipeline_stages_train_alike_whatever_the_micro_batch(checkout, corpus):
    """Megatron-LM initializes a stage by its number, so losses cannot be compared with those of one rank."""
    script = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    script += ["--pipeline-model-parallel-size", 2]
    one, _ = train(checkout, corpus, script, "--micro-batch-size", 1, ranks=2)
    two, _ = train(checkout, corpus, script, ranks=2)
    assert len(two) == 10
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)


def test_the_middle_stage_of_three_gets_the_boundaries(checkout, corpus):
    script = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    options = ["--num-layers", 3, "--pipeline-model-parallel-size", 3, "--train-iters", 3]
    steps, _ = train(checkout, corpus, script, *options, ranks=3)
    assert len(steps) == 3


def test_two_ranks_read_what_one_reads(checkout, corpus):
    def batches(ranks):
        script = [ON_CPU / "watched.py", "batches", checkout / "pretrain_gpt.py"]
        _, output = train(checkout, corpus, script, "--data-impl", "bfp", ranks=ranks)
        of_rank = [[batch["digests"] for batch in watched(output) if batch["rank"] == rank] for rank in range(ranks)]
        return [digests for together in zip(*of_rank, strict=True) for digests in together]

    one = batches(1)
    assert len(one) == 4 * (10 + 2 + 2)  # iterations, and two at the end on each of the valid and test splits
    assert one == batches(2)


def test_a_resumed_run_continues_exactly(checkout, corpus, by_module, tmp_path):
    script = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py", "--data-impl", "bfp", "--save", tmp_path]
    train(checkout, corpus, script, "--save-interval", 5, "--exit-interval", 5)
    resumed, _ = train(checkout, corpus, script, "--load", tmp_path, "--save-interval", 100)
    expected = {iteration: values for iteration, values in by_module[0].items() if iteration > 5}
    # Megatron-LM prints the mean of the first two losses after a start in place of the second
    assert float(resumed[7].pop(1)) == pytest.approx((float(expected[6][1]) + float(expected[7].pop(1))) / 2, abs=2e-6)
    assert resumed == expected


HOOKED = ["_add_data_args", "validate_args", "__init__", "build", "core_attention", "train_step"]


@pytest.mark.parametrize("function", HOOKED)
def test_each_hook_is_needed(checkout, corpus, by_module, function):
    script = [ON_CPU / "watched.py", f"without={function}", checkout / "pretrain_gpt.py"]
    status, output = launch(checkout, corpus, script, "--data-impl", "bfp", "--train-iters", 2)
    printed = {int(iteration): values for iteration, *values in STEP.findall(output)}
    if function == "build":
        assert "best-fit packing: train" not in output
    elif function == "train_step":
        assert "best-fit packing: train" in output and SEEN not in output
    else:
        assert status != 0 or printed != {1: by_module[0][1], 2: by_module[0][2]}


@pytest.mark.parametrize(
    "options, message",
    [
        (["--mock-data"], "--mock-data cannot be used"),
        (["--dataloader-type", "cyclic"], "--dataloader-type cyclic cannot be used"),
        (["--context-parallel-size", 2, "--cp-comm-type", "ring"], "--cp-comm-type ring cannot be used"),
        (["--data-path", "s3://bucket/data"], "object storage cannot be used"),
        (["--split", "0,0,0"], "--split"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_honoured_is_refused(checkout, corpus, options, message):
    script = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    status, output = launch(checkout, corpus, script, *options)
    assert status != 0 and message in output


@pytest.mark.parametrize(
    "options, message",
    [
        (["--cuda-graph-impl", "local"], "--cuda-graph-impl local cannot be used"),
        (["--cuda-graph-impl", "transformer_engine"], "--cuda-graph-impl transformer_engine cannot be used"),
        (["--cuda-graph-impl", "full_iteration"], "--cuda-graph-impl full_iteration cannot be used"),
        (["--cuda-graph-impl", "local", "--cuda-graph-modules", "mlp", "attn"], "--cuda-graph-impl local cannot"),
        (["--cuda-graph-impl", "local", "--cuda-graph-modules", "mlp"], "--cuda-graph-impl local cannot"),
        (["--cuda-graph-scope", "full_iteration"], "--cuda-graph-scope full_iteration cannot be used"),
        (["--enable-cuda-graph"], "--enable-cuda-graph cannot be used"),
        (["--external-cuda-graph"], "--external-cuda-graph cannot be used"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_fault_A01_fault_A08_fault_B11_what_loses_boundaries_is_refused(checkout, corpus, options, message):
    """In one line, before anything is built."""
    script = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    status, output = launch(checkout, corpus, script, *options)
    assert status != 0 and message in output
    assert "best-fit packing:" not in output and "[rank0]" not in output


def test_fault_A01_every_pipeline_stage_is_looked_at(checkout, corpus):
    script = [ON_CPU / "watched.py", "lose=1", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    options = ["--pipeline-model-parallel-size", 2, "--spec", "layer_spec", "like_transformer_engine"]
    status, output = launch(checkout, corpus, script, *options, ranks=2)
    assert status != 0 and "rank 1: " in output and "got no document boundaries" in output
    assert not STEP.findall(output)


def test_fault_B02_local_layers_train_without_a_spec(by_module):
    steps, output = by_module  # MODEL and FOR_CPU name none
    assert len(steps) == 10
    assert f"{SEEN}2 x DocumentAttention by sdpa; rotary positions run on through the sequence; " in output


@pytest.mark.parametrize(
    "options, positions",
    [
        (["--position-embedding-type", "learned_absolute"], "learned positions run on through the sequence"),
        (
            ["--position-embedding-type", "learned_absolute", "--reset-position-ids"],
            "learned positions restart in each document",
        ),
        (["--position-embedding-type", "none"], "no positions"),
        (["--no-rope-freq", 2], "rotary positions run on through the sequence (1 of 2 layers)"),
        (["--no-rope-freq", 2, "--reset-position-ids"], "rotary positions restart in each document (1 of 2 layers)"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_fault_A14_what_is_printed_of_positions_is_true(checkout, corpus, options, positions):
    script = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py", "--data-impl", "bfp", "--train-iters", 1]
    many = ["--global-batch-size", 64]  # some rows hold several documents
    _, output = train(checkout, corpus, script, *many, *options)
    assert f"{SEEN}2 x DocumentAttention by sdpa; {positions}; " in output


def test_fault_B01_an_evaluation_of_larger_micro_batches_runs_through_two_stages(checkout, corpus):
    script = by_way(checkout, "-m")
    options = ["--data-impl", "bfp", "--pipeline-model-parallel-size", 2, "--train-iters", 2, "--micro-batch-size", 1]
    steps, output = train(checkout, corpus, script, *options, "--eval-micro-batch-size", 2, ranks=2)
    evaluations = re.findall(r"loss at iteration 2 on (\S+) set \| lm loss value: (\S+)", output)
    assert len(steps) == 2 and [name for name, _ in evaluations] == ["validation", "test"]
    alike, output = train(checkout, corpus, script, *options, ranks=2)
    assert losses(alike) == pytest.approx(losses(steps), abs=1e-5)
    for (_, loss), (_, expected) in zip(
        evaluations, re.findall(r"loss at iteration 2 on (\S+) set \| lm loss value: (\S+)", output), strict=True
    ):
        assert float(loss) == pytest.approx(float(expected), abs=1e-4)
