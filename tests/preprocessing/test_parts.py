"""Several jobs that each do a part of the input, and the options that say so."""

import json

import pytest
from helpers.jobs import dataset_bytes

pytest.importorskip("tokenizers")

from megatron_bfp.commands import preprocess as command


@pytest.mark.parametrize("count", [1, 3, 40])
def test_parts_of_several_jobs_merge_to_the_whole(run, corpus, tmp_path, count):
    lines = corpus.read_text().splitlines(True)
    lines[2000] = "bad\n"
    corpus.write_text("".join(lines))
    skip = ("--skip-bad-documents",)
    assert run("--input", corpus, *skip, output="whole")[0] == 0
    for index in range(count):
        part = ("--shard-index", index, "--shard-count", count)
        status, err = run("--input", corpus, *part, *skip, seq_length=())
        assert status == 0, err
    parts = sorted(tmp_path.glob("out-*_text_document.idx"))
    assert len(parts) == count
    (bad,) = [json.loads(line) for path in tmp_path.glob("out-*.bad.jsonl") for line in open(path)]
    assert bad["line"] == 2001
    merged = ["--merge", *map(str, parts), "--output-prefix", str(tmp_path / "out_text_document"), "--seq-length", "64"]
    command.main(merged)
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")
    assert (tmp_path / "out_text_document.bfp").is_dir()
    with pytest.raises(Exception, match="exists"):
        command.main(merged)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--shard-index", 0], "needed together"),
        (["--shard-index", 3, "--shard-count", 3], "is not from 0 to 2"),
        (["--shard-index", -1, "--shard-count", 3], "is not from 0 to 2"),
        (["--shard-index", 0, "--shard-count", 0], "--shard-count"),
        (["--shard-index", 0, "--shard-count", 2, "--seq-length", 64], "give it to megatron-bfp merge"),
        (["--shard-index", 0, "--shard-count", 2, "--input", "-"], "can be read once"),
        ([], "--seq-length is needed"),
        (["--executor", "slurm"], "--executor"),
    ],
)
def test_options_that_do_not_go_together(run, corpus, options, reason):
    status, err = run("--input", corpus, *options, seq_length=())
    assert status == 2 and reason in err and len(err.splitlines()) == 1
