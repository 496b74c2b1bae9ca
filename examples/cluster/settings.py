"""The launchers' variables in a TOML file of a run: its table ``[launch]``, beside the trainer's options::

    [launch]
    gpus_per_node = 8
    container_image = "/images/megatron_bfp.sqsh"
    vocab_size = 32000

For the launchers, which are bash: ``read FILE`` prints names and values, each with a NUL after it; ``write NAME=VALUE
...`` prints the table.
"""

import sys
from typing import NoReturn

from trainer.config_file import LAUNCH, checked_kind, read_toml, similar, toml_value

from megatron_bfp import console
from megatron_bfp.errors import OptionError

SETTINGS = {
    "nodes": int,
    "node_rank": int,
    "master_addr": str,
    "master_port": int,
    "gpus_per_node": int,
    "hostfile": str,
    "output": str,
    "prologue": str,
    "container_image": str,
    "container_mounts": str,
    "container_runtime": str,
    "srun_args": str,
    "all_reduce_mb": int,
    "device": str,
    "vocab_size": int,
}
"""The keys of the table, each the name of a variable in small letters, and what kind of value it has."""
OF_A_RECIPE = ("device", "vocab_size")
"""Variables that recipes set, which have small letters there too."""


def main(words: list[str]) -> None:
    """Read or write a table.

    Args:
        words: ``read FILE`` or ``write NAME=VALUE ...``.

    Raises:
        InputError: the file cannot be read.
        OptionError: it has a key that is no variable, or a value of the wrong kind.
    """
    if words[0] == "read":
        for name, value in read_settings(words[1]).items():
            sys.stdout.write(f"{name}\0{value}\0")
    else:
        console.say("\n" + table(dict(word.split("=", 1) for word in words[1:])))


def read_settings(path: str) -> dict[str, str]:
    """The variables that a file sets.

    Raises:
        InputError: the file cannot be read.
        OptionError: it has a key that is no variable, or a value of the wrong kind.
    """
    launch = read_toml(path).get(LAUNCH, {})
    if not isinstance(launch, dict):
        raise OptionError(f"{path}: {LAUNCH} must be a table, [{LAUNCH}]")
    variables = {}
    for name, value in launch.items():
        if name not in SETTINGS:
            raise OptionError(f"{path}: [{LAUNCH}] has no setting {name}{similar(name, SETTINGS)}")
        checked_kind(f"{path}: [{LAUNCH}] {name}", value, SETTINGS[name])
        variables[name if name in OF_A_RECIPE else name.upper()] = str(value)
    return variables


def table(variables: dict[str, str]) -> str:
    """The table that sets variables; those without a value are left out."""
    lines = [f"[{LAUNCH}]"]
    for variable, text in variables.items():
        name = variable.lower()
        if text:
            lines.append(f"{name} = {toml_value(SETTINGS[name](text))}")
    return "\n".join(lines)


def door() -> NoReturn:
    """Run the command: the name of the launcher, for messages, then the words of ``main``."""
    sys.exit(console.run(lambda: main(sys.argv[2:]), sys.argv[1]))


if __name__ == "__main__":
    door()
