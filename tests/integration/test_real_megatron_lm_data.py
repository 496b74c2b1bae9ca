"""The data of Megatron-LM's own pretrain_gpt.py with ``--data-impl bfp``: blends, splits and refusals.

MEGATRON_LM_PATH=CHECKOUT bash tests/run.sh --integration
"""

import itertools
import json
import os
import re
import shutil

import numpy as np
import pytest
from helpers.launching import make_corpus
from helpers.real_megatron.lm import NEEDS_CHECKOUT, ON_CPU, STEP, by_way, launch, train, watched

from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, document_range, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex

pytestmark = [pytest.mark.integration, NEEDS_CHECKOUT]


@pytest.fixture(scope="module")
def checkout(megatron_lm):
    return megatron_lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


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
    (seen,) = watched(output)
    names = [[f"s128-d{first}-{end}" for _ in range(3)] for first, end in itertools.pairwise([0, 1938, 1998, 2000])]
    for split, expected in zip(seen["splits"], names, strict=True):
        assert [name for _, name, _ in split["indexes"]] == expected
        assert not any(was_built for _, _, was_built in split["indexes"])
        assert split["same_as_in_part"] and all(split["same_as_in_part"])
    shares = [seen["splits"][0]["part_of_sample"].count(part) for part in range(3)]
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
    (tmp_path / "counts.json").write_text(json.dumps({f"part{number}": [1, 2] for number in range(3)}))  # all wrong
    faster = ["--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap"]
    again, output = built(*faster, "--per-dataset-sequences-path", "counts.json")
    assert "--per-dataset-sequences-path is not needed" in output
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
    (seen,) = watched(output)
    print(f"2,500 corpora, three splits: {seen['seconds']:.1f} s")
    assert "2,500 indexes (0 built, 2,500 opened)" in output
    assert seen["seconds"] < 30


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
