"""How the reference reads the package's docstrings (an extension of griffe, named in mkdocs.yml)."""

import re
from typing import Any

import griffe


class PlainModules(griffe.Extension):
    """Each name once, in the module that defines it, and ``::`` before a block of code as in Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change a package after it was read."""
        change(pkg)


def change(thing: griffe.Object) -> None:
    """Take out what a module has imported from the same package, and rewrite docstrings, from ``thing`` downwards."""
    if thing.docstring is not None:
        thing.docstring.value = re.sub(r"::$", ":", thing.docstring.value, flags=re.MULTILINE)
    for name, member in list(thing.members.items()):
        if member.is_alias:
            thing.del_member(name)
        else:
            change(member)
