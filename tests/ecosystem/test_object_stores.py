"""Inputs in an object store and in a folder of Hugging Face datasets give the bytes of files, whatever happens."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from helpers.datasets import ROOT
from helpers.jobs import dataset_bytes, names
from helpers.tokenizer_fixtures import EOD
from moto.server import ThreadedMotoServer

from megatron_bfp.commands import preprocess as command
from megatron_bfp.preprocessing import plan
from megatron_bfp.preprocessing.task import TaskWork

BUCKET = "corpus"
TEXTS = [f"document {number} " * (1 + number % 12) for number in range(3000)]
SMALL_TASKS = 20_000
"""Bytes."""


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(endpoint, monkeypatch):
    """An S3 client with an empty bucket, and the environment in which the tool finds it."""
    use(monkeypatch, endpoint)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    yield client
    for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    client.delete_bucket(Bucket=BUCKET)


def use(monkeypatch, endpoint):
    settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in (settings | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    s3fs.S3FileSystem.clear_instance_cache()  # of this process, with another endpoint


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with every format, in the order in which it is read."""
    monkeypatch.setattr(datasets.config, "DEFAULT_MAX_BATCH_SIZE", 100)  # rows in a record batch, usually 1,000
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[:500]).encode()))
    pq.write_table(pa.table({"text": TEXTS[:1000]}), folder / "c.parquet", row_group_size=100)
    saved = datasets.Dataset.from_dict({"number": list(range(2000)), "text": TEXTS[:2000]})
    saved.save_to_disk(folder / "d", num_shards=2)
    (folder / "d" / "cache-0123.arrow").write_bytes(b"of Dataset.map")
    (folder / "notes.md").write_text("no data")
    return folder


@pytest.fixture
def uploaded(files, s3):
    for path in files.rglob("*"):
        if path.is_file():
            s3.upload_file(str(path), BUCKET, f"data/{path.relative_to(files)}")
    return f"s3://{BUCKET}/data"


@pytest.fixture
def run(tmp_path, tokenizer_file, capsys, monkeypatch):
    """Run the command in this process with small tasks; returns its status and what it printed on standard error."""
    for name in ("SMALL_TASK", "SMALLEST_TASK"):
        monkeypatch.setattr(plan, name, SMALL_TASKS)

    def run(*arguments, output="out"):
        given = [*map(str, arguments), *common(tokenizer_file, tmp_path / output)]
        monkeypatch.setattr(sys, "argv", ["preprocess_bfp", *given])
        try:
            status = command.console()
        except SystemExit as exit:
            status = exit.code
        return status, capsys.readouterr().err

    return run


def common(tokenizer_file, output):
    tokenizer = ["--tokenizer-model", str(tokenizer_file), "--eod-token", EOD, "--append-eod"]
    return [*tokenizer, "--seq-length", "64", "--output-prefix", str(output)]


def summary(tmp_path, output="out"):
    return json.loads((tmp_path / f"{output}.summary.json").read_text())


def test_objects_give_the_bytes_of_files(files, uploaded, run, tmp_path):
    status, err = run("--input", files, output="files")
    assert status == 0, err
    assert "1 other file in the folders given not read (not named as data): " in err
    assert "(of a folder of Hugging Face datasets, and no rows of it)" in err
    status, err = run("--input", uploaded, "--workers", "2")
    assert status == 0 and "cache-0123.arrow" in err, err
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "files")
    assert summary(tmp_path)["shards"] > 10  # also large objects are split
    assert summary(tmp_path)["datasets"]["text"]["documents"] == 3000 + 500 + 1000 + 2000
    status, err = run("--input", f"{uploaded}/a.jsonl", f"{uploaded}/[b-c].*", f"{uploaded}/d", output="named")
    assert status == 0 and dataset_bytes(tmp_path, "named") == dataset_bytes(tmp_path, "files")
    status, err = run("--input", f"{uploaded}/d", f"{uploaded}/a.jsonl", output="turned")
    assert status == 0 and dataset_bytes(tmp_path, "turned") != dataset_bytes(tmp_path, "files")


def test_a_datasets_folder_gives_the_bytes_of_its_texts_in_lines(files, run, tmp_path):
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:2000]))
    assert run("--input", tmp_path / "lines.jsonl", output="lines")[0] == 0
    assert run("--input", files / "d", "--workers", "2")[0] == 0
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "lines")
    assert summary(tmp_path)["shards"] > 2
    (files / "d" / "data-00001-of-00002.arrow").unlink()
    status, err = run("--input", files / "d", output="incomplete")
    assert status == 2 and "names data-00001-of-00002.arrow, which is not in its folder" in err


SLOW_JOB = """
import sys, time
from megatron_bfp.commands import preprocess as command
from megatron_bfp.preprocessing import plan
from megatron_bfp.preprocessing.task import TaskWork
plan.SMALL_TASK = plan.SMALLEST_TASK = int(sys.argv.pop(1))
finish = TaskWork.finish
TaskWork.finish = lambda work: (time.sleep(0.1), finish(work))[1]
sys.exit(command.console())
"""


@pytest.mark.parametrize("kind", ["objects", "datasets"])
def test_a_job_that_is_killed_resumes(files, uploaded, run, tmp_path, tokenizer_file, kind):
    given = uploaded if kind == "objects" else str(files / "d")
    assert run("--input", given, output="whole")[0] == 0
    arguments = ["--input", given, "--workers", "2", *common(tokenizer_file, tmp_path / "out")]
    program = [sys.executable, "-c", SLOW_JOB, str(SMALL_TASKS), *arguments]
    job = subprocess.Popen(program, cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out.shards" / "000002").exists():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    assert not (tmp_path / "out_text_document.bin").exists()
    finished = {name for name in names(tmp_path / "out.shards") if name.isdigit()}
    status, err = run("--input", given)
    assert status == 0, err
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "whole")
    done = summary(tmp_path)
    assert done["shards"] - done["this_call"]["shards"] == len(finished) >= 2


@pytest.mark.parametrize("change", ["vanishes", "is replaced"])
def test_an_object_that_changes_is_an_error_that_names_it(uploaded, s3, run, tmp_path, monkeypatch, change):
    compute = TaskWork.compute

    def changed(work, report):
        if work.task.number == 1:
            s3.delete_object(Bucket=BUCKET, Key="data/c.parquet")
            if change == "is replaced":
                s3.put_object(Bucket=BUCKET, Key="data/c.parquet", Body=b'{"text": "a"}\n')
        compute(work, report)

    with monkeypatch.context() as patched:
        patched.setattr(TaskWork, "compute", changed)
        status, err = run("--input", uploaded)
    assert status == 2, err
    assert f"{uploaded}/c.parquet" in err.splitlines()[-1]
    assert not (tmp_path / "out_text_document.bin").exists()


class CutStore(BaseHTTPRequestHandler):
    """An S3 with one object. The body of ``short`` is short, that of ``closed`` ends early, of ``once`` only once."""

    body = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:1000]).encode()
    requests = []

    def do_HEAD(self):
        self.answer(200, b"", len(self.body))

    def do_GET(self):
        begin, end = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
        body = self.body[begin : end + 1]
        self.requests.append(self.path)
        cut = body[: len(body) // 2]
        if "short" in self.path:
            self.answer(206, cut, len(cut))
        elif "closed" in self.path or ("once" in self.path and len(self.requests) == 1):
            self.answer(206, cut, len(body))
            self.close_connection = True
        else:
            self.answer(206, body, len(body))

    def answer(self, status, body, size):
        self.send_response(status)
        for name, value in {
            "Content-Length": size,
            "ETag": '"1"',
            "Last-Modified": "Sat, 01 Jan 2022 00:00:00 GMT",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("name", ["whole", "short", "closed", "once"])
def test_a_body_that_ends_early_is_an_error_or_read_again(run, tmp_path, monkeypatch, name):
    CutStore.requests.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), CutStore) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        use(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        status, err = run("--input", f"s3://bucket/{name}.jsonl")
        server.shutdown()
    if name in ("whole", "once"):
        (tmp_path / "file.jsonl").write_bytes(CutStore.body)
        assert run("--input", tmp_path / "file.jsonl", output="file")[0] == status == 0, err
        assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "file")
        return
    assert status == 2 and f"s3://bucket/{name}.jsonl: " in err.splitlines()[-1], err
    assert not (tmp_path / "out_text_document.bin").exists()
    if name == "short":
        assert "is cut off: it ends at byte" in err
