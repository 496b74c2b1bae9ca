"""Check that every extra resolves under constraints.txt from the package index alone, as on a user's machine.

    python3 tests/resolve.py                              Python 3.10 to 3.13, each extra and all together
    python3 tests/resolve.py --python 3.12 --extra test

Each resolution prints a line. The exit status is 1 if one of them fails.

Two resolvers do the work, both pinned:

- uv resolves each extra. It reads the metadata of a package once for all resolutions and downloads no wheel, so that a
  resolution takes a second or two. It needs no interpreter of the Python version that it resolves for.
- pip, which most people install with, resolves all extras together on every Python that is installed here. That covers
  the single extras too: what satisfies all requirements at once satisfies a part of them. pip also builds what the
  index has as source only (deepspeed), as it would for a user.

The settings of this machine (configuration files, ``PIP_*`` and ``UV_*`` variables such as find-links) are switched
off, since they can hide what is missing from the index. Only ``PIP_CERT`` is kept. pip's ``fast-deps`` saves the
download of wheels whose metadata the index can serve alone.
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
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
RESOLVERS = ("pip==26.3", "uv==0.13.9")
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt", "megatron_bfp")
ALONE = "no extra"
TOGETHER = "all extras"
AT_ONCE = 6
"""Resolutions. They wait for the index for longer than they compute."""


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
    """The environment without the settings of pip and uv on this machine, except for the certificates."""
    settings = ("PIP_", "UV_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name == "PIP_CERT" or not name.startswith(settings)}
    if "PIP_CERT" in kept:
        kept.setdefault("SSL_CERT_FILE", kept["PIP_CERT"])
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def call(command: Sequence[str | Path], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command in the plain environment, with all output in one text."""
    words = [str(word) for word in command]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(words, cwd=folder, env=plain_environment(), text=True, **output)


def must(command: Sequence[str | Path], folder: Path = ROOT) -> None:
    """Run a command that has to succeed."""
    done = call(command, folder)
    if done.returncode:
        sys.exit(f"tests/resolve.py: failed: {' '.join(map(str, command))}\n{done.stdout}")


def interpreter(version: str) -> str | None:
    """The path of a Python of this version, or None."""
    done = call(["bash", ROOT / "tests/find_python.sh", version])
    return done.stdout.strip() if done.returncode == 0 else None


def resolve_by_uv(folder: Path, version: str, python: str | None, extra: str) -> bool:
    """Resolve an extra for a version of Python; returns whether that works."""
    command: list[str | Path] = [folder / "tools/bin/uv", "pip", "compile", "--quiet", "--no-config", "--no-header"]
    command += ["--cache-dir", folder / "cache", "--python", python or sys.executable, "--python-version", version]
    command += {ALONE: [], TOGETHER: ["--all-extras"]}.get(extra, ["--extra", extra])
    return tell(f"{extra}, Python {version}", [*command, "--constraint", "constraints.txt", "pyproject.toml"], ROOT)


def resolve_by_pip(folder: Path, version: str, python: str, extra: str) -> bool:
    """The same with pip, in an empty environment and a copy of the sources: pip writes into what it looks at."""
    source, environment = folder / f"source-{version}", folder / f"venv-{version}"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    must([python, "-m", "venv", "--without-pip", environment])
    command = [folder / "tools/bin/pip", "--python", environment / "bin/python", "install", "--dry-run"]
    command += [
        "--use-feature",
        "fast-deps",
        "--constraint",
        "constraints.txt",
        requirement(extra, extras_of_project()),
    ]
    return tell(f"{extra}, Python {version}, by pip", command, source)


def tell(name: str, command: Sequence[str | Path], folder: Path) -> bool:
    """Run a resolver; print whether it finds a solution, and its output if not."""
    start = time.monotonic()
    done = call(command, folder)
    seconds = round(time.monotonic() - start)
    resolves = done.returncode == 0
    line = f"{'resolves' if resolves else 'DOES NOT RESOLVE'}: {name}, {seconds // 60}:{seconds % 60:02}"
    print(line if resolves else f"{line}\n{done.stdout}", flush=True)
    return resolves


def resolutions(folder: Path, versions: Sequence[str], chosen: Sequence[str] | None) -> list[partial[bool]]:
    """What has to be done, the slowest first."""
    pythons = {version: interpreter(version) for version in versions}
    extras = chosen or [ALONE, *extras_of_project(), TOGETHER]
    by_pip = []
    for version, python in pythons.items():
        if python is None:
            print(f"no Python {version} here: uv alone resolves for it", flush=True)
        elif TOGETHER in extras:
            by_pip.append(partial(resolve_by_pip, folder, version, python, TOGETHER))
    by_uv = [partial(resolve_by_uv, folder, *python, extra) for extra in extras for python in pythons.items()]
    return by_pip + by_uv


def main() -> int:
    """Resolve everything; returns 1 if something does not resolve."""
    parser = argparse.ArgumentParser(description="Check that each extra resolves from the package index alone.")
    parser.add_argument("--python", nargs="+", default=VERSIONS, metavar="X.Y", help="versions of Python")
    extras_help = f"extras to look at (default: each, '{ALONE}' and '{TOGETHER}')"
    parser.add_argument("--extra", nargs="+", metavar="NAME", help=extras_help)
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="resolve-") as name:
        folder = Path(name)
        must([sys.executable, "-m", "venv", folder / "tools"])
        must([folder / "tools/bin/python", "-m", "pip", "install", "--quiet", *RESOLVERS])
        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = [pool.submit(resolution) for resolution in resolutions(folder, options.python, options.extra)]
        resolves = all([result.result() for result in results])
    print(f"resolving took {time.monotonic() - start:.0f} s", flush=True)
    return 0 if resolves else 1


if __name__ == "__main__":
    sys.exit(main())
