"""Check that pip can install each extra under constraints.txt from the package index alone, as on a user's machine.

    python3 tests/resolve.py                          Python 3.10 to 3.13, all extras: a line each, and exit status 1
                                                      if one does not resolve
    python3 tests/resolve.py --python 3.12 --extra test
    python3 tests/resolve.py --no-interpreters        as where none of the interpreters is there

The configuration of pip on this machine (files, ``PIP_*`` variables such as find-links) is switched off, since it can
hide what is missing from the index; only ``PIP_CERT`` is kept. Each resolution is ``pip install --dry-run --constraint
constraints.txt '.[EXTRA]'`` in an empty environment of its own, with a pinned pip. pip's ``fast-deps`` only saves time:
wheels of gigabytes are asked for their metadata and not downloaded, where the index can do that.

Where an interpreter is missing, pip resolves for it with ``--python-version`` and ``--only-binary=:all:``. pip would
then judge markers such as ``python_version < "3.11"`` by the interpreter it runs in, so it is told which one is meant,
and packages without wheels (deepspeed) are built first, as their wheels are for any Python.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
PIP = "pip==26.3"
WITHOUT_WHEELS = ("deepspeed",)
"""Packages of our extras that the index has as source only."""
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt", "megatron_bfp")
ALONE = "no extra"
TOGETHER = "all extras"

PIP_FOR_VERSION = """
import sys
version = sys.argv.pop(1)
from pip._vendor.packaging import markers
of_this_python = markers.default_environment
def of_that_python():
    return of_this_python() | {"python_version": version, "python_full_version": version + ".0"}
markers.default_environment = of_that_python
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""pip, in an interpreter that takes itself for the version in its first argument where it judges markers."""


def extras_of_project() -> list[str]:
    """The names of all extras in pyproject.toml."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"])


def requirement(extra: str, extras: Sequence[str]) -> str:
    """What pip is asked to install."""
    chosen = {ALONE: "", TOGETHER: f"[{','.join(extras)}]"}.get(extra, f"[{extra}]")
    return f".{chosen}"


def plain_environment() -> dict[str, str]:
    """The environment without what configures pip on this machine, but for its certificates."""
    kept = {name: value for name, value in os.environ.items() if name == "PIP_CERT" or not name.startswith("PIP_")}
    kept.pop("PYTHONPATH", None)
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def call(command: Sequence[str | Path], folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run a command in the plain environment, with all output in one text."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([str(word) for word in command], cwd=folder, env=plain_environment(), **settings)


def must(command: Sequence[str | Path], folder: Path = ROOT) -> str:
    """The output of a command that has to succeed."""
    done = call(command, folder)
    if done.returncode:
        sys.exit(f"tests/resolve.py: failed: {' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def interpreter(version: str) -> str | None:
    """The path of a Python of this version, if there is one."""
    done = call(["bash", ROOT / "tests/find_python.sh", version])
    return done.stdout.strip() if done.returncode == 0 else None


class Resolver:
    """Resolves for one Python version, in folders of its own: pip writes into the source that it looks at."""

    def __init__(self, folder: Path, tools: Path, version: str, python: str | None) -> None:
        self.version = version
        self._source = folder / f"source-{version}"
        self._source.mkdir()
        for name in SOURCES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, self._source / name)
        if python is None:
            self._pip = [tools / "bin/python", "-c", PIP_FOR_VERSION, version]
            self._options = ["--python-version", version, "--only-binary", ":all:", "--target", folder / "target"]
            self._options += ["--find-links", folder / "wheels"]
        else:
            must([python, "-m", "venv", "--without-pip", folder / f"venv-{version}"])
            self._pip = [tools / "bin/pip", "--python", folder / f"venv-{version}/bin/python"]
            self._options = []

    def resolve(self, extra: str, extras: Sequence[str]) -> bool:
        """Print whether an extra resolves, and why it does not."""
        command = [*self._pip, "install", "--dry-run", "--use-feature", "fast-deps", *self._options]
        start = time.monotonic()
        done = call([*command, "--constraint", "constraints.txt", requirement(extra, extras)], self._source)
        seconds = round(time.monotonic() - start)
        resolves = done.returncode == 0
        line = f"{extra}, Python {self.version}, {seconds // 60}:{seconds % 60:02}"
        print(f"{'resolves' if resolves else 'DOES NOT RESOLVE'}: {line}", flush=True)
        if not resolves:
            print(done.stdout, flush=True)
        return resolves


def main() -> int:
    """Resolve everything; returns 1 if something does not resolve."""
    parser = argparse.ArgumentParser(description="Check that each extra resolves from the package index alone.")
    parser.add_argument("--python", nargs="+", default=VERSIONS, metavar="X.Y", help="versions of Python")
    parser.add_argument(
        "--extra", nargs="+", metavar="NAME", help="extras to look at (default: each, and all together)"
    )
    parser.add_argument("--no-interpreters", action="store_true", help="resolve as where no other Python is installed")
    options = parser.parse_args()
    extras = extras_of_project()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="resolve-") as folder_name:
        folder = Path(folder_name)
        tools = folder / "tools"
        must([sys.executable, "-m", "venv", tools])
        must([tools / "bin/python", "-m", "pip", "install", "--quiet", PIP])
        pythons = {version: None if options.no_interpreters else interpreter(version) for version in options.python}
        if None in pythons.values():
            for version in (version for version, python in pythons.items() if python is None):
                print(f"no Python {version} here: resolving for it from Python {sys.version.split()[0]}", flush=True)
            build = [tools / "bin/pip", "wheel", "--no-deps", "--constraint", "constraints.txt"]
            must([*build, "--wheel-dir", folder / "wheels", *WITHOUT_WHEELS])
        resolvers = [Resolver(folder, tools, version, python) for version, python in pythons.items()]

        def resolve_all(resolver: Resolver) -> bool:
            return all([resolver.resolve(extra, extras) for extra in options.extra or [ALONE, *extras, TOGETHER]])

        with ThreadPoolExecutor(2) as pool:
            resolves = all(list(pool.map(resolve_all, resolvers)))
    print(f"resolving took {time.monotonic() - start:.0f} s", flush=True)
    return 0 if resolves else 1


if __name__ == "__main__":
    sys.exit(main())
