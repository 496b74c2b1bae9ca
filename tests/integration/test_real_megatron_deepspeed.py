"""Megatron-DeepSpeed's own pretrain_gpt.py with ``--data-impl bfp``, from a real checkout, on the CPU.

MEGATRON_DEEPSPEED_PATH=CHECKOUT bash tests/run.sh --integration
"""

import re

import numpy as np
import pytest
from helpers.real_megatron.deepspeed import ALONG, NEEDS_CHECKOUT, PACKED, STEP, launch, losses, train, watched

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
SEEN = "best-fit packing: attention inside documents, as the first step showed: "
FLASH = ["--bf16", "--use-flash-attn-v2"]
BACKWARD_ONLY = "> backward pass without gradients of weights"
ROTARY = ["--use-rotary-position-embeddings"]


@pytest.fixture(scope="module")
def checkout(megatron_deepspeed):
    return megatron_deepspeed


@pytest.fixture(scope="module")
def corpus(megatron_deepspeed_corpus):
    return megatron_deepspeed_corpus


@pytest.fixture(scope="module")
def by_module(checkout, corpus):
    """The run that others are compared with."""
    return train(checkout, corpus, *PACKED, *ALONG)


def test_three_ways_in_have_the_same_losses(checkout, corpus, by_module, plugin_enabled):
    steps, output = by_module
    assert list(steps) == [*range(1, 11), "validation", "test"] and losses(steps)[9] < losses(steps)[0] - 0.3
    assert "best-fit packing: train: text.bfp/s128-d0-" in output
    assert f"{SEEN}3 x ParallelAttention by torch's softmax with a mask; learned positions" in output
    assert train(checkout, corpus, *PACKED, *ALONG, script=[checkout / "with_install.py"])[0] == steps
    assert train(checkout, corpus, "--data-impl=bfp", *ALONG, script=[checkout / "pretrain_gpt.py"])[0] == steps


@pytest.mark.parametrize(
    "layout",
    [ALONG, [*ALONG, "--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]],
    ids=["dp 2", "tp 2", "pp 2"],
)
def test_three_ways_in_with_two_ranks(checkout, corpus, plugin_enabled, layout):
    first, second, third = (
        train(checkout, corpus, *PACKED, *layout, ranks=2, script=script)[0]
        for script in (None, [checkout / "with_install.py"], [checkout / "pretrain_gpt.py"])
    )
    assert list(first) == [*range(1, 11), "validation", "test"]
    assert first == second == third


def test_without_the_flag_nothing_changes(checkout, corpus, plugin_enabled):
    stock = [checkout / "pretrain_gpt.py"]
    untouched, _ = train(checkout, corpus, *ALONG, script=stock, plugin=False)
    assert len(untouched) == 12
    assert untouched == train(checkout, corpus, "--data-impl", "mmap", *ALONG, script=stock)[0]
    assert untouched == train(checkout, corpus, *ALONG)[0]


@pytest.mark.parametrize(
    "options, ranks, tolerance",
    [
        ([], 1, 2e-6),
        (["--reset-position-ids", "--eod-mask-loss", "--reset-attention-mask"], 1, 2e-6),
        (["--tensor-model-parallel-size", "2"], 2, 2e-6),
        (["--max-documents-per-sequence", "2"], 2, 2e-6),
        (FLASH, 1, 2e-4),
        (["--targets-only", "--tensor-model-parallel-size", "2"], 2, 2e-6),
    ],
    ids=["softmax", "reset positions, mask EOD", "tp 2", "dp 2, at most 2 documents", "flash-attn 2", "targets only"],
)
def test_the_first_loss_is_that_of_the_chunks_alone(checkout, corpus, options, ranks, tolerance):
    steps, output = train(checkout, corpus, *PACKED, *ALONG, *options, ranks=ranks, iters=1, watched="alone")
    batches = watched(output)
    assert len(batches) == 4 * (2 if "--tensor-model-parallel-size" in options else 1)
    means = [part["alone"] / part["targets"] for part in batches]
    assert losses(steps)[0] == pytest.approx(sum(means) / len(means), rel=tolerance)


def test_targets_only_trains_alike_through_a_pipeline(checkout, corpus):
    steps, output = train(checkout, corpus, *PACKED, *ALONG, "--targets-only", iters=3)
    assert "-t (" in output and np.isfinite(losses(steps)).all()
    assert train(checkout, corpus, *PACKED, "--targets-only", iters=3)[0] == steps
    assert train(checkout, corpus, *PACKED, *ALONG, iters=3)[0] != steps  # the control


def test_a_micro_batch_without_targets_has_no_loss(checkout, corpus):
    options = {"data": "short", "split": "1,0,0", "micro_batch": 1}
    steps, output = train(checkout, corpus, *PACKED, *ALONG, iters=1, watched="alone", **options)
    means = [part["alone"] / max(1, part["targets"]) for part in watched(output)]
    assert 0 < means.count(0) < 8
    assert losses(steps)[0] == pytest.approx(sum(means) / 8, rel=2e-6)
    one, _ = train(checkout, corpus, *PACKED, *ALONG, iters=3, **options)
    assert one[1] == steps[1] and np.isfinite(losses(one)).all()
    assert train(checkout, corpus, *PACKED, iters=3, **options)[0] == one  # through the pipeline's own loss


def test_two_ranks_read_what_one_reads_and_train_as_one(checkout, corpus, by_module):
    def batches(ranks):
        steps, output = train(checkout, corpus, *PACKED, *ALONG, ranks=ranks, watched="batches")
        assert losses(steps) == pytest.approx(losses(by_module[0]), abs=5e-6)
        of_rank = [[batch["digests"] for batch in watched(output) if batch["rank"] == rank] for rank in range(ranks)]
        return [digests for together in zip(*of_rank, strict=True) for digests in together]

    one = batches(1)
    assert len(one) == 4 * (10 + 2 + 2)
    assert one == batches(2)


def test_pipelines_train_as_one_stage(checkout, corpus, by_module):
    """Of 1, 2 and 3 stages, from the same weights; with recomputation several micro-batches are on their way."""
    steps, _ = train(checkout, corpus, *PACKED, "--save", "weights", "--save-interval", 10)
    assert losses(steps) == pytest.approx(losses(by_module[0]), abs=5e-6)
    load = ["--load", "weights", "--finetune", "--no-load-optim", "--no-load-rng"]
    one, _ = train(checkout, corpus, *PACKED, *load, iters=4)
    two, _ = train(checkout, corpus, *PACKED, *load, "--pipeline-model-parallel-size", 2, ranks=2, iters=4)
    recompute = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
    options = ["--pipeline-model-parallel-size", 3, *recompute]
    three, _ = train(checkout, corpus, *PACKED, *load, *options, ranks=3, iters=4)
    for several in (two, three):
        assert losses(several)[:4] == pytest.approx(losses(one)[:4], abs=5e-6)
        assert losses(several)[4:] == pytest.approx(losses(one)[4:], abs=2e-4)  # after updates with clipped gradients


@pytest.mark.parametrize("stages", [2, 3])
def test_the_zero_bubble_schedule_trains_as_the_usual_one(checkout, corpus, stages):
    """A middle stage computes gradients of weights apart from those of its inputs, which carry no boundaries."""
    options = [*PACKED, "--pipeline-model-parallel-size", stages]
    usual, plain = train(checkout, corpus, *options, ranks=stages, iters=3)
    exact = ["--enable-zbh1-pipeline", "--enable-zbh1-exact-semantics"]
    for zero_bubble in (exact[:1], exact):
        steps, output = train(checkout, corpus, *options, *zero_bubble, ranks=stages, iters=3)
        assert losses(steps)[:2] == pytest.approx(losses(usual)[:2], abs=5e-6)
        assert losses(steps)[2:] == pytest.approx(losses(usual)[2:], abs=2e-4)  # after updates with clipped gradients
        assert output.count(BACKWARD_ONLY) > plain.count(BACKWARD_ONLY) == 0
    other, _ = train(checkout, corpus, *options, *exact, "--max-documents-per-sequence", 1, ranks=stages, iters=3)
    assert abs(losses(other)[0] - losses(usual)[0]) > 1e-4  # the control: other boundaries have other losses


def test_layers_of_experts_train_in_a_pipeline_as_without(checkout, corpus):
    experts = ["--num-experts", 2, "--expert-interval", 1, "--create-moe-param-group", "--disable-moe-token-dropping"]
    along, _ = train(checkout, corpus, *PACKED, *ALONG, *experts, iters=3)
    piped, _ = train(checkout, corpus, *PACKED, *experts, iters=3)
    assert losses(piped)[:3] == pytest.approx(losses(along)[:3], abs=5e-6)


def test_sequence_parallel_ranks_train_as_one(checkout, corpus):
    one, _ = train(checkout, corpus, *PACKED, *ALONG, *FLASH, iters=4)
    ulysses = ["--ds-sequence-parallel-size", 2]
    two, output = train(checkout, corpus, *PACKED, *ALONG, *FLASH, *ulysses, ranks=2, iters=4)
    assert f"{SEEN}3 x ParallelAttention by flash-attn's varlen kernel; " in output
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)


@pytest.mark.parametrize("zero", [1, 3])
def test_zero_trains_as_one_rank(checkout, corpus, by_module, zero):
    steps, _ = train(checkout, corpus, *PACKED, *ALONG, ranks=2, iters=4, zero=zero)
    assert losses(steps)[:4] == pytest.approx(losses(by_module[0])[:4], abs=2e-5)


@pytest.mark.parametrize(
    "options",
    [["--recompute-granularity", "full", "--recompute-method", "uniform"], ["--recompute-granularity", "selective"]],
    ids=["full", "selective"],
)
def test_recomputation_changes_nothing(checkout, corpus, by_module, options):
    steps, _ = train(checkout, corpus, *PACKED, *ALONG, *options, iters=4)
    assert [steps[i] for i in range(1, 5)] == [by_module[0][i] for i in range(1, 5)]


def test_a_resumed_run_continues_exactly(checkout, corpus, by_module):
    save = ["--save", "resumed", "--save-interval", 5]
    train(checkout, corpus, *PACKED, *ALONG, *save, "--exit-interval", 5)
    steps, _ = train(checkout, corpus, *PACKED, *ALONG, *save, "--load", "resumed")
    assert list(steps)[:5] == [6, 7, 8, 9, 10]
    assert all(steps[i] == by_module[0][i] for i in steps)


RUNS = {
    "along": ([*PACKED, *ALONG], {}),
    "pipeline": (PACKED, {}),
    "flash": ([*PACKED, *ALONG, *FLASH], {}),
    "no targets": ([*PACKED, *ALONG], {"data": "short", "split": "1,0,0", "micro_batch": 1}),
    "no targets, pipeline": (PACKED, {"data": "short", "split": "1,0,0", "micro_batch": 1}),
    "separate": ([*PACKED, *ALONG, "--train-data-path", "text"], {"data": ""}),
    "refused": ([*PACKED, *ALONG, "--dataloader-type", "cyclic"], {}),
    "rotary": ([*PACKED, *ALONG, *ROTARY], {"data": "part0"}),
    "rotary, pipeline": ([*PACKED, *ROTARY], {"data": "part0"}),
}
"""Options and keywords of runs that differ in the functions they need."""


@pytest.fixture(scope="module")
def what_happens(checkout, corpus):
    """What a run prints of steps and of what is active; kept for those with all hooks."""
    whole = {}

    def run(name, watched=None):
        options, keywords = RUNS[name]
        if watched or name not in whole:
            _, output = launch(checkout, corpus, *options, iters=2, watched=watched, **keywords)
            printed = STEP.findall(output), re.findall("best-fit packing.*", output)
            if watched:
                return printed
            whole[name] = printed
        return whole[name]

    return run


@pytest.mark.parametrize(
    "function, name",
    [
        ("arguments._add_data_args", "along"),
        ("arguments.validate_args", "refused"),
        ("gpt_dataset._build_train_valid_test_datasets", "along"),
        ("gpt_dataset._build_dataset", "separate"),
        ("gpt_dataset.build_train_valid_test_datasets", "along"),
        ("tensor_parallel.broadcast_data", "along"),
        ("utils.get_ltor_masks_and_position_ids", "along"),
        ("ParallelAttention.forward", "along"),
        ("FlashSelfAttention.forward", "flash"),
        ("EmbeddingPipe.forward", "pipeline"),
        ("ParallelTransformerLayerPipe.forward", "pipeline"),
        ("GPTModel.forward", "no targets"),
        ("gpt_model.CrossEntropy", "no targets, pipeline"),
        ("rotary_pos_embedding.apply_rotary_pos_emb", "rotary"),
        ("utils.update_rotary_pos_emb", "rotary, pipeline"),
    ],
)
def test_each_hook_is_needed(what_happens, function, name):
    steps, lines = what_happens(name)
    assert len(steps) == (0 if name == "refused" else 2)
    assert what_happens(name, f"without={function}") != (steps, lines)


def test_what_cannot_be_honoured_is_refused_in_one_line(checkout, corpus):
    status, output = launch(checkout, corpus, *PACKED, *ALONG, "--random-ltd")
    assert status != 0 and not STEP.findall(output)
    assert "--random-ltd cannot be used with --data-impl bfp: it drops tokens" in output


def test_fault_B18_rotary_positions_are_those_of_the_documents_alone(checkout, corpus):
    options = {"data": "part0", "iters": 2}  # documents of at most 40 tokens, at any offset
    steps, output = train(checkout, corpus, *PACKED, *ALONG, *ROTARY, watched="alone", **options)
    means = [part["alone"] / part["targets"] for part in watched(output)]
    assert len(means) == 4 and losses(steps)[0] == pytest.approx(sum(means) / 4, rel=2e-6)
    assert "ParallelAttention by torch's softmax with a mask; rotary positions run on through the sequence; " in output
    learned, _ = train(checkout, corpus, *PACKED, *ALONG, **options)
    assert losses(learned)[1] != pytest.approx(losses(steps)[1], abs=1e-4)
    piped, output = train(checkout, corpus, *PACKED, *ROTARY, **options)
    assert "; rotary positions run on through the sequence; " in output
    assert losses(piped) == pytest.approx(losses(steps), abs=5e-6)
    saving = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
    again, _ = train(
        checkout, corpus, *PACKED, *ALONG, *ROTARY, *saving, "--deepspeed-activation-checkpointing", **options
    )
    assert losses(again) == losses(steps)
    status, output = launch(checkout, corpus, *PACKED, *ALONG, *ROTARY, *saving, **options)
    assert status != 0 and "full needs --deepspeed-activation-checkpointing" in output


def test_fault_B18_rotary_positions_are_right_under_sequence_parallelism(checkout, corpus):
    options = {"data": "part0", "iters": 2}
    one, _ = train(checkout, corpus, *PACKED, *ALONG, *FLASH, *ROTARY, **options)
    ulysses = ["--ds-sequence-parallel-size", 2]
    two, output = train(checkout, corpus, *PACKED, *ALONG, *FLASH, *ROTARY, *ulysses, ranks=2, **options)
    assert "; rotary positions run on through the sequence; " in output
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)
