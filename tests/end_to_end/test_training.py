"""Raw documents to a trained model, on two CPU ranks with gloo.

The reference runs under the real launcher, ``deepspeed``. So do the slow tests and the first half of the run that is
resumed. The others start their ranks without it, which takes a third of the time: ``launcher="ranks"``.
"""

import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

from helpers.launching import ENVIRONMENT, as_numbers, launch, make_corpus, steps, together, train

launch_ranks = partial(launch, launcher="ranks")
train_ranks = partial(train, launcher="ranks")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def reference(corpus):
    return train(corpus, "--zero-stage", 1, "--num-workers", 2)


def test_the_loss_falls_and_samples_are_counted(reference):
    losses = [float(loss) for loss, _, _ in reference.values()]
    assert losses[0] == pytest.approx(6.2, abs=0.3) and losses[-1] < losses[0] - 0.3  # ln 512 = 6.24
    assert [int(consumed) for _, _, consumed in reference.values()] == [8, 16, 24, 32, 40, 48]


@pytest.fixture(scope="module")
def halves(corpus, tmp_path_factory):
    """A run that stops after two of six steps and goes on, on a copy of the dataset without indexes: the steps of both
    halves, what a resumption with other options says, and the indexes that are there before and after."""
    folder = tmp_path_factory.mktemp("halves")
    data = copy_dataset(corpus, folder)
    run = ("--data-path", data, "--zero-stage", 1, "--save", folder / "checkpoints", "--load")
    before = glob.glob(f"{data}.bfp/*")
    first = train(corpus, *run, folder / "checkpoints", "--exit-interval", 2)
    shutil.copytree(folder / "checkpoints", folder / "copied")
    refused, second = together(
        partial(launch_ranks, corpus, *run, folder / "copied", "--global-batch-size", 4),
        partial(train_ranks, corpus, *run, folder / "checkpoints"),
    )
    return first, second, refused, (before, glob.glob(f"{data}.bfp/*"))


def test_a_resumed_run_equals_an_uninterrupted_one(halves, reference):
    first, second, _, _ = halves
    assert list(first) == [1, 2] and list(second) == [3, 4, 5, 6]
    assert first | second == reference


def test_a_resumption_with_another_global_batch_size_is_refused(halves):
    status, output = halves[2]
    assert status == 2 and "saved with --global-batch-size 8, not 4" in output


def test_a_missing_index_is_built_by_the_trainer(halves, reference):
    first, second, _, (before, after) = halves
    assert before == [] and [path for path in after if os.path.basename(path).startswith("s128-d0-")]
    assert first | second == reference  # whose index the preprocessing built


@pytest.mark.slow
@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_kind_of_run_resumes_exactly(corpus, tmp_path, zero_stage, tensor_parallel, precision):
    kind = ["--zero-stage", zero_stage, "--tensor-model-parallel-size", tensor_parallel, *precision]
    kind += ["--micro-batch-size", 1]
    checkpoints = ("--save", tmp_path / "checkpoints", "--load", tmp_path / "checkpoints")
    whole = train(corpus, *kind)
    halves = train(corpus, *kind, *checkpoints, "--exit-interval", 4) | train(corpus, *kind, *checkpoints)
    assert len(whole) == 6 and halves == whole


@pytest.fixture(scope="module")
def one_rank_and_two(corpus, tmp_path_factory):
    """Ranks -> output and JSON log of a run, with all of each rank's rows in one micro-batch or in many, evaluated. One
    rank trains in the order without balancing."""
    folder = tmp_path_factory.mktemp("logs")

    def run(ranks, *options):
        return launch_ranks(corpus, *options, "--eval-interval", 2, "--json-log", folder / str(ranks), ranks=ranks)

    alone, two = together(
        partial(run, 1, "--micro-batch-size", 8, "--zero-stage", 0, "--balance-batches", 0),
        partial(run, 2, "--micro-batch-size", 1, "--zero-stage", 3),
    )
    assert (alone[0], two[0]) == (0, 0), alone[1][-2500:] + two[1][-2500:]
    return {ranks: (output, (folder / str(ranks)).read_text()) for ranks, (_, output) in {1: alone, 2: two}.items()}


def test_the_loss_is_the_mean_over_the_targets_of_the_global_batch(one_rank_and_two, reference):
    """Ranks, micro-batch size and accumulation change how a global batch is cut up, not what it teaches."""
    for output, _ in one_rank_and_two.values():
        for (loss, norm), (other_loss, other_norm) in zip(
            as_numbers(reference), as_numbers(steps(output)), strict=True
        ):
            assert other_loss == pytest.approx(loss, abs=2e-4)
            assert other_norm == pytest.approx(norm, rel=2e-3)


def events(log):
    """What a JSON log says of the steps."""
    return [event for event in map(json.loads, log.splitlines()) if event["event"] == "train"]


def test_balancing_over_two_ranks_changes_no_loss(one_rank_and_two):
    plain, balanced = ([event["loss"] for event in events(log)] for _, log in one_rank_and_two.values())
    assert balanced[0] == pytest.approx(plain[0], abs=1e-6) and balanced == pytest.approx(plain, abs=1e-4)
    _, log = one_rank_and_two[2]
    assert all(1 <= event["slowest_over_mean"] <= 2 for event in events(log))


@pytest.mark.slow
def test_ten_steps_are_the_same_with_balancing_and_without_on_one_rank_and_two(corpus, tmp_path):
    """Micro-batches, loader workers and ZeRO stages differ, too."""
    runs = {
        "plain 1": ("--balance-batches", 0, "--micro-batch-size", 1),
        "balanced 1": ("--micro-batch-size", 4),
        "plain 2": ("--balance-batches", 0, "--num-workers", 2, "--zero-stage", 2),
        "balanced 2": ("--micro-batch-size", 1, "--num-workers", 2, "--zero-stage", 1),
        "another seed 2": ("--seed", 5),
    }
    losses = {}
    for name, options in runs.items():
        log = tmp_path / name
        train_ranks(corpus, *options, "--json-log", log, ranks=int(name[-1]), train_iters=10)
        losses[name] = [event["loss"] for event in events(log.read_text())]
    expected = losses.pop("plain 1")
    other = losses.pop("another seed 2")
    for name, seen in losses.items():
        print(f"{name}: differs by {abs(seen[0] - expected[0]):.1e}, {max(map(abs, np.subtract(seen, expected))):.1e}")
        assert seen[0] == pytest.approx(expected[0], abs=1e-6) and seen == pytest.approx(expected, abs=1e-4)
    assert len(expected) == 10 and abs(other[0] - expected[0]) > 1e-3


@pytest.fixture(scope="module")
def twenty_steps_of_one_rank(corpus):
    return train(corpus, "--micro-batch-size", 4, ranks=1, train_iters=20)


EVERY_KIND = [(stage, tensor, data) for stage in (0, 1, 2, 3) for tensor in (1, 2) for data in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage, tensor_parallel, data_parallel", EVERY_KIND)
def test_every_kind_of_parallelism_trains_like_one_rank(
    corpus, twenty_steps_of_one_rank, tmp_path, zero_stage, tensor_parallel, data_parallel
):
    kind = ["--zero-stage", zero_stage, "--tensor-model-parallel-size", tensor_parallel, "--micro-batch-size", 2]
    ranks = {"ranks": tensor_parallel * data_parallel, "train_iters": 20}
    checkpoints = ("--save", tmp_path / "checkpoints", "--load", tmp_path / "checkpoints")
    first = train(corpus, *kind, *checkpoints, "--exit-interval", 10, **ranks)
    whole = first | train(corpus, *kind, *checkpoints, **ranks)
    assert list(first) == list(range(1, 11)) and list(whole) == list(range(1, 21))
    pairs = list(zip(as_numbers(whole), as_numbers(twenty_steps_of_one_rank), strict=True))
    loss_error = max(abs(loss - expected) for (loss, _), (expected, _) in pairs)
    norm_error = max(abs(norm / expected - 1) for (_, norm), (_, expected) in pairs)
    print(f"ZeRO {zero_stage}, tp {tensor_parallel}, dp {data_parallel}: losses differ by {loss_error:.1e}, ", end="")
    print(f"gradient norms by {norm_error:.1e} relative")
    assert loss_error < 1e-3 and norm_error < 1e-2


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_bf16_follows_fp32(corpus, reference, zero_stage):
    rounded = train_ranks(corpus, "--bf16", "--zero-stage", zero_stage)
    for (loss, _), (expected, _) in zip(as_numbers(rounded), as_numbers(reference), strict=True):
        assert loss == pytest.approx(expected, abs=0.02)


def evaluations(output):
    """(iteration, loss, perplexity, target tokens) of each evaluation."""
    line = r"^validation at iteration (\d+) \| loss (\S+) \| perplexity (\S+) \| target tokens (\d+)"
    return re.findall(line, output, re.MULTILINE)


def test_evaluation_and_logs_are_the_same_for_one_rank_and_two(one_rank_and_two):
    for output, log in one_rank_and_two.values():
        assert "attention kernel: sdpa" in output
        written = [json.loads(line) for line in log.splitlines()]
        assert [event["event"] for event in written] == ["train", "train", "valid"] * 3
        assert written[2]["perplexity"] == pytest.approx(float(evaluations(output)[0][2]), abs=1e-3)
        assert written[0]["tokens_per_second_per_device"] > 0
        assert len(re.findall(r"^iteration .* \| slowest/mean \d\.\d\d \| ", output, re.MULTILINE)) == 6
    of_one, of_two = (evaluations(output) for output, _ in one_rank_and_two.values())
    assert len(of_one) == 3
    for one, two in zip(of_one, of_two, strict=True):
        assert (one[0], one[3]) == (two[0], two[3])
        assert float(one[2]) == pytest.approx(float(two[2]), rel=1e-4)


def test_a_run_that_blows_up_stops_and_names_samples_and_documents(corpus, tmp_path):
    options = ("--lr", "1e30", "--lr-warmup-iters", 0, "--lr-decay-style", "constant", "--clip-grad", 0)
    status, output = launch_ranks(corpus, *options, train_iters=20)
    assert status == 2
    assert re.search(
        r"^pretrain_gpt: error: iteration \d+: the (loss|gradient norm) is (nan|inf)", output, re.MULTILINE
    )
    listed = re.findall(r"^sample (\d+): (\S+data_text_document), sequence (\d+), documents (.+)", output, re.MULTILINE)
    assert len(listed) == 8 and int(listed[0][0]) % 8 == 0
    _, prefix, sequence, documents = listed[3]
    words = shlex.split(re.search(r"`megatron-bfp (show .*)` shows one", output)[1])
    replaced = {"PREFIX": prefix, "N": sequence, "page.html": str(tmp_path / "page.html")}
    show = [sys.executable, "-m", "megatron_bfp", *(replaced.get(word, word) for word in words), "--json"]
    shown = subprocess.run(show, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert [str(chunk["document"]) for chunk in json.loads(shown.stdout)["chunks"]] == documents.split(", ")


@pytest.mark.slow
def test_concatenation_inside_documents_trains_too(corpus):
    (status, plain), (other_status, inside) = together(
        partial(launch, corpus, "--data-impl", "mmap"),
        partial(launch, corpus, "--data-impl", "mmap", "--dataloader-inter-document-masking"),
    )
    assert (status, other_status) == (0, 0), plain[-2500:] + inside[-2500:]
    assert "attention inside documents, as the first step showed: 2 x DocumentAttention by sdpa; rotary" in inside
    assert "attention inside documents" not in plain
    plain, inside = steps(plain), steps(inside)
    assert as_numbers(inside) != as_numbers(plain)
    assert as_numbers(inside)[0][0] == pytest.approx(as_numbers(plain)[0][0], abs=0.05)


def test_fault_A01_a_rank_that_loses_boundaries_ends_all_before_the_first_update(corpus):
    rows = ("--seq-length", 1024, "--micro-batch-size", 1, "--global-batch-size", 4)  # of several documents each
    status, output = launch_ranks(corpus, *rows, fault="1 boundaries 0", train_iters=2)
    assert status != 0 and "iteration 1/" not in output
    assert "rank 1: decoder.layers.0.self_attention.core_attention (DocumentAttention by sdpa) got other" in output


def test_a_finished_run_is_not_aborted_by_what_python_does_at_its_end(corpus):
    """Gloo's threads abort one in some hundred processes when Python ends; here something always does."""
    status, output = launch(corpus, ranks=1, fault="0 SIGABRT exit", train_iters=2)
    assert status == 0 and "iteration 2/2" in output, output[-2000:]


def test_concatenation_trains_with_the_same_command_also_without_other_splits(corpus):
    printed = train_ranks(corpus, "--data-impl", "mmap", "--split", "999999,1,1", train_iters=3)
    losses = [float(loss) for loss, _, _ in printed.values()]
    assert len(losses) == 3 and losses[-1] < losses[0]


def copy_dataset(corpus, folder):
    """The dataset under another name, without indexes; returns its prefix."""
    for suffix in (".bin", ".idx"):
        shutil.copy(corpus / f"data_text_document{suffix}", folder / f"copy{suffix}")
    return folder / "copy"


@pytest.fixture
def copy(corpus, tmp_path):
    return copy_dataset(corpus, tmp_path)


def test_a_weighted_blend_trains(corpus, copy):
    original = corpus / "data_text_document"
    losses = [float(loss) for loss, _, _ in train_ranks(corpus, "--data-path", 0.3, original, 0.7, copy).values()]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    "options, named, launcher",
    [
        (["--global-batch-size", 7], "--global-batch-size 7", "deepspeed"),
        pytest.param(["--split", "90,abc,5"], "--split '90,abc,5'", "deepspeed", marks=pytest.mark.slow),
        pytest.param(["--train-iters", "abc"], "--train-iters", "deepspeed", marks=pytest.mark.slow),
        pytest.param(["--data-path", "nowhere"], "nowhere.idx: no such file", "deepspeed", marks=pytest.mark.slow),
        (["--data-path", "DATA", "COPY", "--train-iters", 10_000], "give a weight", "ranks"),
    ],
)
def test_bad_options_are_one_line_and_status_2(corpus, copy, options, named, launcher):
    before = sorted(os.listdir(corpus))
    paths = {"DATA": corpus / "data_text_document", "COPY": copy}
    words = [paths.get(option, option) for option in options]
    assert_refused(*launch(corpus, *words, launcher=launcher), named)
    assert sorted(os.listdir(corpus)) == before


@pytest.mark.parametrize("data_impl", ["bfp", pytest.param("mmap", marks=pytest.mark.slow)])
def test_damaged_data_is_one_line_and_status_2(corpus, copy, data_impl):
    with open(f"{copy}.bin", "r+b") as file:
        file.truncate(1000)
    assert_refused(*launch_ranks(corpus, "--data-path", copy, "--data-impl", data_impl), "copy.bin: has 1000 bytes")


def assert_refused(status, output, named):
    assert status == 2, output[-3000:]
    lines = [line for line in output.splitlines() if line.startswith("pretrain_gpt")]
    assert len(lines) == 1 and named in lines[0]
    assert "Traceback" not in output
