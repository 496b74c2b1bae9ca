"""Megatron-LM's own pretrain_gpt.py with ``--data-impl bfp``, from a real checkout, on the CPU.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CHECKOUT = os.environ.get("MEGATRON_LM_PATH")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH does not name a checkout of Megatron-LM"),
]

from helpers.launching import ENVIRONMENT, free_port, make_corpus

from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, document_range, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex

ON_CPU = Path(__file__).parent / "megatron_lm_on_cpu"
STEP = re.compile(r"iteration +(\d+)/ .*consumed samples: +(\d+) .*lm loss: (\S+) .*grad norm: (\S+) ")
WATCHED = re.compile(r"^watched (.*)$", re.MULTILINE)

MODEL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 128 --max-position-embeddings 128 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 3e-3 --lr-warmup-iters 2 --lr-decay-iters 10
    --min-lr 1e-4 --seed 1234 --tokenizer-type NullTokenizer --vocab-size 512
    --make-vocab-size-divisible-by 300 --calculate-per-token-loss
    --log-interval 1 --eval-interval 1000 --eval-iters 2 --num-workers 0 --ckpt-format torch"""
FOR_CPU = """--transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-masked-softmax-fusion --rerun-mode disabled"""
CPU_LAYERS = ["--spec", "layer_spec", "packed"]
SEEN = "best-fit packing: attention inside documents, as the first step showed: "


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy: Megatron-LM compiles into its own folder."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in os.listdir(CHECKOUT):
        source = os.path.join(CHECKOUT, name)
        if name == "megatron":
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        elif name.endswith(".py"):
            shutil.copy(source, copy)
    script = (copy / "pretrain_gpt.py").read_text()
    (copy / "with_install.py").write_text(f"import megatron_bfp; megatron_bfp.install()\n{script}")
    return copy


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def enabled():
    command = [sys.executable, "-m", "megatron_bfp"]
    subprocess.run([*command, "enable"], check=True, env=ENVIRONMENT)
    yield
    subprocess.run([*command, "disable"], check=True, env=ENVIRONMENT)


def launch(checkout, corpus, script, *options, ranks=1, data="data_text_document", split="90,5,5"):
    """Exit status and output of torchrun with ``script``, a list that may begin with ``-m``."""
    environment = ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NO_VCS_VERSION": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ON_CPU), str(checkout), environment["PYTHONPATH"]])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), *map(str, script), *MODEL.split(), *FOR_CPU.split()]
    command += (["--data-path", *data.split(), "--split", split] if split else []) + list(map(str, options))
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=corpus)
    return done.returncode, done.stdout + done.stderr


def train(checkout, corpus, script, *options, **keywords):
    """The printed (consumed samples, loss, gradient norm) of each iteration, and the output."""
    status, output = launch(checkout, corpus, script, *options, **keywords)
    assert status == 0, output[-5000:]
    return {int(iteration): values for iteration, *values in STEP.findall(output)}, output


def watched(output):
    return [json.loads(line) for line in WATCHED.findall(output)]


def losses(steps):
    return [float(loss) for _, loss, _ in steps.values()]


@pytest.fixture(scope="module")
def by_module(checkout, corpus):
    """The run that others are compared with."""
    return train(checkout, corpus, ["-m", "megatron_bfp", checkout / "pretrain_gpt.py"], "--data-impl", "bfp")


def test_three_ways_in_have_the_same_losses(checkout, corpus, by_module, enabled):
    steps, output = by_module
    assert len(steps) == 10 and losses(steps)[-1] < losses(steps)[0] - 0.3
    assert "best-fit packing: train: data_text_document.bfp/s128-d0-" in output
    assert train(checkout, corpus, [checkout / "with_install.py"], "--data-impl", "bfp")[0] == steps
    assert train(checkout, corpus, [checkout / "pretrain_gpt.py"], "--data-impl=bfp")[0] == steps


@pytest.mark.parametrize("layout", [[], ["--tensor-model-parallel-size", 2]], ids=["dp 2", "tp 2"])
def test_three_ways_in_with_two_ranks(checkout, corpus, enabled, layout):
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


def test_without_the_flag_nothing_changes(checkout, corpus, enabled):
    masking = ["--dataloader-inter-document-masking", *CPU_LAYERS]  # the layers that run on the CPU need boundaries
    enabled_only, _ = train(checkout, corpus, [checkout / "pretrain_gpt.py"], *masking)
    subprocess.run([sys.executable, "-m", "megatron_bfp", "disable"], check=True, env=ENVIRONMENT)
    untouched, _ = train(checkout, corpus, [checkout / "pretrain_gpt.py"], *masking)
    by_module = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py"]
    assert len(untouched) == 10
    assert untouched == enabled_only
    assert untouched == train(checkout, corpus, by_module, *masking)[0]
    assert untouched == train(checkout, corpus, by_module, *masking, "--data-impl", "mmap")[0]


@pytest.mark.parametrize("options", [[], ["--reset-position-ids", "--eod-mask-loss"]], ids=["plain", "reset"])
def test_the_first_loss_is_that_of_the_chunks_alone(checkout, corpus, options):
    script = [ON_CPU / "watched.py", "alone", checkout / "pretrain_gpt.py"]
    steps, output = train(checkout, corpus, script, "--data-impl", "bfp", "--train-iters", 1, *options)
    found = watched(output)
    assert len(found) == 4
    targets = sum(batch["targets"] for batch in found)
    for positions in ("alone", "unchanged"):
        assert losses(steps)[0] == pytest.approx(sum(batch[positions] for batch in found) / targets, rel=1e-6)


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
        of_rank = [[found["digests"] for found in watched(output) if found["rank"] == rank] for rank in range(ranks)]
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
    found = {int(iteration): values for iteration, *values in STEP.findall(output)}
    if function == "build":
        assert "best-fit packing: train" not in output
    elif function == "train_step":
        assert "best-fit packing: train" in output and SEEN not in output
    else:
        assert status != 0 or found != {1: by_module[0][1], 2: by_module[0][2]}


@pytest.mark.parametrize(
    "options, message",
    [
        (["--mock-data"], "--mock-data cannot be used"),
        (["--hybrid-layer-pattern", "**"], "--hybrid-layer-pattern cannot be used"),
        (["--dataloader-type", "cyclic"], "--dataloader-type cyclic cannot be used"),
        (["--context-parallel-size", 2], "--context-parallel-size above 1 cannot be used"),
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
        (["--overlap-moe-expert-parallel-comm"], "--overlap-moe-expert-parallel-comm cannot be used"),
        (["--hybrid-override-pattern", "M*M*"], "--hybrid-override-pattern cannot be used"),
        (["--cuda-graph-impl", "local"], "--cuda-graph-impl local cannot be used"),
        (["--cuda-graph-impl", "transformer_engine"], "--cuda-graph-impl transformer_engine cannot be used"),
        (["--cuda-graph-impl", "full_iteration"], "--cuda-graph-impl full_iteration cannot be used"),
        (["--cuda-graph-impl", "local", "--cuda-graph-modules", "mlp", "attn"], "--cuda-graph-impl local cannot"),
        (["--cuda-graph-scope", "full_iteration"], "--cuda-graph-scope full_iteration cannot be used"),
        (["--enable-cuda-graph"], "--enable-cuda-graph cannot be used"),
        (["--external-cuda-graph"], "--external-cuda-graph cannot be used"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_fault_A01_fault_A08_fault_B11_what_loses_boundaries_is_refused(checkout, corpus, options, message):
    """In one line, before anything is built."""
    script = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    status, output = launch(checkout, corpus, script, *options)
    assert status != 0 and message in output
    assert "best-fit packing:" not in output and "[rank0]" not in output


OVERLAP = """--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
    --bf16"""


@pytest.mark.parametrize("spec", ["like_transformer_engine", "packed"])
def test_fault_A01_a_schedule_that_loses_boundaries_stops_in_the_first_step(checkout, corpus, spec):
    """With the refusal by name switched off; the attention of one spec goes on without boundaries, that of the other
    stops by itself."""
    script = [ON_CPU / "watched.py", "accept=overlap_moe_expert_parallel_comm", checkout / "pretrain_gpt.py"]
    script += ["--data-impl", "bfp", "--spec", "layer_spec", spec, *OVERLAP.split()]
    status, output = launch(checkout, corpus, script, "--overlap-moe-expert-parallel-comm", ranks=2)
    assert status != 0 and "got no document boundaries" in output and "before the first update" in output
    assert not STEP.findall(output) and SEEN not in output
    steps, output = train(checkout, corpus, script, "--train-iters", 1, ranks=2)
    assert len(steps) == 1 and SEEN in output


def test_fault_A01_every_pipeline_stage_is_looked_at(checkout, corpus):
    script = [ON_CPU / "watched.py", "lose=1", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    options = ["--pipeline-model-parallel-size", 2, "--spec", "layer_spec", "like_transformer_engine"]
    status, output = launch(checkout, corpus, script, *options, ranks=2)
    assert status != 0 and "rank 1: " in output and "got no document boundaries" in output
    assert not STEP.findall(output)


def test_fault_B02_local_layers_train_without_a_spec(by_module):
    steps, output = by_module  # MODEL and FOR_CPU name none
    assert len(steps) == 10
    assert f"{SEEN}2 x DocumentAttention by sdpa; rotary positions restart in each document; " in output


@pytest.mark.parametrize(
    "options, positions",
    [
        (["--position-embedding-type", "learned_absolute"], "learned positions run on through the sequence"),
        (
            ["--position-embedding-type", "learned_absolute", "--reset-position-ids"],
            "learned positions restart in each document",
        ),
        (["--position-embedding-type", "none"], "no positions"),
        (["--no-rope-freq", 2], "rotary positions restart in each document (1 of 2 layers)"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_fault_A14_what_is_printed_of_positions_is_true(checkout, corpus, options, positions):
    script = ["-m", "megatron_bfp", checkout / "pretrain_gpt.py", "--data-impl", "bfp", "--train-iters", 1]
    many = ["--global-batch-size", 64]  # some rows hold several documents
    _, output = train(checkout, corpus, script, *many, *options)
    assert f"{SEEN}2 x DocumentAttention by sdpa; {positions}; " in output


def write_corpus(prefix, lengths, seed):
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
        writer.add(rng.integers(1, 500, int(lengths.sum()), dtype=np.uint16), lengths)
        writer.finalize()


def prebuild(prefix, split):
    dataset = IndexedDataset(str(prefix))
    for bounds in split:
        key = IndexKey(128, *document_range(bounds, dataset.num_documents))
        build(dataset, key, index_directory(dataset.prefix))


SPLIT_969 = [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]


def test_a_blend_of_three_is_exact(checkout, tmp_path):
    rng = np.random.default_rng(3)
    for number in range(3):
        write_corpus(tmp_path / f"part{number}", rng.integers(1, 300, 2000), number)
        prebuild(tmp_path / f"part{number}", SPLIT_969)
    script = [ON_CPU / "watched.py", "datasets", checkout / "pretrain_gpt.py"]
    status, output = launch(
        checkout, tmp_path, script, "--data-impl", "bfp", data="0.5 part0 0.3 part1 0.2 part2", split="969,30,1"
    )
    assert status == 0, output[-5000:]
    (found,) = watched(output)
    names = [[f"s128-d{first}-{end}" for _ in range(3)] for first, end in itertools.pairwise([0, 1938, 1998, 2000])]
    for split, expected in zip(found["splits"], names, strict=True):
        assert [name for _, name, _ in split["indexes"]] == expected
        assert not any(was_built for _, _, was_built in split["indexes"])
        assert split["same_as_in_part"] and all(split["same_as_in_part"])
    shares = [found["splits"][0]["part_of_sample"].count(part) for part in range(3)]
    assert shares == pytest.approx([40, 24, 16], abs=1)
    assert "3 indexes (0 built, 3 opened)" in output


def test_options_of_data_keep_their_meaning(checkout, tmp_path):
    rng = np.random.default_rng(3)
    for number in range(3):
        write_corpus(tmp_path / f"part{number}", rng.integers(1, 300, 100), number)
    splits = {"train": ["0.5", "part0", "0.5", "part1"], "valid": ["part2", "part1"], "test": ["part2"]}
    (tmp_path / "splits.json").write_text(json.dumps(splits))
    script = [ON_CPU / "watched.py", "datasets", checkout / "pretrain_gpt.py", "--data-impl", "bfp"]
    options = ["--per-split-data-args-path", "splits.json", "--full-validation", "--multiple-validation-sets"]
    options += ["--data-cache-path", "cache", "--max-documents-per-sequence", 3]

    def built(*more):
        _, output = train(checkout, tmp_path, script, *options, *more, split=None)
        return watched(output)[0]["splits"], output

    (train_split, valid_split, test_split), output = built()
    assert "train: 2 indexes (2 built, 0 opened)" in output
    assert [index[:2] for index in train_split["indexes"]] == [[f"part{n}", "s128-d0-100-m3"] for n in (0, 1)]
    assert [part["indexes"][0][0] for part in valid_split] == ["part2", "part1"]
    for part in valid_split:  # all of it, once
        index = SequenceIndex(tmp_path / f"{part['indexes'][0][0]}.bfp/s128-d0-100-m3", dataset_of(part, tmp_path))
        assert part["length"] == len(index)
    assert test_split["indexes"][0][0] == "part2"
    again, output = built("--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap")
    assert "train: 2 indexes (0 built, 2 opened)" in output
    assert again[0]["part_of_sample"] == train_split["part_of_sample"] and all(again[0]["same_as_in_part"])


def dataset_of(part, folder):
    return IndexedDataset(str(folder / part["indexes"][0][0]))


def test_2500_corpora_are_ready_in_30_seconds(checkout, tmp_path):
    write_corpus(tmp_path / "part", np.random.default_rng(5).integers(1, 300, 2000), 5)
    prebuild(tmp_path / "part", SPLIT_969)
    for number in range(2500):
        for ending in (".bin", ".idx"):
            os.link(tmp_path / f"part{ending}", tmp_path / f"part{number}{ending}")
        shutil.copytree(tmp_path / "part.bfp", tmp_path / f"part{number}.bfp", copy_function=os.link)
    arguments = tmp_path / "data_args.txt"
    arguments.write_text(" ".join(f"1.0 part{number}" for number in range(2500)))
    script = [ON_CPU / "watched.py", "datasets", checkout / "pretrain_gpt.py", "--data-args-path", arguments]
    options = ["--data-impl", "bfp", "--global-batch-size", 1000, "--num-dataset-builder-threads", 2]
    status, output = launch(checkout, tmp_path, script, *options, "--split", "969,30,1", split=None)
    assert status == 0, output[-5000:]
    (found,) = watched(output)
    print(f"2,500 corpora, three splits: {found['seconds']:.1f} s")
    assert "2,500 indexes (0 built, 2,500 opened)" in output
    assert found["seconds"] < 30


def by_way(checkout, way):
    """The script of a way in, as ``launch`` takes it."""
    return {"-m": ["-m", "megatron_bfp", checkout / "pretrain_gpt.py"], "install": [checkout / "with_install.py"]}[way]


@pytest.mark.parametrize("way", ["-m", "install"])
def test_fault_A07_two_values_of_data_impl_are_refused_in_megatron_lm(checkout, corpus, way):
    status, output = launch(checkout, corpus, by_way(checkout, way), "--data-impl", "bfp", "--data-impl=mmap", ranks=2)
    assert status != 0 and not STEP.findall(output)
    assert output.count("--data-impl bfp and --data-impl mmap are both on the command line") == 1
    status, output = launch(
        checkout, corpus, by_way(checkout, way), "--data-impl", "bfp", "--data-impl=bfp", "--train-iters", 1
    )
    assert status == 0 and len(STEP.findall(output)) == 1


def test_fault_A13_an_id_outside_the_vocabulary_stops_two_ranks_in_one_line(checkout, corpus):
    options = ["--data-impl", "bfp", "--tensor-model-parallel-size", 2, "--vocab-size", 290]
    options += ["--make-vocab-size-divisible-by", 1]
    status, output = launch(checkout, corpus, by_way(checkout, "install"), *options, ranks=2)
    assert status != 0 and not STEP.findall(output)
    assert len(re.findall(r"data_text_document.bin: document \d+ holds the token id \d+, the model's", output)) == 1
    assert "[rank" not in output


def test_fault_B01_an_evaluation_of_larger_micro_batches_runs_through_two_stages(checkout, corpus):
    script = by_way(checkout, "-m")
    options = ["--data-impl", "bfp", "--pipeline-model-parallel-size", 2, "--train-iters", 2, "--micro-batch-size", 1]
    steps, output = train(checkout, corpus, script, *options, "--eval-micro-batch-size", 2, ranks=2)
    evaluations = re.findall(r"loss at iteration 2 on (\S+) set \| lm loss value: (\S+)", output)
    assert len(steps) == 2 and [name for name, _ in evaluations] == ["validation", "test"]
    alike, output = train(checkout, corpus, script, *options, ranks=2)
    assert losses(alike) == pytest.approx(losses(steps), abs=1e-5)
    for (_, found), (_, expected) in zip(
        evaluations, re.findall(r"loss at iteration 2 on (\S+) set \| lm loss value: (\S+)", output), strict=True
    ):
        assert float(found) == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize(
    "split, data, options, evaluated",
    [
        ("99.99,0.005,0.005", "data_text_document", [], []),
        ("100,0,0", "data_text_document", ["--tensor-model-parallel-size", 2], []),
        ("90,10,0", "data_text_document", [], ["validation"]),
        ("90,5,5", "0.5 data_text_document 0.5 data_text_document", ["--eval-iters", 0], []),
        ("90,5,5", "data_text_document", ["--eval-iters", 0], []),
    ],
    ids=["too small", "no share, tp 2", "no test", "eval iters 0, blend", "eval iters 0"],
)
def test_fault_B03_an_empty_split_is_none_and_not_evaluated(checkout, corpus, split, data, options, evaluated):
    script, options = by_way(checkout, "-m"), ["--data-impl", "bfp", "--train-iters", 2, *options]
    ranks = 2 if "--tensor-model-parallel-size" in options else 1
    steps, output = train(checkout, corpus, script, *options, ranks=ranks, data=data, split=split)
    assert len(steps) == 2 and re.findall(r"loss at iteration 2 on (\S+) set", output) == evaluated
    assert output.count("split has no tokens") == (2 if split.startswith("99.99") else 0)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_fault_B04_a_weight_that_is_no_share_is_one_line_in_megatron_lm(checkout, corpus, weight):
    data = f"0.5 data_text_document {weight} data_text_document"
    status, output = launch(checkout, corpus, by_way(checkout, "install"), "--data-impl", "bfp", data=data, ranks=2)
    assert status != 0 and output.count(f"a blend's weight of {float(weight)} for data_text_document: give a") == 1
    assert "building" not in output and "[rank" not in output
