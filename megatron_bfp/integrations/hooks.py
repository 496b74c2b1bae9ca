"""Changing a module right after it was executed, before any other module binds its names.

Scripts bind functions by ``from module import name``, so replacing them later has no effect. A finder at the head of
``sys.meta_path`` waits for the modules it was told of and leaves everything else to the finders behind it. It stays
there: a probe with ``importlib.util.find_spec``, an import that fails and a reload are each followed by an import that
must be changed too.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..errors import UnsupportedMegatronError

Hook = Callable[[ModuleType], None]

_MARK = "__changed_by_megatron_bfp__"
"""Set in a module after its hook, and on the ``exec_module`` of a loader that will call one."""


class AfterImport:
    """A finder that calls a hook with each module it is told of, each time after the module is executed.

    Args:
        hooks: module name -> hook.
    """

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self.hooks = dict(hooks)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders have for a module with a hook; None for all other modules."""
        hook = self.hooks.get(name)
        if hook is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find and find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _call_after_execution(spec.loader, name, hook)
                return spec
        return None


def _call_after_execution(loader: Any, name: str, hook: Hook) -> None:
    """Let a loader call ``hook`` after it executed the module ``name``, and no other module it may load."""
    execute = loader.exec_module
    if name in getattr(execute, _MARK, ()):
        return  # it is shared, and was asked for this module before

    def execute_and_change(module: ModuleType) -> None:
        is_ours = module.__name__ == name
        if is_ours:
            module.__dict__.pop(_MARK, None)  # left by the execution before a reload
        execute(module)
        if is_ours:
            hook(module)
            setattr(module, _MARK, True)

    setattr(execute_and_change, _MARK, {name, *getattr(execute, _MARK, ())})
    loader.exec_module = execute_and_change


_waited_for: set[str] = set()
"""The modules that ``wait_for`` was called with."""


def wait_for(hooks: dict[str, Hook]) -> None:
    """Call a hook with each of these modules from now on, whenever it is imported."""
    sys.meta_path.insert(0, AfterImport(hooks))
    _waited_for.update(hooks)


def check_hooks(names: Iterable[str]) -> None:
    """Make sure that modules that are waited for were changed, or will be when they are imported.

    Raises:
        UnsupportedMegatronError: one was, or would be, executed without its hook.
    """
    for name in names:
        if name in _waited_for and not _is_changed(name):
            raise UnsupportedMegatronError(
                f"{name} is imported without the changes that --data-impl bfp needs, past megatron_bfp's import hook; "
                "call megatron_bfp.install() in the first line of the script, or run it by python -m megatron_bfp"
            )


def _is_changed(name: str) -> bool:
    """Whether a module was changed; if it was not imported, whether it would be, or is not there at all."""
    if name in sys.modules:
        return hasattr(sys.modules[name], _MARK)
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        spec = None
    return spec is None or name in getattr(getattr(spec.loader, "exec_module", None), _MARK, ())


def replace(owner: Any, name: str, parameters: str, make: Callable[[Callable], Callable]) -> None:
    """Put ``make(original)`` in the place of a function whose parameters are those we know.

    Args:
        owner: a module or a class.
        name: the function's name in it.
        parameters: names of its parameters, as ``"self, args, keywords"``; their defaults and kinds are not compared.
        make: gets the function that was there and returns the one that takes its place.

    Raises:
        UnsupportedMegatronError: there is no such function, or it takes other parameters.
    """
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    original = inspect.getattr_static(owner, name, None)
    function = getattr(original, "__func__", original)
    if not callable(function):
        raise UnsupportedMegatronError(f"this Megatron has no {where}; {_advice()}")
    names = ", ".join(inspect.signature(function).parameters)
    if names != parameters:
        raise UnsupportedMegatronError(f"this Megatron has {where}({names}), expected ({parameters}); {_advice()}")
    setattr(owner, name, make(getattr(owner, name)))


def _advice() -> str:
    return "training would go on with wrong samples or masks. See the README's table of versions, or use one of them"
