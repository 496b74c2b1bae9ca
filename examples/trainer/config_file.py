"""A run's options in a TOML file: ``--config FILE`` reads one, ``--print-config`` writes one.

Keys are the options' names with underscores, one a line, in any order::

    num_layers = 24
    data_path = ["0.3", "A_text_document", "0.7", "B_text_document"]
    bf16 = true

An option on the command line comes after the file and wins. The table ``[launch]`` is the launchers'
(``cluster.settings``); there are no other tables.

Imports no torch.
"""

import dataclasses
import difflib
import json
import sys
from collections.abc import Collection
from types import NoneType
from typing import Any, get_args, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from megatron_bfp.errors import InputError, OptionError

from .config import GROUPS, TrainerConfig, flags_of

SET_BY_THE_LAUNCHER = "local_rank"
LAUNCH = "launch"
"""The table of the launchers' variables."""
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}


def read_config(path: str) -> list[str]:
    """The options of a file as words of a command line.

    Raises:
        InputError: the file cannot be read, or is not TOML.
        OptionError: there is no such option, or its value is of another kind.
    """
    values = read_toml(path)
    if isinstance(values.get(LAUNCH), dict):
        del values[LAUNCH]
    fields = {field.name: field for field in dataclasses.fields(TrainerConfig) if field.name != SET_BY_THE_LAUNCHER}
    types = get_type_hints(TrainerConfig)
    words = []
    for name, value in values.items():
        if name not in fields:
            raise OptionError(f"--config {path}: there is no option {name}{similar(name, [*fields, LAUNCH])}")
        words += _words(path, fields[name], types[name], value)
    return words


def read_toml(path: str) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        InputError: it cannot be read, or is not TOML.
    """
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: not TOML: {error}") from None


def similar(name: str, names: Collection[str]) -> str:
    """For a message, the name that was probably meant; empty if none is close."""
    if close := difflib.get_close_matches(name.replace("-", "_"), names, n=1):
        return f"; did you mean {close[0]}?"
    return ""


def _words(path: str, field: dataclasses.Field, kind: Any, value: Any) -> list[str]:
    """An option with its value, after a look at what kind of value it is."""
    if kind == tuple[str, ...]:
        if isinstance(value, list) and value and all(_is(part, str) or _is(part, float) for part in value):
            return [flags_of(field)[0], *map(str, value)]
        raise OptionError(f"--config {path}: {field.name} must be a list of texts in quotes, got {value!r}")
    value_type = next((part for part in get_args(kind) if part is not NoneType), kind)
    checked_kind(f"--config {path}: {field.name}", value, value_type)
    if value_type is bool:
        return [flags_of(field)[0]] if value else []
    return [f"{flags_of(field)[0]}={value}"]


def checked_kind(name: str, value: Any, kind: type) -> None:
    """Check that a value is of a kind.

    Raises:
        OptionError: it is not.
    """
    if not _is(value, kind):
        raise OptionError(f"{name} must be {KINDS[kind]}, got {value!r}")


def _is(value: Any, kind: type) -> bool:
    """Whether a value is of a kind; whole numbers are numbers, and true is none."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def config_text(config: TrainerConfig) -> str:
    """The file that gives a configuration; options without a value are left out."""
    lines = []
    for title, options in GROUPS.items():
        lines += ["", f"# {title}"]
        for field in dataclasses.fields(options):
            value = getattr(config, field.name)
            if value is not None and field.name != SET_BY_THE_LAUNCHER:
                lines.append(f"{field.name} = {toml_value(value)}")
    return "\n".join(lines[1:]) + "\n"


def toml_value(value: Any) -> str:
    """A value as TOML writes it. JSON's texts and lists of texts are TOML's too."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, int | float) else json.dumps(value)
