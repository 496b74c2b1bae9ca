"""The tree of the package: which folder may import which, and how large folders and files may be."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers.datasets import ROOT

PACKAGE = ROOT / "megatron_bfp"
FOUNDATION = {"_version", "arguments", "console", "errors", "files", "optional", "progress", "tables"}
"""Modules of the package's root that every folder may import."""
ARROWS = {
    "__main__": {"commands"},
    "commands": {"preprocessing", "inspection", "integrations", "huggingface"},
    "huggingface": {"tokenizers"},
    "preprocessing": {"tokenizers", "sequence_index"},
    "inspection": {"sequence_index"},
    "integrations": {"megatron_core"},
    "megatron_core": {"attention", "sequence_index", "samples"},
    "sequence_index": {"packing", "samples"},
    "samples": {"packing"},  # of the same row: a sample is made from the chunks that packing names
    "packing": {"indexed_dataset"},
    "indexed_dataset": set(),
    "tokenizers": set(),
    "attention": set(),
}
"""What each folder may import, beside the foundation; and what that may import, and so on."""
EXCEPTIONS = {
    ("__init__", "integrations"): "the public name install",
    ("__init__", "megatron_core"): "the public names BFPGPTDataset and BFPGPTDatasetConfig, imported when first used",
    ("__init__", "packing"): "the public names Packing and pack",
    ("__init__", "samples"): "the public name BalancedDataset",
    ("attention", "megatron_core"): "its public name with_document_attention, imported when first used",
}
MOST_LINES, MOST_MODULES, MOST_ROOT_MODULES = 400, 14, 12
NUMPY_FOLDERS = ("packing", "indexed_dataset", "sequence_index", "samples")


def modules():
    """Path of each module, by its dotted name below the package."""
    return {_dotted(path): path for path in PACKAGE.rglob("*.py")}


def _dotted(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def imports_of(path):
    """Dotted names of the package's modules that a file imports, at its top or inside functions, and other names."""
    package = path.parent.relative_to(ROOT).parts
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            names = [(*base, alias.name) for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "megatron_bfp":
                inside.add(_module_of(name[1:]))
            else:
                outside.add(name[0])
    return inside, outside


def _module_of(parts):
    """The module that a name is, or is defined in."""
    while parts:
        path = PACKAGE.joinpath(*parts)
        if path.with_suffix(".py").exists():
            return ".".join(parts)
        if (path / "__init__.py").exists():
            return ".".join((*parts, "__init__"))
        parts = parts[:-1]
    return "__init__"


def allowed(folder):
    """All folders and root modules that one may import: itself, the foundation, and what its arrows lead to."""
    below = {folder} | FOUNDATION
    for other in ARROWS.get(folder, ()):
        below |= allowed(other)
    return below


def test_every_arrow_goes_downwards():
    upward = set()
    for name, path in modules().items():
        folder = name.split(".")[0]
        others = {imported.split(".")[0] for imported in imports_of(path)[0]} - allowed(folder)
        upward |= {f"{name} imports {other}" for other in others if (folder, other) not in EXCEPTIONS}
    assert not upward, "\n".join(sorted(upward))


def test_every_exception_is_still_one():
    arrows = {
        (name.split(".")[0], imported.split(".")[0])
        for name, path in modules().items()
        for imported in imports_of(path)[0]
    }
    assert set(EXCEPTIONS) <= arrows


def test_no_modules_import_each_other_in_a_circle():
    graph = {
        name: {other for other in imports_of(path)[0] if (name.split(".")[0], other.split(".")[0]) not in EXCEPTIONS}
        for name, path in modules().items()
    }
    graph = {name: others - {name, "__init__"} for name, others in graph.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_an_upward_arrow_and_a_circle_would_be_noticed(tmp_path, monkeypatch):
    """The control, with an import inside a function."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "megatron_bfp")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for name, code in {
        "packing/table.py": "def later():\n    from ..sequence_index import reader",
        "sequence_index/reader.py": "from ..packing.table import later",
    }.items():
        path = tmp_path / "megatron_bfp" / name
        path.parent.mkdir(parents=True)
        path.write_text(code)
    with pytest.raises(AssertionError, match="packing.table imports sequence_index"):
        test_every_arrow_goes_downwards()
    with pytest.raises(pytest.fail.Exception, match="packing.table -> sequence_index.reader|reader -> packing.table"):
        test_no_modules_import_each_other_in_a_circle()


def test_folders_that_promise_it_import_neither_torch_nor_megatron():
    for name, path in modules().items():
        folder, others = name.split(".")[0], imports_of(path)[1]
        if folder in NUMPY_FOLDERS:
            assert others <= {"numpy", *sys.stdlib_module_names}, f"{name} imports {others}"
        if folder == "attention":
            assert "megatron" not in others, f"{name} imports megatron"


def test_examples_never_read_index_json():
    assert not [path for path in (ROOT / "examples").rglob("*.py") if "index.json" in path.read_text()]


def test_packing_loads_only_numpy_and_the_standard_library():
    code = (
        "import sys; before = set(sys.modules)\n"
        "import megatron_bfp; megatron_bfp.pack([14, 7, 5, 2, 3], 8)\n"
        "names = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(names - set(sys.stdlib_module_names) - {'numpy', 'megatron_bfp'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_folders_and_files_stay_small():
    too_long = {
        f"{_dotted(path)} has {lines} lines"
        for path in modules().values()
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert not too_long, "\n".join(sorted(too_long))
    for folder in [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]:
        number = len(list(folder.glob("*.py")))
        assert number <= (MOST_ROOT_MODULES if folder == PACKAGE else MOST_MODULES), f"{folder} has {number} modules"


def names_in(path):
    """What a file's own variables, parameters, functions and attributes are called, with the line of each."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno


@pytest.mark.parametrize("folder", ["megatron_bfp", "examples"])
def test_nothing_is_called_found_or_place(folder):
    nameless = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(Path(ROOT, folder).rglob("*.py"))
        for name, line in names_in(path)
        if name in ("found", "place")
    ]
    assert not nameless, "\n".join(nameless)
