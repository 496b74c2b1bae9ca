"""What the Dockerfile installs, beside what its base image has.

python requirements.py base                      the base's own packages, each with its version, as constraints
python requirements.py extras NAME ...           the requirements of extras of the pyproject.toml in this folder
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import tomllib

BASE = ("torch", "torchvision", "triton", "pytorch-triton", "flash-attn", "transformer-engine", "apex", "numpy")
"""torch, and what is compiled against it or against its numpy."""


def main(words: list[str]) -> None:
    """Print the lines of a requirements file."""
    lines = constraints() if words[0] == "base" else requirements(Path(__file__).with_name("pyproject.toml"), words[1:])
    print("\n".join(lines))


def constraints() -> Iterator[str]:
    """A line for each package of the base that is installed."""
    for name in BASE:
        try:
            yield f"{name}=={importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def requirements(project: Path, extras: list[str]) -> list[str]:
    """The requirements of extras, without the base's packages."""
    optional = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    lines = dict.fromkeys(line for extra in extras for line in optional[extra])
    return [line for line in lines if re.split(r"[^\w.-]", line, maxsplit=1)[0] not in BASE]


if __name__ == "__main__":
    main(sys.argv[1:])
