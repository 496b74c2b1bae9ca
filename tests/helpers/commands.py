"""Every command as it is typed, called in this process: the verbs of ``megatron-bfp`` and the older commands."""

import subprocess
import sys

from helpers.datasets import ROOT
from megatron_bfp.commands import main, preprocess, preprocess_options, report

ONE_DOOR = ("megatron-bfp", "python -m megatron_bfp")
OLDER = {
    "megatron-bfp-preprocess": preprocess.console,
    "preprocess_bfp.py": preprocess.console,
    "megatron-bfp-report": report.console,
    "report_bfp.py": report.console,
}
VERBS = tuple(main.VERBS)
COMMANDS = (*ONE_DOOR, *(f"{door} {verb}" for door in ONE_DOOR for verb in VERBS), *OLDER)


def call(monkeypatch, command, *arguments):
    """Type one of ``COMMANDS`` with arguments; returns its exit status."""
    words, program = command.split(), command
    console = OLDER.get(command, main.console)
    if command.startswith("python"):
        program, words = str(ROOT / "megatron_bfp" / "__main__.py"), words[2:]
    elif command not in OLDER:
        program = f"/usr/bin/{words[0]}"
    monkeypatch.setattr(sys, "argv", [program, *words[1:], *map(str, arguments)])
    try:
        return console()
    except SystemExit as exit:
        return exit.code


def parser_of(monkeypatch, command):
    """The parser that reads the options of one of ``COMMANDS``."""
    program, *_ = command.split()
    monkeypatch.setattr(sys, "argv", [program])
    if command in OLDER:
        return report.parser() if "report" in command else preprocess_options.old_parser()
    verb = command.split()[-1]
    parser = main.parser_for(verb)
    (verbs,) = (action for action in parser._actions if action.dest == "verb")
    return verbs.choices[verb] if verb in VERBS else parser


def preprocess_tool(*arguments, **settings):
    """Run ``tools/preprocess_bfp.py`` in a process of its own."""
    command = [sys.executable, str(ROOT / "tools" / "preprocess_bfp.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **settings)


def files_in(folder):
    """Paths of all files below a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
