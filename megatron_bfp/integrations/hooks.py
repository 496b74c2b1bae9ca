"""Changing a module right after it was executed, before any other module binds its names.

Scripts bind functions by ``from module import name``, so replacing them later has no effect. A finder at the head of
``sys.meta_path`` waits for the modules it was told of and leaves all others to the finders behind it. It stays there,
because a module may be imported again after a probe with ``importlib.util.find_spec``, a failed import or a reload, and
must be changed again.
"""

import functools
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
"""Set in a module after its hook has run, and on the ``exec_module`` of a loader that will call a hook."""


class AfterImport:
    """A finder that calls a hook with a module each time after the module was executed.

    Args:
        hooks: module name -> hook.
    """

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self.hooks = dict(hooks)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The other finders' spec of a module with a hook; None for all other modules."""
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
    """Let a loader call ``hook`` after it executed the module ``name``, but after no other module that it loads."""
    execute = loader.exec_module
    if name in getattr(execute, _MARK, ()):
        return  # several specs share the loader, and it was prepared for this module before

    def execute_and_change(module: ModuleType) -> None:
        is_ours = module.__name__ == name
        if is_ours:
            module.__dict__.pop(_MARK, None)  # left by the execution before this reload
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
    """Make sure that the modules that ``wait_for`` was told of were changed, or will be when they are imported.

    Args:
        names: of modules; those that ``wait_for`` was not told of are ignored.

    Raises:
        UnsupportedMegatronError: one was, or would be, executed without its hook.
    """
    for name in names:
        if name in _waited_for and not _is_changed(name):
            raise UnsupportedMegatronError(
                f"{name} is imported without the changes that --data-impl bfp needs: something bypasses megatron_bfp's "
                "import hook; call megatron_bfp.install() in the first line of the script, or run it with "
                "python -m megatron_bfp"
            )


def _is_changed(name: str) -> bool:
    """Whether a module was changed. If it is not imported yet: whether it would be changed, or does not exist."""
    if name in sys.modules:
        return hasattr(sys.modules[name], _MARK)
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        spec = None
    return spec is None or name in getattr(getattr(spec.loader, "exec_module", None), _MARK, ())


ADVICE = (
    "this version is not supported, and training would continue with wrong samples or masks. Supported versions are in "
    "docs/megatron.md"
)


def replace(owner: Any, name: str, parameters: str, make: Callable[[Callable], Callable]) -> None:
    """Replace a function by ``make(original)``, if its parameters are those we know.

    Args:
        owner: a module or a class.
        name: the function's name in it.
        parameters: names of its parameters, as ``"self, args, keywords"``; their defaults and kinds are not compared.
        make: gets the original function and returns its replacement.

    Raises:
        UnsupportedMegatronError: there is no such function, or it takes other parameters.
    """
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    original = inspect.getattr_static(owner, name, None)
    function = getattr(original, "__func__", original)
    if not callable(function):
        raise UnsupportedMegatronError(f"this Megatron has no {where}; {ADVICE}")
    names = ", ".join(inspect.signature(function).parameters)
    if names != parameters:
        raise UnsupportedMegatronError(f"this Megatron has {where}({names}), expected ({parameters}); {ADVICE}")
    setattr(owner, name, make(getattr(owner, name)))


def prepare_first_call(function: Callable, prepare: Callable[[dict[str, Any]], None]) -> Callable:
    """A function that calls ``prepare`` before its first call and is otherwise unchanged.

    Args:
        prepare: gets the arguments of the first call by name, and may change them.
    """
    signature = inspect.signature(function)
    is_first = True

    @functools.wraps(function)
    def prepared(*arguments: Any, **keywords: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return function(*arguments, **keywords)
        is_first = False
        call = signature.bind(*arguments, **keywords)
        prepare(call.arguments)
        return function(*call.args, **call.kwargs)

    return prepared
