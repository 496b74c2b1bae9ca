"""Options of Megatron-LM that concern layers, positions, parallelism and samples, with its own pretrain_gpt.py from a
real checkout, on the CPU.

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
    samples_in_order,
    train,
    watched,
)

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]
PACKED = ["--data-impl", "bfp", "--train-iters", 3]
MEGATRON_FSDP = """--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --use-distributed-optimizer --ckpt-format fsdp_dtensor""".split()
TORCH_FSDP = ["--use-torch-fsdp2", "--ckpt-format", "torch_dist"]
PER_TOKEN = "--calculate-per-token-loss"


@pytest.fixture(scope="module")
def checkout(megatron_lm):
    return megatron_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def plain(checkout, corpus):
    """Runs without anything special; returns the steps, each once."""
    known = {}

    def run(*options, ranks=1, without=()):
        key = (*options, ranks, without)
        if key not in known:
            script = by_way(checkout, "-m")
            known[key], _ = train(checkout, corpus, script, *PACKED, *options, ranks=ranks, without=without)
        return known[key]

    return run


def norms(steps):
    return [float(norm) for *_, norm in steps.values()]


@pytest.mark.parametrize(
    "options, without",
    [
        (TORCH_FSDP, (PER_TOKEN,)),
        (MEGATRON_FSDP, ()),  # without it gloo would have to divide gradients
    ],
    ids=["torch", "Megatron"],
)
def test_fully_sharded_ranks_train_as_whole_ones(checkout, corpus, plain, options, without):
    given = {"ranks": 2, "without": without}
    steps, output = train(checkout, corpus, by_way(checkout, "-m"), *PACKED, *options, **given)
    assert "2 x DocumentAttention by sdpa" in output
    whole = plain(**given)
    assert losses(steps) == pytest.approx(losses(whole), abs=1e-5)
    assert norms(steps) == pytest.approx(norms(whole), abs=2e-3)
    assert abs(losses(plain("--max-documents-per-sequence", 1, **given))[0] - losses(whole)[0]) > 1e-4  # the control


def test_gradients_of_torchs_sharding_are_not_divided_by_tokens(plain):
    """A fault of Megatron-LM, with or without packing; the documentation says to leave out the option."""
    sharded, whole = (plain(*options, "--train-iters", 1, ranks=2) for options in (TORCH_FSDP, []))
    assert losses(sharded) == pytest.approx(losses(whole), abs=1e-5)
    assert norms(sharded)[0] > 100 * norms(whole)[0]


def test_control_boundaries_that_a_sharded_model_does_not_hand_on_are_missed(checkout, corpus):
    script = [ON_CPU / "watched.py", "lose=1", checkout / "pretrain_gpt.py"]
    status, output = launch(checkout, corpus, script, *PACKED, *MEGATRON_FSDP, ranks=2)
    assert status != 0 and not STEP.findall(output)
    assert "boundaries" in output


def test_sequence_parallel_ranks_train_as_one(checkout, corpus, plain):
    halves = ["--tensor-model-parallel-size", 2]
    whole = losses(plain(*halves, ranks=2))
    assert losses(plain(*halves, "--sequence-parallel", ranks=2)) == pytest.approx(whole, abs=1e-5)
    assert abs(losses(plain(*halves, "--max-documents-per-sequence", 1, ranks=2))[0] - whole[0]) > 1e-4  # the control


@pytest.mark.parametrize(
    "options",
    [
        ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1],
        ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"],
        ["--reset-attention-mask", "--no-mmap-bin-files"],
    ],
    ids=["full recomputation", "selective recomputation", "masks and maps"],
)
def test_losses_stay_the_same(plain, options):
    assert plain(*options) == plain()
    assert plain("--max-documents-per-sequence", 1) != plain()  # the control


OF_LAYERS = {
    "rotary": ["--rotary-interleaved", "--rotary-base", 500, "--rotary-seq-len-interpolation-factor", 2],
    "scaled": ["--use-rope-scaling", "--rope-scaling-factor", 4, "--qk-layernorm", "--attention-output-gate"],
}
"""Options of attention and its positions that do not mix positions themselves."""


@pytest.mark.parametrize("kind", OF_LAYERS)
def test_options_of_attention_leave_documents_alone(checkout, corpus, plain, kind):
    script = [ON_CPU / "documents_alone.py", checkout / "pretrain_gpt.py"]
    large = ["--init-method-std", 0.2, "--train-iters", 1]  # so that attention matters from the first step on
    steps, output = train(checkout, corpus, script, *PACKED, *large, *OF_LAYERS[kind])
    batches = watched(output)
    targets = sum(batch["targets"] for batch in batches)
    alone, as_one = (sum(batch[name][0] for batch in batches) / targets for name in ("alone", "as_one"))
    assert losses(steps)[0] == pytest.approx(alone, abs=1e-5)
    assert abs(as_one - alone) > 1e-3  # the control: attention that crosses documents has another loss
    assert abs(losses(steps)[0] - losses(plain(*large))[0]) > 1e-4  # the options do something


def test_iterations_that_are_skipped_take_their_samples(checkout, corpus):
    def samples(*options):
        script = [ON_CPU / "watched.py", "batches", checkout / "pretrain_gpt.py"]
        _, output = train(checkout, corpus, script, *PACKED, *options, "--eval-iters", 0)
        return samples_in_order(output)

    every = samples()
    assert len(set(every)) == 24
    assert samples("--iterations-to-skip", 2) == every[:8] + every[16:]


def test_multimodal_positions_are_refused_by_name(checkout, corpus):
    options = ["--position-embedding-type", "mrope", "--mrope-section", 4, 2, 2]
    status, output = launch(checkout, corpus, by_way(checkout, "-m"), *PACKED, *options)
    assert status != 0 and not STEP.findall(output)
    assert "--position-embedding-type mrope cannot be used with --data-impl bfp: " in output
