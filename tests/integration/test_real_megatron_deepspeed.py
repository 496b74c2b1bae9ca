"""Megatron-DeepSpeed's own pretrain_gpt.py with ``--data-impl bfp``, from a real checkout, on the CPU.

MEGATRON_DEEPSPEED_PATH=CHECKOUT bash tests/run.sh --integration
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CHECKOUT = os.environ.get("MEGATRON_DEEPSPEED_PATH")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_DEEPSPEED_PATH does not name a checkout of Megatron-DeepSpeed"),
]

from helpers.datasets import ROOT, write
from helpers.launching import ENVIRONMENT, free_port, make_corpus
from megatron_deepspeed_on_cpu import copy_for_cpu

from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.integrations.megatron_deepspeed.dataset import build_splits

HERE = Path(__file__).parent
STEP = re.compile(r"iteration +(\d+)/ .*consumed samples: +(\d+) .*lm loss: (\S+) ")
EVALUATION = re.compile(r"draw from (\w+) set \| lm loss value: (\S+) ")
WATCHED = re.compile(r"^watched (.*)$", re.MULTILINE)
EOD = 511

SEEN = "best-fit packing: attention inside documents, as the first step showed: "
OPTIONS = """--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --swiglu --normalization rmsnorm --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --global-batch-size 8 --lr 3e-3 --lr-warmup-iters 2 --lr-decay-iters 10
    --min-lr 1e-4 --clip-grad 1.0 --weight-decay 0 --tokenizer-type NullTokenizer --vocab-size 511 --log-interval 1
    --eval-interval 1000 --eval-iters 2 --num-workers 0 --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --distributed-backend gloo --use-cpu-initialization --deepspeed"""
PACKED = ["--data-impl", "bfp"]
ALONG = ["--no-pipeline-parallel"]
FLASH = ["--bf16", "--use-flash-attn-v2"]
ROTARY = ["--use-rotary-position-embeddings"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    copy = tmp_path_factory.mktemp("checkout")
    copy_for_cpu(CHECKOUT, copy)
    script = (copy / "pretrain_gpt.py").read_text()
    (copy / "with_install.py").write_text(f"import megatron_bfp; megatron_bfp.install()\n{script}")
    return copy


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Real documents, all ending in the EOD that NullTokenizer has; blends of them, and many of one token."""
    folder = make_corpus(tmp_path_factory.mktemp("corpus"))
    dataset = IndexedDataset(str(folder / "data_text_document"))
    documents = []
    for start, end in dataset.spans(np.arange(dataset.num_documents)):
        tokens = dataset.tokens(start, end - start).astype(np.int64)
        swapped = np.select([tokens == 0, tokens == EOD], [EOD, 0], tokens)
        documents.append(swapped.tolist())
    write(folder / "text", documents)
    pieces = [document[at : at + 40] for document in documents for at in range(0, min(len(document), 400), 40)]
    for part in range(3):
        write(folder / f"part{part}", pieces[part::3])
    write(folder / "short", [*documents[:3], *([[EOD]] * 3000)])
    return folder


@pytest.fixture
def enabled():
    command = [sys.executable, "-m", "megatron_bfp"]
    subprocess.run([*command, "enable"], check=True, env=ENVIRONMENT)
    yield
    subprocess.run([*command, "disable"], check=True, env=ENVIRONMENT)


def launch(
    checkout,
    corpus,
    *options,
    script=None,
    ranks=1,
    data="text",
    split="90,5,5",
    iters=10,
    micro_batch=2,
    zero=0,
    watched=None,
    plugin=True,
):
    """Exit status and output of ``deepspeed``. ``script`` is a list that may begin with ``--module``."""
    script = script or ["--module", "megatron_bfp", checkout / "pretrain_gpt.py"]
    environment = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    paths = [str(checkout), *([str(HERE / "flash_attn_on_cpu")] if "--use-flash-attn-v2" in options else [])]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *([str(ROOT)] if plugin else [])])
    if watched:
        environment |= {"WATCHED": watched, "WATCHED_SCRIPT": str(checkout / "pretrain_gpt.py")}
        script = [HERE / "megatron_deepspeed_watched.py"]
    settings = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero},
        "bf16": {"enabled": "--bf16" in options},
    }
    (corpus / "deepspeed.json").write_text(json.dumps(settings))
    command = ["deepspeed", "--num_gpus", ranks, "--master_port", free_port(), *script, *options, *OPTIONS.split()]
    command += ["--data-path", *data.split(), "--split", split, "--train-iters", iters]
    command += ["--micro-batch-size", micro_batch, "--zero-stage", zero, "--deepspeed_config", "deepspeed.json"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=280, env=environment, cwd=corpus
    )
    return done.returncode, done.stdout + done.stderr


def train(checkout, corpus, *options, **keywords):
    """The printed (consumed samples, loss) of each iteration, those of the evaluations, and the output."""
    status, output = launch(checkout, corpus, *options, **keywords)
    assert status == 0, output[-5000:]
    steps = {int(iteration): values for iteration, *values in STEP.findall(output)}
    assert steps
    return steps | {f"{name}": ("0", loss) for name, loss in EVALUATION.findall(output)}, output


def losses(steps):
    return [float(loss) for _, loss in steps.values()]


def watched(output):
    return [json.loads(line) for line in WATCHED.findall(output)]


@pytest.fixture(scope="module")
def by_module(checkout, corpus):
    """The run that others are compared with."""
    return train(checkout, corpus, *PACKED, *ALONG)


def test_three_ways_in_have_the_same_losses(checkout, corpus, by_module, enabled):
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
def test_three_ways_in_with_two_ranks(checkout, corpus, enabled, layout):
    first, second, third = (
        train(checkout, corpus, *PACKED, *layout, ranks=2, script=script)[0]
        for script in (None, [checkout / "with_install.py"], [checkout / "pretrain_gpt.py"])
    )
    assert list(first) == [*range(1, 11), "validation", "test"]
    assert first == second == third


def test_without_the_flag_nothing_changes(checkout, corpus, enabled):
    stock = [checkout / "pretrain_gpt.py"]
    untouched, _ = train(checkout, corpus, *ALONG, script=stock, plugin=False)
    assert len(untouched) == 12
    assert untouched == train(checkout, corpus, "--data-impl", "mmap", *ALONG, script=stock)[0]
    assert untouched == train(checkout, corpus, *ALONG)[0]


@pytest.mark.parametrize(
    "options, ranks, tolerance",
    [
        ([], 1, 2e-6),
        (["--reset-position-ids", "--eod-mask-loss"], 1, 2e-6),
        (["--tensor-model-parallel-size", "2"], 2, 2e-6),
        (["--max-documents-per-sequence", "2"], 2, 2e-6),
        (FLASH, 1, 2e-4),
    ],
    ids=["softmax", "reset positions, mask EOD", "tp 2", "dp 2, at most 2 documents", "flash-attn 2"],
)
def test_the_first_loss_is_that_of_the_chunks_alone(checkout, corpus, options, ranks, tolerance):
    steps, output = train(checkout, corpus, *PACKED, *ALONG, *options, ranks=ranks, iters=1, watched="alone")
    found = watched(output)
    assert len(found) == 4 * (2 if "--tensor-model-parallel-size" in options else 1)
    means = [part["alone"] / part["targets"] for part in found]
    assert losses(steps)[0] == pytest.approx(sum(means) / len(means), rel=tolerance)


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
        of_rank = [[found["digests"] for found in watched(output) if found["rank"] == rank] for rank in range(ranks)]
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


def test_a_blend_with_prebuilt_indexes_is_exact(checkout, corpus):
    prefixes, weights, split = [f"part{part}" for part in range(3)], [0.5, 0.2, 0.3], "969,30,1"
    command = [sys.executable, ROOT / "tools/preprocess_bfp.py", "--indexed", *prefixes, "--seq-length", "128"]
    subprocess.run([*map(str, command), "--split", split], check=True, cwd=corpus, env=ENVIRONMENT)
    data = " ".join(f"{weight} {prefix}" for weight, prefix in zip(weights, prefixes))
    _, output = train(checkout, corpus, *PACKED, *ALONG, data=data, split=split, watched="batches")
    assert output.count("3 indexes (0 built, 3 opened)") == 3
    found = [digest for line in watched(output) for digest in line["digests"]][:80]
    parts = [build_splits(str(corpus / prefix), split, [100] * 3, 128, 1234)[0] for prefix in prefixes]
    assert found == [digest_of(part, place) for part, place in blended(parts, weights, 80)]


def digest_of(dataset, place):
    import hashlib

    return hashlib.sha256(dataset[place]["text"].tobytes()).hexdigest()


def blended(datasets, weights, size):
    """Megatron's blending: each sample is of the dataset that is furthest behind its weight."""
    taken = [0] * len(datasets)
    for sample in range(size):
        errors = [weight * max(sample, 1) - count for weight, count in zip(weights, taken)]
        behind = errors.index(max(errors))
        yield datasets[behind], taken[behind]
        taken[behind] += 1


def test_separate_data_paths_and_the_cache(checkout, corpus, tmp_path):
    for part in range(3):
        for suffix in (".bin", ".idx"):
            shutil.copy(corpus / f"part{part}{suffix}", tmp_path)
    options = ["--data-cache-path", tmp_path / "cache", "--train-data-path", 0.5, tmp_path / "part0", 0.5]
    options += [tmp_path / "part1", "--valid-data-path", tmp_path / "part2"]
    status, output = launch(checkout, corpus, *PACKED, *ALONG, *options, data="", iters=2)
    assert status == 0, output[-5000:]
    assert "best-fit packing: train: 2 indexes (2 built, 0 opened)" in output
    assert f"best-fit packing: valid: {tmp_path}/part2.bfp/s128-d0-" in output


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
            found = STEP.findall(output), re.findall("best-fit packing.*", output)
            if watched:
                return found
            whole[name] = found
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
    learned, _ = train(checkout, corpus, *PACKED, *ALONG, **options)
    assert losses(learned)[1] != pytest.approx(losses(steps)[1], abs=1e-4)
    piped, _ = train(checkout, corpus, *PACKED, *ROTARY, **options)
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
    two, _ = train(checkout, corpus, *PACKED, *ALONG, *FLASH, *ROTARY, *ulysses, ranks=2, **options)
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)


@pytest.mark.parametrize("script", [None, "with_install.py"])
def test_fault_A07_two_values_of_data_impl_are_refused_in_megatron_deepspeed(checkout, corpus, script):
    script = script and [checkout / script]
    status, output = launch(checkout, corpus, *PACKED, "--data-impl", "mmap", *ALONG, script=script, ranks=2)
    assert status != 0 and not STEP.findall(output)
    assert output.count("--data-impl bfp and --data-impl mmap are both on the command line") == 1


@pytest.mark.parametrize(
    "data, message",
    [
        (
            " ".join(f"1 part{number % 3}" for number in range(255)),
            "a blend of 255 corpora, Megatron-DeepSpeed blends 254",
        ),
        ("0.5 part0 0 part1", "a blend's weight of 0.0 for part1"),
        ("0.5 part0 nan part1", "a blend's weight of nan for part1"),
        ("part0 part1", "give one prefix, or a weight before each prefix"),
    ],
    ids=["255", "0", "nan", "none"],
)
def test_fault_B04_a_blend_that_cannot_be_is_one_line_in_megatron_deepspeed(checkout, corpus, data, message):
    status, output = launch(
        checkout, corpus, *PACKED, *ALONG, script=[checkout / "with_install.py"], data=data, ranks=2
    )
    assert status != 0 and output.count(message) == 1 and "building" not in output and "Traceback" not in output


def test_fault_A13_an_id_outside_the_vocabulary_is_one_line_in_megatron_deepspeed(checkout, corpus):
    write(corpus / "wide", [[*range(1, 100)] for _ in range(20)] + [[5, 512, 7]])  # the embedding has 512 rows
    status, output = launch(checkout, corpus, *PACKED, *ALONG, ranks=2, data="wide", split="1,0,0")
    assert status != 0 and not STEP.findall(output)
    assert output.count("wide.bin: document 20 holds the token id 512, the model's vocabulary ends at 511") == 1
