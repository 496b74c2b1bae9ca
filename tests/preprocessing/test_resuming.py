"""Runs that stop and go on: what is kept, what is refused, parts for several jobs, Ray, a disk that is full."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers.datasets import DATA, ROOT

pytest.importorskip("tokenizers")

from helpers.tokenizer_fixtures import EOD

from megatron_bfp.commands import preprocess as command
from megatron_bfp.commands import preprocess_options as options
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.preprocessing import plan

NUM_DOCUMENTS = 3000


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A file of about 400 KB, cut into shards of 20 KB."""
    for name in ("SMALL_SHARD", "SMALLEST_SHARD"):
        monkeypatch.setattr(plan, name, 20_000)
    path = tmp_path / "in.jsonl"
    with open(path, "w") as file:
        for number in range(NUM_DOCUMENTS):
            file.write(json.dumps({"text": f"document {number} " * (1 + number % 12)}) + "\n")
    return path


@pytest.fixture
def run(tmp_path, tokenizer_file, capsys, monkeypatch):
    """Run the command in this process, as its console script does."""

    def run(*arguments, output="out", seq_length=("--seq-length", 64)):
        arguments += ("--output-prefix", tmp_path / output, "--tokenizer-model", tokenizer_file)
        arguments += ("--eod-token", EOD, "--append-eod", *seq_length)
        monkeypatch.setattr(sys, "argv", ["preprocess_bfp", *map(str, arguments)])
        try:
            status = command.console()
        except SystemExit as exit:
            status = exit.code
        return status, capsys.readouterr().err

    return run


def dataset_bytes(tmp_path, output="out"):
    return [(tmp_path / f"{output}_text_document.{kind}").read_bytes() for kind in ("bin", "idx")]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def stopped(run, corpus, tmp_path, monkeypatch):
    """A run that was stopped after five shards."""
    from megatron_bfp.preprocessing import task as shards
    from megatron_bfp.preprocessing import write as dataset

    def write(shard, report, work):
        if shard.number == 5:
            raise KeyboardInterrupt
        return shards.write_shard(shard, report, work)

    monkeypatch.setattr(dataset, "write_shard", write)
    status, err = run("--input", corpus)
    assert status == 130 and "keeps 5 finished shards; the same command goes on from there" in err
    monkeypatch.setattr(dataset, "write_shard", shards.write_shard)
    return tmp_path / "out.shards"


@pytest.mark.case(7)
def test_finished_shards_are_not_done_again(stopped, run, corpus, tmp_path, monkeypatch):
    assert run("--input", corpus, output="whole")[0] == 0
    before = {name: os.stat(stopped / name / "record").st_mtime_ns for name in names(stopped) if name.startswith("0")}
    assert len(before) == 5
    assert run("--input", corpus)[0] == 0
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")
    assert not stopped.exists()
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert summary["shards"] - summary["this_call"]["shards"] == 5


def test_the_same_command_once_more_changes_nothing(run, corpus, tmp_path):
    assert run("--input", corpus)[0] == 0
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert run("--input", corpus)[0] == 0
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert run("--input", corpus, seq_length=("--seq-length", 32))[0] == 0  # another index of the same dataset
    assert names(tmp_path / "out_text_document.bfp") == [f"s32-d0-{NUM_DOCUMENTS}", f"s64-d0-{NUM_DOCUMENTS}"]


CHANGES = {
    "eod": r"it differs in append_eod \(true before, false now\)",
    "keys": r"it differs in json_keys \(\[\"text\"\] before, \[\"text\", \"text.a\"\] now\)",
    "tokenizer": r"it differs in tokenizer sha256 \(\"[0-9a-f]+\" before, \"[0-9a-f]+\" now\)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_run_is_refused_with_both_values(stopped, run, corpus, tmp_path, tokenizer_file, change, monkeypatch):
    others = {"keys": ["--json-keys", "text", "text.a"]}.get(change, [])
    before = names(stopped)
    if change == "eod":
        monkeypatch.setattr(command, "parse", without_eod)
    elif change == "tokenizer":
        other = tmp_path / "other.json"
        other.write_text(open(tokenizer_file).read() + " ")
        monkeypatch.setattr(command, "parse", with_tokenizer(str(other)))
    status, err = run("--input", corpus, *others)
    assert status == 2
    assert re.search(CHANGES[change], err) and "--overwrite" in err and names(stopped) == before


def with_tokenizer(path):
    def parse(argv):
        found = options.parse(argv)
        found.tokenizer_model = path
        return found

    return parse


@pytest.mark.parametrize("change", ["input", "touched", "more", "overwrite"])
def test_other_inputs_are_named_with_both_values_and_done_again(stopped, run, corpus, tmp_path, change):
    given, others = [corpus], []
    size = corpus.stat().st_size
    if change == "input":
        corpus.write_text(corpus.read_text().replace("document 2999", "document 3,333"))
    elif change == "touched":
        os.utime(corpus)
    elif change == "more":
        given.append(DATA / "nasty" / "00_good.jsonl")
    else:
        corpus.write_text("")
        given = [DATA / "nasty" / "00_good.jsonl"]
        others = ["--overwrite"]
    status, err = run("--input", *given, *others)
    assert status == 0
    kept = 5 if change == "more" else 0
    assert f"{kept} of 5 finished shards are kept" in err
    if change == "more":
        assert re.search(r"00_good.jsonl \(not an input before, [0-9,]+ bytes of 20.* now\)", err)
    else:
        assert re.search(rf"in.jsonl \({size:,} bytes of 20.* before, (not an input|[0-9,]+ bytes of 20.*) now\)", err)
    assert run("--input", *given, output="whole")[0] == 0
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")


def without_eod(argv):
    found = options.parse(argv)
    found.append_eod = False
    return found


def test_a_shard_whose_ids_differ_is_done_again_by_the_reference(run, corpus, tmp_path, monkeypatch):
    from megatron_bfp.tokenizers.fast.tokenizer import FastTokenizer

    assert run("--input", corpus, output="whole")[0] == 0
    encode = FastTokenizer.encode_batch
    is_wrong = False

    def wrong_in_one_shard(tokenizer, texts):
        nonlocal is_wrong
        if len(texts) > 1:  # a batch, and not the sample of it
            is_wrong = any(text.startswith("document 1500 ") for text in texts)
        return [ids + is_wrong for ids in encode(tokenizer, texts)]

    monkeypatch.setattr(FastTokenizer, "encode_batch", wrong_in_one_shard)
    status, err = run("--input", corpus)
    assert status == 0
    (line,) = err.splitlines()
    assert re.match(
        r"tokenizing without gigatoken: .*: shard \d+ \(.*in.jsonl\): .* differ from its own library's", line
    )
    assert "document 15" not in line  # no text of documents in logs
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert summary["shards_by_library"]["HuggingFaceTokenizer"] == 1 and len(summary["remarks"]) == 1


def test_leaving_out_bad_documents_goes_on_too(run, corpus, tmp_path):
    lines = corpus.read_text().splitlines(True)
    lines[2500] = "bad\n"
    corpus.write_text("".join(lines))
    status, err = run("--input", corpus)
    assert status == 2 and "in.jsonl:2501 (byte " in err and "finished shards" in err
    assert run("--input", corpus, "--skip-bad-documents")[0] == 0
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert summary["shards"] - summary["this_call"]["shards"] > 5 and summary["bad_documents"] == 1
    (bad,) = [json.loads(line) for line in open(tmp_path / "out.bad.jsonl")]
    assert bad["line"] == 2501


def test_bad_documents_of_finished_shards_are_still_errors(run, corpus, tmp_path, monkeypatch):
    from megatron_bfp.preprocessing import write as dataset

    lines = corpus.read_text().splitlines(True)
    lines[1500] = "bad\n"
    corpus.write_text("".join(lines))
    monkeypatch.setattr(dataset.ShardJoiner, "finish", interrupted)
    assert run("--input", corpus, "--skip-bad-documents")[0] == 130
    status, err = run("--input", corpus)
    assert status == 2 and "in.jsonl:1501 (byte " in err


def test_bad_documents_of_finished_shards_stop_a_run_before_it_does_others(run, corpus, tmp_path, monkeypatch):
    from megatron_bfp.preprocessing import task as shards
    from megatron_bfp.preprocessing import write as dataset

    lines = corpus.read_text().splitlines(True)
    lines[10] = "bad\n"
    corpus.write_text("".join(lines))
    at, done = 5, []

    def write(shard, report, work):
        done.append(shard.number)
        if shard.number == at:
            raise KeyboardInterrupt
        return shards.write_shard(shard, report, work)

    monkeypatch.setattr(dataset, "write_shard", write)
    assert run("--input", corpus, "--skip-bad-documents")[0] == 130
    assert done == [*range(at + 1)]
    status, err = run("--input", corpus)
    assert status == 2 and "in.jsonl:11 (byte " in err
    assert done == [*range(at + 1)]


def test_segments_of_a_stream_go_when_their_shards_are_done(run, corpus, tmp_path, monkeypatch):
    from megatron_bfp.preprocessing import write as dataset

    listed = []

    def stop(*_):
        listed.extend(names(tmp_path / "out.shards"))
        raise KeyboardInterrupt

    monkeypatch.setattr(dataset.ShardJoiner, "finish", stop)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(corpus.read_bytes()))
    writer.start()
    assert run("--input", pipe)[0] == 130
    writer.join()
    assert any(name.isdigit() for name in listed)
    assert not any(name.startswith("segment-") for name in listed)


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.fixture
def stopped_between_names(run, corpus, tmp_path, monkeypatch):
    """A run that was stopped when its .bin had its name, and its .idx had not."""
    from megatron_bfp.preprocessing import write as dataset

    def move_one(bin_file, idx_file, prefix):
        os.replace(bin_file, f"{prefix}.bin")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(dataset, "move_files", move_one)
        assert run("--input", corpus)[0] == 130
    return tmp_path / "out.shards"


def test_a_run_that_stops_between_two_names_goes_on(stopped_between_names, run, corpus, tmp_path, monkeypatch):
    from megatron_bfp.preprocessing import write as dataset

    with monkeypatch.context() as patched:
        patched.setattr(dataset, "write_shard", interrupted)  # all are done
        assert run("--input", corpus)[0] == 0
    assert run("--input", corpus, output="whole")[0] == 0
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole") and not stopped_between_names.exists()


def test_a_finished_dataset_that_was_removed_is_written_anew_with_overwrite(
    stopped_between_names, run, corpus, tmp_path
):
    (tmp_path / "out_text_document.bin").unlink()
    status, err = run("--input", corpus)
    assert status == 2 and "out_text_document.bin" in err
    assert run("--input", corpus, "--overwrite")[0] == 0
    assert run("--input", corpus, output="whole")[0] == 0
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")


def test_a_joined_shard_keeps_its_record_alone(run, corpus, tmp_path, monkeypatch):
    from megatron_bfp.preprocessing import write as dataset

    monkeypatch.setattr(dataset, "verify_documents", interrupted)
    assert run("--input", corpus)[0] == 130
    shards = [path for path in (tmp_path / "out.shards").iterdir() if path.name.startswith("0")]
    assert len(shards) > 5 and all(names(shard) == ["record"] for shard in shards)
    num_tokens = sum(json.loads((shard / "record").read_text())["num_tokens"][0] for shard in shards)
    assert (tmp_path / "out.shards" / "joined-0.bin").stat().st_size == 2 * num_tokens


def test_shards_of_another_version_are_refused(stopped, run, corpus, monkeypatch):
    from megatron_bfp.preprocessing import job_folder as run_folder

    monkeypatch.setattr(run_folder, "FORMAT", 1)
    status, err = run("--input", corpus)
    assert status == 2 and "it is another version's" in err and "--overwrite" in err


@pytest.mark.parametrize("step", ["ShardJoiner.finish", "verify_documents", "move_files", "write_summary"])
def test_a_run_that_stops_at_the_end_goes_on(run, corpus, tmp_path, monkeypatch, step):
    from megatron_bfp.preprocessing import write as dataset

    assert run("--input", corpus, output="whole")[0] == 0
    with monkeypatch.context() as patched:
        patched.setattr(f"{dataset.__name__}.{step}", interrupted)
        assert run("--input", corpus)[0] == 130
    assert not list(tmp_path.glob("out*.part"))
    assert bool(list(tmp_path.glob("out*.bin"))) == (step == "write_summary")
    monkeypatch.setattr(dataset, "write_shard", interrupted)  # all are done
    assert run("--input", corpus)[0] == 0
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")


def test_two_processes_do_not_write_the_same(run, corpus, tmp_path):
    from megatron_bfp.preprocessing.job_folder import RunFolder

    with RunFolder(str(tmp_path / "out.shards"), {}, False):
        status, err = run("--input", corpus)
    assert status == 2 and "another process is writing these datasets" in err


def test_a_folder_of_something_else_is_left_alone(run, corpus, tmp_path):
    (tmp_path / "out.shards").mkdir()
    (tmp_path / "out.shards" / "thesis.tex").write_text("years of work")
    for overwrite in ((), ("--overwrite",)):
        status, err = run("--input", corpus, *overwrite)
        assert status == 2 and "it holds thesis.tex" in err
    assert (tmp_path / "out.shards" / "thesis.tex").exists()


def test_what_is_written_beside_datasets_is_no_input(run, corpus, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    corpus.rename(folder / "in.jsonl")
    assert run("--input", folder, output="data/out")[0] == 0
    assert run("--input", folder, output="data/out")[0] == 0
    before = dataset_bytes(tmp_path, "data/out")
    assert run("--input", folder, "--overwrite", output="data/out")[0] == 0
    assert dataset_bytes(tmp_path, "data/out") == before


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


def test_a_worker_that_is_killed_is_replaced(corpus, tmp_path, tokenizer_file, no_fast_library):
    """``kill -9`` of one worker: it is named, its shard is done again, and the bytes are the same."""
    corpus.write_text(corpus.read_text() * 60)
    common = ["--input", corpus, "--tokenizer-model", tokenizer_file, "--eod-token", EOD, "--append-eod"]
    tool = [sys.executable, ROOT / "tools" / "preprocess_bfp.py", *common, "--seq-length", "64", "--output-prefix"]
    assert subprocess.run([*map(str, [*tool, tmp_path / "whole"])], stdout=subprocess.DEVNULL).returncode == 0
    process = subprocess.Popen(
        [*map(str, [*tool, tmp_path / "out", "--workers", "2"])],
        env=no_fast_library,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    unfinished_shards = []
    while not unfinished_shards and time.monotonic() < deadline:
        time.sleep(0.02)
        unfinished_shards = list(tmp_path.glob("out.shards/[0-9]*-[0-9]*.part"))  # not the one of the file `run`
    worker = int(unfinished_shards[0].name.split("-")[-1].removesuffix(".part"))
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"worker process {worker} was killed by SIGKILL at shard " in err and "trying again" in err
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")


def limit_file_size():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_space(tmp_path, tokenizer_file, workers):
    """A small tmpfs where it can be mounted, else a limit on the size of files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    path = tmp_path / "in.jsonl"
    with open(path, "w") as file:
        for number in range(200_000):
            file.write(json.dumps({"text": f"document {number} " * 9}) + "\n")
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        common = ["--input", path, "--tokenizer-model", tokenizer_file, "--seq-length", "64", "--workers", workers]
        tool = [sys.executable, ROOT / "tools" / "preprocess_bfp.py", *common, "--output-prefix"]
        options = {"capture_output": True, "text": True, "timeout": 120}
        limit = None if mounted else limit_file_size
        full = subprocess.run([*map(str, [*tool, disk / "out"])], preexec_fn=limit, **options)
        assert full.returncode == 2 and "Traceback" not in full.stderr
        lines = [line for line in full.stderr.splitlines() if not line.startswith("tokenizing:")]
        assert "cannot be written: " in lines[-1] and len(lines) <= 2
        reason = "No space left on device" if mounted else "File too large"
        assert reason in lines[-1]
        assert not list(disk.glob("*.bin")) and not list(disk.glob("*.idx"))
        if mounted:
            assert subprocess.run(["mount", "-o", "remount,size=200m", str(disk)]).returncode == 0
        done = subprocess.run([*map(str, [*tool, disk / "out"])], **options)
        assert done.returncode == 0, done.stderr
        assert IndexedDataset(str(disk / "out_text_document")).num_documents == 200_000
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(disk)])


def test_ray_gives_the_same_bytes(corpus, tmp_path, tokenizer_file, monkeypatch):
    pytest.importorskip("ray")
    corpus.write_text(corpus.read_text() * 40)
    common = ["--input", corpus, "--tokenizer-model", tokenizer_file, "--eod-token", EOD, "--append-eod"]
    tool = [sys.executable, ROOT / "tools" / "preprocess_bfp.py", *common, "--seq-length", "64", "--output-prefix"]
    ray = ["--executor", "ray", "--ray-address", "local", "--workers", "2"]
    outputs = {"here": [], "ray": ray}
    for name, extra in outputs.items():
        done = subprocess.run(
            [*map(str, [*tool, tmp_path / name, *extra])], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    assert dataset_bytes(tmp_path, "here") == dataset_bytes(tmp_path, "ray")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\nbad\n')
    arguments = [*map(str, [*tool, tmp_path / "bad", *ray])]
    arguments[arguments.index(str(corpus))] = str(bad)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "bad.jsonl:2 (byte 14): not JSON" in done.stderr.splitlines()[-1]
    none = subprocess.run(
        [*map(str, [*tool, tmp_path / "none", "--executor", "ray"])],
        capture_output=True,
        text=True,
        timeout=300,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )
    assert none.returncode == 2 and "--ray-address" in none.stderr and "Traceback" not in none.stderr
