"""Readers get files that may be anything: only our own errors come out, no other exception, crash, or much memory.

Each run is short; with FUZZ_MINUTES=10 each takes ten minutes. Inputs in ``findings`` once showed a fault.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("orjson")
pytest.importorskip("pyarrow")
pytest.importorskip("backports.zstd")

HERE = Path(__file__).parent
ROUNDS = {"idx": 150, "index": 60, "json_lines": 200, "parquet": 200}
FINDINGS = sorted((HERE / "findings").iterdir())
"""Each is named by its target and what it is about."""


def fuzz(target, folder, *options):
    command = [sys.executable, HERE / "fuzz.py", target, "--folder", folder, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("target", ROUNDS)
def test_only_our_errors_come_out(tmp_path, target):
    minutes = float(os.environ.get("FUZZ_MINUTES", 0))
    length = (
        ("--seconds", 60 * minutes, "--seed", os.environ.get("FUZZ_SEED", 1))
        if minutes
        else ("--rounds", ROUNDS[target])
    )
    fuzz(target, tmp_path, *length)


@pytest.mark.parametrize("target", sorted({path.name.split("-")[0] for path in FINDINGS}))
def test_what_showed_faults_shows_none_any_more(tmp_path, target):
    fuzz(target, tmp_path, "--input", *[path for path in FINDINGS if path.name.split("-")[0] == target])
