"""How the reference reads the package's docstrings (an extension of griffe, named in mkdocs.yml)."""

import re
from typing import Any

import griffe


class PlainModules(griffe.Extension):
    """Each name once, in the module that defines it, with docstrings as Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change a package after it was read."""
        change(pkg)


def change(thing: griffe.Object) -> None:
    """Take out what a module has imported from elsewhere, and rewrite docstrings, from ``thing`` downwards."""
    if thing.docstring is not None:
        thing.docstring.value = as_markdown(thing.docstring.value)
    for name, member in list(thing.members.items()):
        if member.is_alias:
            thing.del_member(name)
        else:
            change(member)


def as_markdown(docstring: str) -> str:
    """``::`` before a block of code as a colon, and a ``Raises`` that refers to another function as a sentence."""
    docstring = re.sub(r"::$", ":", docstring, flags=re.MULTILINE)
    return re.sub(r"^Raises:\n    ([^:\n]+)$", r"**Raises:** \1", docstring, flags=re.MULTILINE)
