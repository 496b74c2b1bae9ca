"""The data of Megatron-DeepSpeed's own pretrain_gpt.py with ``--data-impl bfp``: blends, paths and refusals.

MEGATRON_DEEPSPEED_PATH=CHECKOUT bash tests/run.sh --integration
"""

import hashlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers.datasets import ROOT, write
from helpers.launching import ENVIRONMENT
from helpers.real_megatron.deepspeed import ALONG, EOD, NEEDS_CHECKOUT, PACKED, STEP, launch, losses, train, watched

from megatron_bfp.integrations.megatron_deepspeed.dataset import build_splits
from megatron_bfp.samples.balance import balanced_order
from megatron_bfp.samples.fill_in_the_middle import FimForm, FimTokens

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]


@pytest.fixture(scope="module")
def checkout(megatron_deepspeed):
    return megatron_deepspeed


@pytest.fixture(scope="module")
def corpus(megatron_deepspeed_corpus):
    return megatron_deepspeed_corpus


def test_a_blend_with_prebuilt_indexes_is_exact(checkout, corpus):
    prefixes, weights, split = [f"part{part}" for part in range(3)], [0.5, 0.2, 0.3], "969,30,1"
    command = [sys.executable, ROOT / "tools/preprocess_bfp.py", "--indexed", *prefixes, "--seq-length", "128"]
    subprocess.run([*map(str, command), "--split", split], check=True, cwd=corpus, env=ENVIRONMENT)
    data = " ".join(f"{weight} {prefix}" for weight, prefix in zip(weights, prefixes))
    _, output = train(checkout, corpus, *PACKED, *ALONG, data=data, split=split, watched="batches")
    assert output.count("3 indexes (0 built, 3 opened)") == 3
    digests = [digest for line in watched(output) for digest in line["digests"]][:80]
    parts = [build_splits(str(corpus / prefix), split, [100] * 3, 128, 1234)[0] for prefix in prefixes]
    expected = [digest_of(part, number) for part, number in in_balanced_batches(blended(parts, weights, 80), 8)]
    assert digests == expected


def test_documents_are_rearranged_for_fill_in_the_middle(checkout, corpus):
    options = ["--fim-rate", 0.5, "--fim-prefix-token", 508, "--fim-middle-token", 509, "--fim-suffix-token", 510]
    keywords = {"watched": "batches", "micro_batch": 1, "iters": 2}
    _, output = train(checkout, corpus, *PACKED, *ALONG, *options, **keywords)
    digests = [digest for line in watched(output) for digest in line["digests"]][:16]
    for spm_rate, is_same in ((0.5, True), (1.0, False)):
        form = FimForm(FimTokens(prefix=508, middle=509, suffix=510, eod=EOD), spm_rate)
        keywords = {"fim_rate": 0.5, "fim_form": form}
        part = build_splits(str(corpus / "text"), "90,5,5", [100] * 3, 128, 1234, **keywords)[0]
        ordered = in_balanced_batches([(part, number) for number in range(16)], 8, micro_batch=1)
        assert (digests == [digest_of(part, number) for part, number in ordered]) == is_same


def digest_of(dataset, number):
    return hashlib.sha256(dataset[number]["text"].tobytes()).hexdigest()


def in_balanced_batches(samples, size, micro_batch=2):
    """Samples, as pairs of a dataset and a number, in the order of each global batch that balances their work."""
    samples = list(samples)
    for start in range(0, len(samples), size):
        batch = samples[start : start + size]
        work = np.array([int(part.work_of([number])[0]) for part, number in batch])
        order = balanced_order(work, micro_batch)
        yield from (batch[place] for place in order)


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


@pytest.mark.parametrize("script", [None, "with_install.py"])
def test_fault_A07_packing_wins_over_the_format_that_scripts_of_megatron_deepspeed_name(checkout, corpus, script):
    script = script and [checkout / script]
    both = [*PACKED, "--data-impl", "mmap"]
    steps, output = train(checkout, corpus, *both, *ALONG, script=script, ranks=2, iters=1)
    assert output.count("--data-impl bfp is used, not --data-impl mmap, which is there too") == 1
    assert "best-fit packing: train: text.bfp/s128-d0-" in output
    assert steps == train(checkout, corpus, *PACKED, *ALONG, script=script, ranks=2, iters=1)[0]


def test_scripts_of_megatron_deepspeed_train_as_they_are(checkout, corpus):
    """In half precision without flash attention, whose fused softmax would ignore the boundaries."""
    options = [*PACKED, "--data-impl", "mmap", "--bf16", *ALONG]
    keywords = {"iters": 1, "watched": "alone", "without": ["--no-masked-softmax-fusion"]}
    steps, output = train(checkout, corpus, *options, **keywords)
    assert output.count("--no-masked-softmax-fusion was added") == 1
    means = [part["alone"] / part["targets"] for part in watched(output)]
    assert losses(steps)[0] == pytest.approx(sum(means) / len(means), rel=5e-4)


@pytest.mark.parametrize(
    "data, message",
    [
        (
            " ".join(f"1 part{number % 3}" for number in range(255)),
            "a blend of 255 corpora; Megatron-DeepSpeed blends 254",
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
