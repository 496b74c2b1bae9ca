"""Changing a module right after it was executed, before any other module binds its names.

Scripts bind functions by ``from module import name``, so replacing them later has no effect. A finder at the head of
``sys.meta_path`` waits for the modules it was told of and leaves everything else to the finders behind it.
"""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..errors import IntegrationError

Hook = Callable[[ModuleType], None]


class AfterImport:
    """A finder that calls a hook with each module it is told of, once the module is executed.

    Args:
        hooks: module name -> hook.
    """

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self.hooks = dict(hooks)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders have for a module with hooks; None for all other modules."""
        hook = self.hooks.pop(name, None)  # the search below comes back here and must find nothing
        if hook is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _call_after_execution(spec.loader, hook)
        return spec


def _call_after_execution(loader: Any, hook: Hook) -> None:
    execute = loader.exec_module

    def execute_and_change(module: ModuleType) -> None:
        execute(module)
        hook(module)

    loader.exec_module = execute_and_change


def replace(owner: Any, name: str, parameters: str, make: Callable[[Callable], Callable]) -> None:
    """Put ``make(original)`` in the place of a function whose parameters are those we know.

    Args:
        owner: a module or a class.
        name: the function's name in it.
        parameters: names of its parameters, as ``"self, args, keywords"``; their defaults and kinds are not compared.
        make: gets the function that was there and returns the one that takes its place.

    Raises:
        IntegrationError: there is no such function, or it takes other parameters.
    """
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    original = inspect.getattr_static(owner, name, None)
    function = getattr(original, "__func__", original)
    if not callable(function):
        raise IntegrationError(f"this Megatron has no {where}; {_advice()}")
    found = ", ".join(inspect.signature(function).parameters)
    if found != parameters:
        raise IntegrationError(f"this Megatron has {where}({found}), expected ({parameters}); {_advice()}")
    setattr(owner, name, make(getattr(owner, name)))


def _advice() -> str:
    return "training would go on with wrong samples or masks. See the README's table of versions, or use one of them"
