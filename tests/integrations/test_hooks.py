"""Changing modules right after their import: finders, replaced functions, the first call of a function."""

import importlib
import importlib.util
import sys
import textwrap
import types

import pytest

from megatron_bfp import IntegrationError
from megatron_bfp.errors import UnsupportedMegatronError
from megatron_bfp.integrations import hooks


def package(folder, **files):
    """A package called waited in ``folder``."""
    (folder / "waited").mkdir()
    (folder / "waited" / "__init__.py").write_text("")
    for name, text in files.items():
        (folder / "waited" / f"{name}.py").write_text(textwrap.dedent(text))


def test_a_module_is_changed_before_others_bind_its_names(tmp_path, monkeypatch):
    package(tmp_path, options="def parse(a): return a", user="from waited.options import parse")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []

    def double(module):
        seen.append(module.__name__)
        hooks.replace(module, "parse", "a", lambda parse: lambda a: 2 * parse(a))

    monkeypatch.setattr(sys, "meta_path", [hooks.AfterImport({"waited.options": double}), *sys.meta_path])
    from waited import user

    assert user.parse(3) == 6 and seen == ["waited.options"]
    for name in ("waited", "waited.options", "waited.user"):
        sys.modules.pop(name)


@pytest.fixture
def hooked(tmp_path, monkeypatch):
    """A package whose ``options`` module waits for a hook that counts its calls in ``CHANGED``."""
    package(
        tmp_path,
        options="""
            import os
            if os.environ.get("FAIL"):
                raise ValueError("not yet")
            VALUE = 1
            """,
        others="VALUE = 1",
    )

    def hook(module):
        module.VALUE += 1
        module.CHANGED = getattr(module, "CHANGED", 0) + 1

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(hooks, "_waited_for", {"waited.others_that_is_not_there"})
    hooks.wait_for({"waited.options": hook})
    yield tmp_path
    for name in ("waited", "waited.options", "waited.others"):
        sys.modules.pop(name, None)


def test_fault_A17_a_hook_outlives_probes_failures_and_reloads(hooked, monkeypatch):
    for _ in range(2):
        assert importlib.util.find_spec("waited.options") is not None
    hooks.check_hooks(["waited.options"])
    monkeypatch.setenv("FAIL", "1")
    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            importlib.import_module("waited.options")
    monkeypatch.delenv("FAIL")
    module = importlib.import_module("waited.options")
    assert (module.VALUE, module.CHANGED) == (2, 1)
    assert importlib.util.find_spec("waited.options") is module.__spec__
    importlib.reload(module)
    assert (module.VALUE, module.CHANGED) == (2, 2)  # executed anew, and changed anew
    del sys.modules["waited.options"]
    assert importlib.import_module("waited.options").VALUE == 2
    assert importlib.import_module("waited.others").VALUE == 1


def test_fault_A17_a_tool_that_executes_a_module_itself_gets_it_changed(hooked):
    spec = importlib.util.find_spec("waited.options")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.VALUE, module.CHANGED) == (2, 1)
    lazy = importlib.util.find_spec("waited.options")
    lazy.loader = importlib.util.LazyLoader(lazy.loader)
    module = importlib.util.module_from_spec(lazy)
    lazy.loader.exec_module(module)
    assert module.VALUE == 2


def test_fault_A17_a_loader_of_several_modules_calls_a_hook_for_one():
    class Loader:
        def exec_module(self, module):
            module.VALUE = 1

    shared, calls = Loader(), []
    for _ in range(3):
        hooks._call_after_execution(shared, "one", calls.append)
    hooks._call_after_execution(shared, "two", calls.append)
    modules = [types.ModuleType(name) for name in ("one", "two", "three")]
    for module in modules:
        shared.exec_module(module)
    assert calls == modules[:2] and all(module.VALUE == 1 for module in modules)


def test_fault_A17_a_module_that_came_past_the_hook_is_noticed(hooked, monkeypatch):
    class Elsewhere:
        def find_spec(self, name, path, target=None):
            return importlib.machinery.PathFinder.find_spec(name, path, target)

    monkeypatch.setattr(sys, "meta_path", [Elsewhere(), *sys.meta_path])
    with pytest.raises(UnsupportedMegatronError, match="waited.options is imported without the changes"):
        hooks.check_hooks(["waited.others_that_is_not_there", "waited.options"])
    importlib.import_module("waited.options")
    with pytest.raises(UnsupportedMegatronError, match="waited.options is imported without the changes"):
        hooks.check_hooks(["waited.options"])
    sys.meta_path.pop(0)
    importlib.reload(sys.modules["waited.options"])
    hooks.check_hooks(["waited.options", "waited.others"])  # nobody waits for the other one


class Known:
    def method(self, value, scale=1):
        return value * scale

    @staticmethod
    def function(value):
        return value


def test_a_function_is_replaced_if_its_parameters_are_known():
    hooks.replace(Known, "method", "self, value, scale", lambda original: lambda *rest: original(*rest) + 1)
    assert Known().method(3, 2) == 7


@pytest.mark.parametrize(
    "name, parameters, message",
    [
        ("gone", "self", "has no Known.gone"),
        ("function", "value, more", r"has Known.function\(value\), expected \(value, more\)"),
    ],
)
def test_an_unknown_version_is_refused(name, parameters, message):
    with pytest.raises(IntegrationError, match=message):
        hooks.replace(Known, name, parameters, lambda original: original)


def test_the_arguments_of_a_first_call_can_be_changed():
    def train_step(data, model, *others, optimizer=None):
        """Train."""
        return data, model, others, optimizer

    calls = []

    def prepare(arguments):
        calls.append(dict(arguments))
        arguments["model"] = "watched"

    prepared = hooks.prepare_first_call(train_step, prepare)
    assert prepared.__doc__ == "Train."
    assert prepared(1, "model", 2, optimizer=3) == (1, "watched", (2,), 3)
    assert prepared(1, "model", 2, optimizer=3) == (1, "model", (2,), 3)
    assert calls == [{"data": 1, "model": "model", "others": (2,), "optimizer": 3}]


def test_a_first_call_that_is_refused_never_happens():
    def refuse(arguments):
        raise IntegrationError("unknown layer")

    calls = []
    prepared = hooks.prepare_first_call(lambda model: calls.append(model), refuse)
    with pytest.raises(IntegrationError, match="unknown layer"):
        prepared("model")
    assert calls == []
