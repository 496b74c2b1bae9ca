"""Megatron-LM's own pretrain_gpt.py with ``--data-impl bfp`` and context parallelism, from a real checkout, on the CPU.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import re

import pytest
from helpers.launching import make_corpus
from helpers.real_megatron.lm import (
    NEEDS_CHECKOUT,
    ON_CPU,
    STEP,
    by_way,
    in_batches,
    launch,
    losses,
    train,
    watched,
)

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
PACKED = ["--data-impl", "bfp"]
EVALUATED = ["--eval-interval", 5]
SPLIT = ["--context-parallel-size", 2]
STAGES = ["--pipeline-model-parallel-size", 2]
VIRTUAL = [*STAGES, "--num-layers", 4, "--num-virtual-stages-per-pipeline-rank", 2]
RECOMPUTED = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
LAYOUTS = {
    "cp 2": (2, SPLIT, []),
    "cp 4": (4, ["--context-parallel-size", 4], []),
    "cp 2, tp 2, sequence parallelism": (4, [*SPLIT, "--tensor-model-parallel-size", 2, "--sequence-parallel"], []),
    "cp 2, pp 2": (4, [*SPLIT, *STAGES], STAGES),
}
"""Ranks, options, and options of the run to compare with: Megatron-LM initializes a pipeline stage by its number."""
HIERARCHY = ["--context-parallel-size", 4, "--hierarchical-context-parallel-sizes", 2, 2, "--cp-comm-type", "a2a+p2p"]
MORE_LAYOUTS = {
    "keys gathered": (2, [*SPLIT, "--cp-comm-type", "all_gather"], []),
    "hierarchy of groups": (4, HIERARCHY, []),
    "virtual stages": (4, [*SPLIT, *VIRTUAL], VIRTUAL),
    "recomputation, distributed optimizer": (2, [*SPLIT, *RECOMPUTED, "--use-distributed-optimizer"], []),
}
EVALUATION = re.compile(r"validation loss at iteration \d+(?: on \S+ set)? \| lm loss value: (\S+)")
SEEN = "as the first step showed: 2 x {} by sdpa; {}; "


@pytest.fixture(scope="module")
def checkout(megatron_lm):
    return megatron_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(checkout, corpus):
    """Losses of ten steps and of the evaluations, and the output; each run is made once."""
    kept = {}

    def run_once(*options, ranks=1, what=None, way="-m", **keywords):
        key = (options, ranks, what, way, tuple(keywords.items()))
        if key not in kept:
            watched_script = [ON_CPU / "watched.py", what, checkout / "pretrain_gpt.py"]
            script = watched_script if what else by_way(checkout, way)
            steps, output = train(checkout, corpus, [*script, *PACKED], *options, *EVALUATED, ranks=ranks, **keywords)
            evaluations = [float(loss) for loss in EVALUATION.findall(output)]
            assert evaluations or "--train-iters" in options
            kept[key] = losses(steps) + evaluations, output
        return kept[key]

    return run_once


def check_layout(run, layout, micro_batch_size):
    ranks, options, of_reference = layout
    size = ["--micro-batch-size", micro_batch_size]
    expected, _ = run(*of_reference, *size, ranks=2 if of_reference else 1)
    split, output = run(*options, *size, ranks=ranks)
    assert len(split) >= 10 + 3  # steps, the valid split after 5 and at the end, and the test split
    assert split == pytest.approx(expected, abs=1e-5)
    assert "by sdpa; rotary positions run on through the sequence; " in output


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_rank(run, layout, micro_batch_size):
    check_layout(run, LAYOUTS[layout], micro_batch_size)


@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_losses_are_those_of_one_rank_in_other_layouts_too(run, layout):
    check_layout(run, MORE_LAYOUTS[layout], 2)


FIM = ["--fim-rate", 0.5, "--fim-prefix-token", 520, "--fim-middle-token", 521, "--fim-suffix-token", 522]


def test_all_that_changes_samples_goes_together(run):
    """Fill-in-the-middle, targets only, even sequences and balanced batches."""
    together = [*FIM, "--targets-only", "--even-sequences", "--balance-batches", 2, "--micro-batch-size", 2]
    one, output = run(*together)
    assert "-e-t-fim0.5-1234 (" in output
    two, _ = run(*SPLIT, *together, ranks=2)
    assert two == pytest.approx(one, abs=1e-5)
    plain, _ = run("--micro-batch-size", 2)  # the control
    assert two != pytest.approx(plain, abs=1e-3)


def test_losses_without_per_token_loss(run):
    """Each target counts the same inside a micro-batch, whatever rank holds it."""
    left_out = {"without": ("--calculate-per-token-loss",)}
    one, _ = run(**left_out)
    two, _ = run(*SPLIT, ranks=2, **left_out)
    assert two == pytest.approx(one, abs=1e-5)
    by_share, _ = run(*SPLIT, ranks=2, what="without=forward_step_calc_loss", **left_out)  # the control
    assert by_share != pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize("way", ["install", "enabled"])
def test_other_ways_in_have_the_same_losses(run, checkout, corpus, plugin_enabled, way):
    expected, _ = run(*SPLIT, "--micro-batch-size", 2, ranks=2)
    script = {"install": by_way(checkout, "install"), "enabled": [checkout / "pretrain_gpt.py"]}[way]
    steps, _ = train(checkout, corpus, script, *PACKED, *SPLIT, ranks=2)
    assert losses(steps) == expected[:10]


def test_a_checkpoint_continues_with_as_many_ranks_or_fewer(run, checkout, corpus, tmp_path):
    expected, _ = run(*SPLIT, "--micro-batch-size", 2, ranks=2)
    script = [*by_way(checkout, "-m"), *PACKED]
    saved = ["--save", tmp_path, "--save-interval", 5, "--exit-interval", 5]
    train(checkout, corpus, script, *SPLIT, *saved, ranks=2)
    two, _ = train(checkout, corpus, script, *SPLIT, "--load", tmp_path, ranks=2)
    one, _ = train(checkout, corpus, script, "--load", tmp_path)
    # Megatron-LM prints the mean of the first two losses after a start in place of the second
    for resumed, tolerance in ((losses(two), 0), (losses(one), 1e-5)):
        assert len(resumed) == 5 and resumed[0] == pytest.approx(expected[5], abs=tolerance)
        assert resumed[2:] == pytest.approx(expected[7:10], abs=tolerance)


TRANSFORMER_ENGINE = ["--transformer-impl", "transformer_engine"]


def test_transformer_engine_s_layers_get_attention_inside_documents(run):
    """With local layers in its place; where rows are not split, its own attention stays."""
    one, output = run(*TRANSFORMER_ENGINE)
    assert "2 x TEDotProductAttention; " in output
    two, output = run(*TRANSFORMER_ENGINE, *SPLIT, ranks=2)
    assert two == pytest.approx(one, abs=1e-5)
    assert SEEN.format("DocumentAttention", "rotary positions run on through the sequence") in output


def test_a_hierarchy_of_groups_needs_boundaries_by_rows(run, checkout, corpus):
    """The control of its layout."""
    script = [ON_CPU / "watched.py", "without=GPTModel.forward", checkout / "pretrain_gpt.py", *PACKED]
    status, output = launch(checkout, corpus, script, *HIERARCHY, "--train-iters", 2, ranks=4)
    printed = [float(loss) for _, _, loss, _ in STEP.findall(output)]
    assert status != 0 or printed != pytest.approx(run(ranks=1)[0][:2], abs=1e-5)


HOOKS = {
    "GPTModel.forward": [],
    "GPTModel.__init__": TRANSFORMER_ENGINE,
    "BlendedMegatronDatasetBuilder.__init__": [],
}


@pytest.mark.parametrize("function", HOOKS)
def test_each_hook_is_needed(run, checkout, corpus, function):
    """That of the loss is left out above, and that of rotary angles changes no loss, as they are relative."""
    script = [ON_CPU / "watched.py", f"without={function}", checkout / "pretrain_gpt.py", *PACKED]
    options = [*HOOKS[function], *SPLIT, "--train-iters", 2]
    status, output = launch(checkout, corpus, script, *options, ranks=2)
    printed = [float(loss) for _, _, loss, _ in STEP.findall(output)]
    assert status != 0 or printed != pytest.approx(run(ranks=1)[0][:2], abs=1e-5)


MODELS = {
    "latent attention with YaRN": (
        "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
        "--v-head-dim 16 --rope-type yarn --rotary-scaling-factor 4",
        ("--group-query-attention", "--num-query-groups"),
        "YaRN rotary positions run on through the sequence",
    ),
    "experts": (
        "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-z-loss-coeff 1e-2 "
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-1",
        (),
        "rotary positions run on through the sequence",
    ),
    "learned positions": (
        "--position-embedding-type learned_absolute --global-batch-size 16",
        (),
        "learned positions run on through the sequence",
    ),
}
"""Options, options that are left out, and what is said of positions."""


@pytest.mark.parametrize("model", MODELS)
def test_losses_of_other_models_are_those_of_one_rank(run, model):
    options, without, positions = MODELS[model]
    one, output = run(*options.split(), without=without)
    two, output_of_two = run(*options.split(), *SPLIT, without=without, ranks=2)
    assert two == pytest.approx(one, abs=1e-5)
    assert SEEN.format("DocumentAttention", positions) in output
    assert SEEN.format("DocumentAttention", positions) in output_of_two


def test_positions_that_restart_are_seen(run):
    """The control: what is printed comes from what the model was given."""
    options = [*MODELS["learned positions"][0].split(), "--train-iters", 1, *SPLIT]
    _, output = run(*options, ranks=2, what="restart")
    assert SEEN.format("DocumentAttention", "learned positions restart in each document") in output


def batches_of(output, rank):
    """The samples of each micro-batch that a rank read, as digests."""
    return [batch["digests"] for batch in watched(output) if batch["rank"] == rank]


@pytest.mark.parametrize("num_batches", [1, 5])
def test_balanced_batches_do_not_depend_on_context_parallelism(run, num_batches):
    """Ranks of a context-parallel group read the same samples, and each data-parallel rank those it would read."""
    options = ["--balance-batches", num_batches]
    expected, output = run(*options, ranks=2, what="batches")
    split, output_of_split = run(*options, *SPLIT, ranks=4, what="batches")
    assert split == pytest.approx(expected, abs=1e-5)
    assert "balanced " in output_of_split
    for rank in range(4):
        assert batches_of(output_of_split, rank) == batches_of(output, rank // 2)
    of_two = [batches_of(output, rank) for rank in range(2)]
    assert of_two[0] != of_two[1]
    samples = [digest for pair in zip(*of_two, strict=True) for digests in pair for digest in digests]
    assert len(in_batches(samples, [8] * 10)) == 10 and len(set(samples[:80])) == 80


@pytest.mark.parametrize(
    "options, message",
    [
        (["--mtp-num-layers", 1], "--mtp-num-layers cannot be used"),
        (["--reset-position-ids"], "--reset-position-ids cannot be used"),
        (["--seq-length", 126], "--seq-length 126 must be a multiple of 4"),
        (["--hybrid-layer-pattern", "M*G*"], "--hybrid-layer-pattern with G cannot be used"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_what_cannot_be_combined_is_refused_before_anything_is_built(checkout, corpus, options, message):
    status, output = launch(checkout, corpus, [*by_way(checkout, "-m"), *PACKED], *SPLIT, *options)
    assert status != 0 and message in output
    assert "best-fit packing:" not in output and "[rank0]" not in output
