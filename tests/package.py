"""Build the distributions in a clean folder and check what is in them.

    python3 tests/package.py                  needs pip and its index, and .venv as tests/run.sh makes it

- The wheel holds every module of the package and nothing else, also where a ``build/`` was left by an earlier build.
- The source distribution holds what its tests need: they are collected from it, and some are run. A wheel can be built
  from it.
- ``twine check`` accepts both.
- Installed into a new environment, with numpy alone, the commands run and say the version.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("build", "dist", "quickstart", "__pycache__", "*.egg-info", ".git", ".venv*", ".*_cache", ".hypothesis")
NEEDED = ("LICENSE", "README.md", "pyproject.toml", "constraints.txt", "ruff.toml", ".ci/run", "tests/run.sh")
"""Some files of the source distribution, beside all of the folders in FOLDERS."""
FOLDERS = ("megatron_bfp", "examples", "tools", "tests")
COMMANDS = (["megatron-bfp-preprocess"], ["megatron-bfp-report"], ["python", "-m", "megatron_bfp"])
RUN_FROM_SOURCE = (
    "tests/guarantees/test_cases.py",
    "tests/samples/test_order.py",
    "tests/sequence_index/test_splits.py",
)
USE = """
import sys, megatron_bfp
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
assert sys.argv[1] in megatron_bfp.__file__, megatron_bfp.__file__
assert len(megatron_bfp.pack([3, 5, 8, 1], 8)) == 3
with IndexedDatasetWriter(sys.argv[1] + "/data", "uint16") as writer:
    for length in (3, 5, 8, 1):
        writer.add(list(range(length)), [length], [1])
    writer.finalize()
"""


def call(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """The output of a command that must succeed."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [str(word) for word in command]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, **settings)
    if done.returncode:
        sys.exit(f"tests/package.py: exit status {done.returncode} of {' '.join(command)}\n{done.stdout}")
    return done.stdout


def check_same(what: str, contents: set[str], expected: set[str]) -> None:
    """Stop if two sets of file names differ."""
    if contents != expected:
        missing, others = sorted(expected - contents), sorted(contents - expected)
        sys.exit(f"tests/package.py: {what}: missing {missing}, should not be there {others}")


def files_of(folder: Path, *names: str) -> set[str]:
    """Files in some folders, by their paths from ``folder``."""
    paths = (path for name in names for path in (folder / name).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in paths}


def check_wheel(wheel: Path, source: Path) -> None:
    """All modules, the marker of types, and metadata."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    check_same(wheel.name, names, files_of(source, "megatron_bfp"))


def check_sdist(sdist: Path, source: Path, folder: Path) -> Path:
    """All of the project's folders; returns the folder that it unpacks to."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    check_same(sdist.name, files_of(unpacked, *FOLDERS), files_of(source, *FOLDERS))
    check_same(sdist.name, {name for name in NEEDED if (unpacked / name).exists()}, set(NEEDED))
    return unpacked


def check_installed(wheel: Path, folder: Path, version: str) -> None:
    """The commands of the wheel in an environment of its own."""
    environment = folder / "installed"
    call([sys.executable, "-m", "venv", environment], folder)
    call([environment / "bin/pip", "install", "--quiet", wheel], folder)
    for command in COMMANDS:
        printed = call([environment / "bin" / command[0], *command[1:], "--version"], folder)
        if printed.split()[-1] != version:
            sys.exit(f"tests/package.py: {' '.join(command)} --version prints {printed!r}, not {version}")
    call([environment / "bin/python", "-c", USE, environment], folder)
    report = call([environment / "bin/megatron-bfp-report", environment / "data", "--seq-length", "8"], folder)
    if "Documents cut needlessly" not in report:
        sys.exit(f"tests/package.py: the installed report prints {report!r}")


def check_tests(unpacked: Path) -> None:
    """The tests of the source distribution are complete, and run."""
    python = ROOT / ".venv/bin/python"
    pytest = [python, "-m", "pytest", "-c", "tests/pytest.ini", "-q", "-p", "no:cacheprovider"]
    call([*pytest, "--collect-only", "-m", "not integration", "tests"], unpacked, PYTHONPATH=str(unpacked))
    print(call([*pytest, *RUN_FROM_SOURCE], unpacked, PYTHONPATH=str(unpacked)).splitlines()[-1])


def main() -> int:
    """Build and check; returns 0."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="package-") as name:
        folder = Path(name)
        source = folder / "source"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
        tools = folder / "tools"
        call([sys.executable, "-m", "venv", tools], folder)
        release = ["--quiet", "--constraint", ROOT / "constraints.txt", "build", "twine"]
        call([tools / "bin/pip", "install", *release], folder)
        leftover = source / "build/lib/megatron_bfp/of_an_earlier_build.py"
        leftover.parent.mkdir(parents=True)
        leftover.write_text("")
        built = folder / "dist"
        call([tools / "bin/python", "-m", "build", "--sdist", "--wheel", "--outdir", built, source], folder)
        (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
        call([tools / "bin/twine", "check", "--strict", wheel, sdist], folder)
        version = wheel.name.split("-")[1]
        check_wheel(wheel, source)
        unpacked = check_sdist(sdist, source, folder)
        call([tools / "bin/pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "again", unpacked], folder)
        check_wheel(folder / "again" / wheel.name, source)
        check_tests(unpacked)
        check_installed(wheel, folder, version)
        print(f"{wheel.name} and {sdist.name} are right; this took {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
