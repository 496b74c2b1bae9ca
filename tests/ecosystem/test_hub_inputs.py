"""Datasets and tokenizers of the Hugging Face Hub, which a local server stands in for, with the Hub's own library."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.datasets import ROOT
from helpers.jobs import dataset_bytes
from helpers.tokenizer_fixtures import EOD

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXTS = [f"document {number} " * (1 + number % 12) for number in range(500)]


class Hub(BaseHTTPRequestHandler):
    """The requests that the Hub's library makes for repositories ``org/name``, whose files are in ``folder``."""

    protocol_version = "HTTP/1.1"
    folder = None

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = json.loads(body)["paths"] if body.startswith("{") else unquote(body.partition("paths=")[2]).split("&")
        self.answer_json([self.entry(path) for path in wanted if os.path.exists(self.folder / path)])

    def do_GET(self):
        path = urlsplit(self.path).path
        if "/resolve/" in path:
            self.answer_file(path.partition("/resolve/")[2].partition("/")[2])
        elif "/tree/" in path:
            below = path.partition("/tree/")[2].partition("/")[2]
            names = sorted(os.listdir(self.folder / below))
            self.answer_json([self.entry(os.path.join(below, name)) for name in names])
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in sorted(os.listdir(self.folder))]
            self.answer_json({"id": "org/name", "_id": "1", "sha": COMMIT, "siblings": siblings, "tags": []})
        else:
            self.answer(404, b"", {})

    def entry(self, path):
        file = self.folder / path
        if file.is_dir():
            return {"type": "directory", "path": path, "oid": "0" * 40}
        return {"type": "file", "path": path, "oid": self.etag(file), "size": file.stat().st_size}

    def etag(self, file):
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def answer_file(self, path):
        file = self.folder / path
        if not file.is_file():
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        content, status, headers = file.read_bytes(), 200, {"ETag": f'"{self.etag(file)}"', "X-Repo-Commit": COMMIT}
        if asked := self.headers.get("Range"):
            begin, end = asked.removeprefix("bytes=").split("-")
            end = min(int(end or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
            content, status = content[int(begin) : end + 1], 206
        return self.answer(status, content, headers)

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status, body, headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def call(tmp_path, tokenizer_file):
    """Run the command in a process that takes the server for the Hub; returns its status and standard error."""
    Hub.folder = tmp_path / "repository"
    (Hub.folder / "data").mkdir(parents=True)
    pq.write_table(pa.table({"text": TEXTS}), Hub.folder / "data" / "train-0.parquet", row_group_size=50)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (Hub.folder / "data" / "train-1.jsonl").write_text(lines)
    (Hub.folder / "README.md").write_text("no data")
    (Hub.folder / "tokenizer.json").write_bytes(open(tokenizer_file, "rb").read())
    (Hub.folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOD}))
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}

        def call(*options, output, **more):
            command = [sys.executable, "-m", "megatron_bfp", "preprocess", *map(str, options), "--append-eod"]
            command += ["--seq-length", "64", "--output-prefix", str(tmp_path / output)]
            environment = os.environ | settings | {"HF_HUB_DISABLE_TELEMETRY": "1"} | more
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
            return done.returncode, done.stderr

        yield call
        server.shutdown()


def test_a_dataset_and_a_tokenizer_of_the_hub_give_the_bytes_of_files(call, tmp_path, tokenizer_file):
    tokenizer = ["--tokenizer-model", tokenizer_file, "--eod-token", EOD]
    status, err = call("--input", Hub.folder / "data", *tokenizer, output="files")
    assert status == 0, err
    status, err = call("--input", "hf://datasets/org/name/data", *tokenizer, "--workers", 2, output="out")
    assert status == 0, err
    assert dataset_bytes(tmp_path) == dataset_bytes(tmp_path, "files")
    pattern = "hf://datasets/org/name/data/*.parquet"
    status, err = call("--input", pattern, "--tokenizer-model", "org/name", output="named")
    assert status == 0, err
    assert "tokenizer org/name of the Hugging Face Hub: " in err
    wanted = dataset_bytes(tmp_path, "files")[0]
    assert dataset_bytes(tmp_path, "named")[0] == wanted[: len(wanted) // 2]
    offline = ("--input", Hub.folder / "data", "--tokenizer-model", "org/name")
    status, err = call(*offline, output="offline", HF_HUB_OFFLINE="1")  # from the cache
    assert status == 0 and dataset_bytes(tmp_path, "offline") == dataset_bytes(tmp_path, "files"), err


def test_what_is_not_there_is_an_error_of_one_line(call):
    for value in ("hf://datasets/org/name/none.jsonl", "hf://datasets/org/name/*.zst"):
        status, err = call("--input", value, "--tokenizer-model", "org/name", output="out")
        assert status == 2 and f"--input {value}: no " in err.splitlines()[-1], err
    (Hub.folder / "tokenizer.json").unlink()
    status, err = call("--input", Hub.folder / "data", "--tokenizer-model", "org/name", output="out")
    assert status == 2 and "the folder holds no tokenizer.json" in err.splitlines()[-1], err
