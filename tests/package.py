"""Build the distributions in a clean folder, check what is in them, and use what they install.

    python3 tests/package.py                  needs pip and its index, and .venv as tests/run.sh makes it

- The wheel holds every file of the package and nothing else, even if an earlier build left a ``build/`` behind.
- The source distribution holds every file of the project. Its tests can be collected, some of them run, and a wheel can
  be built from it.
- ``twine check`` accepts both.
- In a new environment with the wheel and numpy alone, every command says the version, and ``megatron-bfp`` builds an
  index, reports on it and verifies it. The checkout is not on the path.
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
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", ".git", ".venv*", ".*_cache", ".hypothesis")
OUTPUTS = {"build", "dist", "site", "quickstart"}
"""Folders that a checkout may have after builds and the quickstart."""
OF_BUILDING = ("PKG-INFO", "setup.cfg", "megatron_bfp.egg-info/")
"""What building adds to a source distribution."""
COMMANDS = (
    ["megatron-bfp"],
    ["megatron-bfp-preprocess"],
    ["megatron-bfp-report"],
    ["python", "-m", "megatron_bfp"],
)
RUN_FROM_SOURCE = (
    "tests/guarantees/test_cases.py",
    "tests/samples/test_order.py",
    "tests/sequence_index/test_splits.py",
)
MAKE_DATASET = """
import sys, megatron_bfp
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
assert sys.argv[1] in megatron_bfp.__file__, megatron_bfp.__file__
assert len(megatron_bfp.pack([3, 5, 8, 1], 8)) == 3
with IndexedDatasetWriter(sys.argv[2], "uint16") as writer:
    for length in (3, 5, 8, 1):
        writer.add(list(range(length)), [length], [1])
    writer.finalize()
"""


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the checkout on Python's path, with all output in one text."""
    words = [str(word) for word in command]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(words, cwd=folder, env=kept | environment, text=True, **output)


def call(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """The output of a command that must succeed."""
    done = run(command, folder, **environment)
    if done.returncode:
        fail(f"exit status {done.returncode} of {' '.join(map(str, command))}\n{done.stdout[-5000:]}")
    return done.stdout


def fail(message: str) -> None:
    """End with exit status 1 and a message."""
    sys.exit(f"tests/package.py: {message}")


def check_same(what: str, contents: set[str], expected: set[str]) -> None:
    """Stop if two sets of file names differ."""
    if contents != expected:
        fail(f"{what}: missing {sorted(expected - contents)}, should not be there {sorted(contents - expected)}")


def left_out(folder: str, names: list[str]) -> set[str]:
    """What is no source, for ``shutil.copytree``."""
    return LEFT_OUT(folder, names) | (OUTPUTS if folder == str(ROOT) else set())


def files_of(folder: Path) -> set[str]:
    """All files below a folder, by their paths from it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def check_wheel(wheel: Path, source: Path) -> None:
    """The package's files, besides metadata."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    check_same(wheel.name, names, {f"megatron_bfp/{name}" for name in files_of(source / "megatron_bfp")})


def check_sdist(sdist: Path, source: Path, folder: Path) -> Path:
    """All of the project's files; returns the folder that it unpacks to."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    check_same(sdist.name, {name for name in files_of(unpacked) if not name.startswith(OF_BUILDING)}, files_of(source))
    return unpacked


def check_tests(unpacked: Path) -> None:
    """The tests of the source distribution are complete, and run."""
    python = ROOT / ".venv/bin/python"
    pytest = [python, "-m", "pytest", "-c", "tests/pytest.ini", "-q", "-p", "no:cacheprovider"]
    # The libraries of the ecosystem are installed later, by tests/run.sh --ecosystem
    call([*pytest, "--collect-only", "tests", "--ignore=tests/ecosystem"], unpacked, PYTHONPATH=str(unpacked))
    print(call([*pytest, *RUN_FROM_SOURCE], unpacked, PYTHONPATH=str(unpacked)).splitlines()[-1])


def check_installed(wheel: Path, folder: Path, version: str) -> None:
    """The commands of the wheel in an environment of its own."""
    environment, prefix = folder / "installed", folder / "data"
    call([sys.executable, "-m", "venv", environment], folder)
    call([environment / "bin/pip", "install", "--quiet", wheel], folder)
    for name, *words in COMMANDS:
        printed = call([environment / "bin" / name, *words, "--version"], folder)
        if printed.split()[-1] != version:
            fail(f"{' '.join([name, *words])} --version prints {printed!r}, not {version}")
    call([environment / "bin/python", "-c", MAKE_DATASET, environment, prefix], folder)
    check_index(environment / "bin", prefix)


def check_index(commands: Path, prefix: Path) -> None:
    """``megatron-bfp`` builds an index, reports on it, verifies it, and notices damage."""
    command = commands / "megatron-bfp"
    call([command, "index", prefix, "--seq-length", "8"], prefix.parent)
    for reporting in ([command, "report"], [commands / "megatron-bfp-report"]):
        report = call([*reporting, prefix, "--seq-length", "8"], prefix.parent)
        if "cut needlessly" not in report.lower():
            fail(f"the installed report prints {report!r}")
    call([command, "verify", prefix], prefix.parent)
    (array, *_) = sorted(Path(f"{prefix}.bfp").rglob("*.npy"))
    array.write_bytes(array.read_bytes()[:-1] + b"\xff")
    if run([command, "verify", prefix], prefix.parent).returncode == 0:
        fail(f"megatron-bfp verify accepts {array} with another last byte")


def main() -> int:
    """Build and check; returns 0."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="package-") as name:
        folder = Path(name)
        source, tools, built = folder / "source", folder / "tools", folder / "dist"
        shutil.copytree(ROOT, source, ignore=left_out)
        call([sys.executable, "-m", "venv", tools], folder)
        release = ["--quiet", "--constraint", ROOT / "constraints.txt", "build", "twine"]
        call([tools / "bin/pip", "install", *release], folder)
        leftover = folder / "with_leftover/build/lib/megatron_bfp/of_an_earlier_build.py"
        shutil.copytree(source, folder / "with_leftover")
        leftover.parent.mkdir(parents=True)
        leftover.write_text("")
        build = [tools / "bin/python", "-m", "build", "--sdist", "--wheel", "--outdir", built]
        call([*build, folder / "with_leftover"], folder)
        (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
        call([tools / "bin/twine", "check", "--strict", wheel, sdist], folder)
        check_wheel(wheel, source)
        unpacked = check_sdist(sdist, source, folder)
        call([tools / "bin/pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "again", unpacked], folder)
        check_wheel(folder / "again" / wheel.name, source)
        check_tests(unpacked)
        check_installed(wheel, folder, version=wheel.name.split("-")[1])
        print(f"{wheel.name} and {sdist.name} are right; this took {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
