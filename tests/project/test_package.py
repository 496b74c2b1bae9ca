"""The distribution: its metadata, what pip can install with it, and what its commands say without optional packages."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from helpers.datasets import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megatron_bfp

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
COMMANDS = (["tools/preprocess_bfp.py"], ["tools/report_bfp.py"], ["-m", "megatron_bfp"])


def requirements(lines, python):
    """Those of the lines of a requirements file or an extra that apply to a Python on Linux."""
    environment = {"python_version": python, "python_full_version": f"{python}.1"}
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    return [wanted for wanted in map(Requirement, lines) if not wanted.marker or wanted.marker.evaluate(environment)]


def pins(python):
    """Package -> version in constraints.txt."""
    versions = {}
    for pin in requirements((ROOT / "constraints.txt").read_text().splitlines(), python):
        (specifier,) = pin.specifier
        assert specifier.operator == "==" and canonicalize_name(pin.name) not in versions
        versions[canonicalize_name(pin.name)] = specifier.version
    return versions


@pytest.mark.parametrize("python", PYTHONS)
def test_fault_C01_each_range_holds_the_version_that_is_pinned(python):
    pinned = pins(python)
    for extra, lines in {"": PROJECT["dependencies"], **EXTRAS}.items():
        for wanted in requirements(lines, python):
            if wanted.name == PROJECT["name"]:
                assert wanted.extras <= set(EXTRAS)
            else:
                version = pinned[canonicalize_name(wanted.name)]
                assert wanted.specifier.contains(version), f"{extra}: {wanted}, pinned is {version}"


def test_fault_C01_ranges_that_contradict_a_pin_are_seen():
    (old,) = requirements(["regex>=2026.11"], "3.10")
    assert not old.specifier.contains(pins("3.10")["regex"]) and old.specifier.contains(pins("3.11")["regex"])


def test_fault_C01_torch_is_pinned_with_its_triton():
    """PyPI's torch 2.13.0 for Linux needs exactly this one; a CPU build from elsewhere needs none."""
    for python in PYTHONS:
        assert (pins(python)["torch"], pins(python)["triton"]) == ("2.13.0", "3.7.1")


def test_fault_C01_extras_are_resolved_before_a_submission():
    resolve = runpy.run_path(str(ROOT / "tests/resolve.py"))
    assert resolve["VERSIONS"] == PYTHONS and set(resolve["extras_of_project"]()) == set(EXTRAS)
    assert resolve["requirement"]("all extras", list(EXTRAS)) == f".[{','.join(EXTRAS)}]"
    assert "tests/resolve.py" in (ROOT / ".ci/run").read_text()


def test_fault_C01_the_configuration_of_pip_is_switched_off(monkeypatch):
    environment = runpy.run_path(str(ROOT / "tests/resolve.py"))["plain_environment"]
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE", "PIP_CERT"):
        monkeypatch.setenv(name, "/folder")
    kept = {name: value for name, value in environment().items() if name.startswith("PIP_")}
    assert kept.pop("PIP_CERT") == "/folder" and kept.pop("PIP_CONFIG_FILE") == os.devnull
    assert set(kept) == {"PIP_DISABLE_PIP_VERSION_CHECK", "PIP_NO_INPUT"}


def test_fault_C08_the_trainer_finds_every_tokenizer_in_its_extra():
    names = {wanted.name for wanted in requirements(EXTRAS["deepspeed"], "3.11")}
    assert {"tokenizers", "sentencepiece", "tiktoken", "torch", "megatron-core", "deepspeed"} <= names


def test_fault_C12_the_version_is_said_in_one_place():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+", megatron_bfp.__version__)
    said = [path for path in (ROOT / "megatron_bfp").rglob("*.py") if megatron_bfp.__version__ in path.read_text()]
    assert [path.name for path in said] == ["_version.py"]
    assert megatron_bfp.__version__ not in (ROOT / "setup.py").read_text() + (ROOT / "pyproject.toml").read_text()


def test_the_citation_names_the_version_and_the_paper():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {megatron_bfp.__version__}\n" in citation
    assert "Fewer Truncations Improve Language Modeling" in citation.partition("preferred-citation:")[2]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[-1])
def test_fault_C12_commands_say_their_version(command):
    done = subprocess.run([sys.executable, *command, "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[-1] == megatron_bfp.__version__ and done.stderr == ""


def test_fault_C12_the_project_describes_itself():
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["authors"] and PROJECT["readme"] == "README.md"
    assert (ROOT / "megatron_bfp/py.typed").exists() and "py.typed" in (ROOT / "pyproject.toml").read_text()
    for name, target in PROJECT["scripts"].items():
        module, function = target.split(":")
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    assert not re.search(r"megatron-bfp\[flash-attn\]", text)
    assert set(re.findall(r"megatron-bfp(?:-[a-z]+)?", text)) == set(PROJECT["scripts"])


def test_fault_C12_what_an_earlier_build_left_is_not_built_again(tmp_path):
    pytest.importorskip("setuptools", minversion="62", reason="tests/package.py builds with its own")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "megatron_bfp").mkdir()
    for name in ("__init__.py", "_version.py"):
        shutil.copy(ROOT / "megatron_bfp" / name, tmp_path / "megatron_bfp")
    built = tmp_path / "build/lib/megatron_bfp"
    built.mkdir(parents=True)
    (built / "of_an_earlier_build.py").write_text("")
    # setup.py alone, as this setuptools may not know all of pyproject.toml
    (tmp_path / "pyproject.toml").unlink()
    (tmp_path / "setup.cfg").write_text("[metadata]\nname = x\n[options]\npackages = megatron_bfp\n")
    done = subprocess.run([sys.executable, "setup.py", "-q", "build"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in built.glob("*.py")) == ["__init__.py", "_version.py"]


def test_fault_C12_the_source_distribution_holds_what_tests_need():
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    assert {"graft examples", "graft tests", "graft tools", "graft .ci", "prune build"} <= set(lines)
    assert "tests/package.py" in (ROOT / ".ci/run").read_text()


WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # as if it were not installed
{}
"""


def without(packages, code, *arguments, **settings):
    """Run code in a Python that lacks some packages."""
    command = [sys.executable, "-c", WITHOUT.format(code), packages, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **settings)


@pytest.mark.parametrize(
    "missing, code",
    [
        ("torch", "from megatron_bfp import BFPGPTDataset"),
        ("megatron", "from megatron_bfp import BFPGPTDatasetConfig"),
        ("torch", "import megatron_bfp.megatron_core.gpt_dataset"),
        ("torch", "from megatron_bfp.attention import document_boundaries"),
        ("megatron", "from megatron_bfp.attention import with_document_attention"),
        ("torch", "import megatron_bfp.attention.kernels"),
        ("torch", "import megatron_bfp.megatron_core.sample_tensors"),
    ],
)
def test_fault_C08_what_is_not_installed_is_named_with_its_pip_command(missing, code):
    done = without(missing, code)
    last = done.stderr.splitlines()[-1]
    package = {"megatron": "megatron-core"}.get(missing, missing)
    assert done.returncode == 1 and last.startswith("ModuleNotFoundError: megatron_bfp.")
    assert f"needs the {package} package, which is missing: pip install 'megatron-bfp[deepspeed]'" in last
    assert without("pyflakes", "import megatron_bfp").returncode == 0


def test_fault_C08_dir_lists_what_is_imported_when_it_is_used():
    done = without("torch", "import megatron_bfp; print(*dir(megatron_bfp))")
    assert {"BFPGPTDataset", "BFPGPTDatasetConfig", "pack", "__version__"} <= set(done.stdout.split())
    assert set(megatron_bfp.__all__) <= set(dir(megatron_bfp))
    with pytest.raises(AttributeError, match="has no attribute 'BFPDataset'"):
        megatron_bfp.BFPDataset  # noqa: B018


def test_fault_C08_the_report_without_matplotlib_is_text_and_a_line(write_dataset, tmp_path):
    prefix = write_dataset([[1, 2, 3], [4, 5, 6, 7, 8], [9, 9]]).prefix
    code = "from megatron_bfp.commands import report; report.main(sys.argv[2:])"
    arguments = (prefix, "--seq-length", 5, "--output", tmp_path / "report")
    done = without("matplotlib", code, *arguments)
    assert done.returncode == 0 and "Documents cut needlessly" in done.stdout, done.stderr
    assert "no truncations.png: it needs matplotlib, pip install 'megatron-bfp[report]'" in done.stdout
    assert sorted(os.listdir(tmp_path / "report")) == ["report.json", "report.md"]
    assert "truncations.png" not in (tmp_path / "report/report.md").read_text()


def test_fault_C08_a_command_without_a_package_says_one_line():
    code = """
from megatron_bfp.console import run
def main():
    import matplotlib
sys.exit(run(main, "tool"))"""
    done = without("matplotlib", code)
    line = "tool: error: tool needs the matplotlib package, which is missing: pip install 'megatron-bfp[report]'\\n"
    assert (done.returncode, done.stderr) == (2, line.replace("\\n", "\n"))
    done = without("own_module", code.replace("matplotlib", "own_module"))  # not ours to explain
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_fault_C08_every_optional_package_belongs_to_an_extra():
    """Each third-party package that the sources import is one that ``optional`` can explain, or one of Megatron's."""
    from megatron_bfp.optional import EXTRAS as EXPLAINED
    from megatron_bfp.optional import PACKAGES

    own = {path.stem for path in (ROOT / "megatron_bfp").rglob("*.py")} | {"megatron_bfp"}
    of_kernels = {"flash_attn", "flash_attn_interface", "transformer_engine"}  # used only if they are there
    imported = set()
    for path in (ROOT / "megatron_bfp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    others = imported - set(sys.stdlib_module_names) - own - of_kernels - {"numpy"}
    assert others <= set(EXPLAINED), others - set(EXPLAINED)
    for module, extra in EXPLAINED.items():
        assert PACKAGES.get(module, module) in {wanted.name for wanted in requirements(EXTRAS[extra], "3.11")}, module
