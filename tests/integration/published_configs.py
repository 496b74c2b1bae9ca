"""How many of the training configs that a Megatron publishes run with ``--data-impl bfp``, and what stops the others.

    python tests/integration/published_configs.py CHECKOUT

The checkout is one of Megatron-LM or of Megatron-DeepSpeed. Its configs are the functional tests that pre-train a GPT
or hybrid model (``tests/functional_tests/test_cases/*/*/model_config.yaml``), and the scripts of ``examples`` and
``examples_deepspeed`` that start ``pretrain_gpt.py`` or ``pretrain_hybrid.py``. Functional tests whose names differ
only in ``TWINS`` count as one, which is accepted if all of them are.

One rule for all configs: the options that name data, ``DATA``, give way to a dataset of one's own, and
``--data-impl bfp`` is added, as the documentation says. ``--mock-data`` is such an option: it stands where others name
a dataset. Then each is parsed by the checkout's own parser and checked by the plugin; every refusal counts, not the
first only. Nothing is trained.
"""

import collections
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INTEGRATION = ROOT / "tests/integration"

OTHER_MODELS = ("bert", "t5", "multimodal-llava", "mimo", "gpt-nemo", "common")
"""Folders of functional tests of other models, of NeMo's scripts, and of tools."""

NO_TRAINING = re.compile("inference|grpo")
"""Names of functional tests that generate text, or train on what they generated."""

TWINS = re.compile(r"_(?:1node|sm|gb_?200|nondeterministic|(?:frozen_)?resume(?:_torch(?:_dist)?)?)(?=_|$)")
"""Parts of the names of functional tests that run the same model in the same way: on fewer nodes, for a shorter time,
on another GPU, without asking for the same bits, or resumed from a checkpoint."""

SET_BY_THE_TEST_RUNNER = {"${REPEAT}": "1", "${TOKENIZER_TYPE}": "HuggingFaceTokenizer"}

SCRIPTS = re.compile(r"(?:^|/)pretrain_(?:gpt|hybrid|mamba)\.py$")
"""The training scripts that the plugin is for."""


DATA = {
    "--data-path",
    "--train-data-path",
    "--valid-data-path",
    "--test-data-path",
    "--data-args-path",
    "--per-split-data-args-path",
    "--mock-data",
}
"""Options that say which data a config trains on; what kind of samples it makes of them, as ``--sft``, is not among
them."""

SWAPPED_IN = ["--data-path", "corpus_text_document", "--data-impl", "bfp"]


def swapped(words: list[str]) -> list[str]:
    """A command line with the reader's dataset in place of its own."""
    kept, is_data = [], False
    for word in words:
        is_data = word.partition("=")[0] in DATA if word.startswith("--") else is_data
        kept += [] if is_data else [word]
    return kept + SWAPPED_IN


@dataclass
class Config:
    """A command line of a training script."""

    name: str
    folder: str
    """Where it is run, for the files that it names."""
    command_lines: list[list[str]]
    """The options; the first of these that the parser takes."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Count:
    """What the plugin says of the configs of a checkout."""

    accepted: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    """Name -> messages."""
    unread: dict[str, str] = field(default_factory=dict)
    """Name -> why the checkout's own parser does not take it."""
    untested: dict[str, list[str]] = field(default_factory=dict)
    """Of the accepted ones: name -> lines in the log."""
    mocked: list[str] = field(default_factory=list)
    """Of the accepted ones: those that train on ``--mock-data`` as they are."""
    not_validated: dict[str, str] = field(default_factory=dict)
    """Name -> why the checkout's own validation stops here; these were checked as they were parsed."""

    @property
    def share(self) -> float:
        """Of all configs that can be read, those that are accepted."""
        return len(self.accepted) / (len(self.accepted) + len(self.refused))

    def by_option(self) -> list[tuple[str, int, int]]:
        """What is refused, how often, and how often by nothing else; the most frequent first."""
        reasons = {name: {option_of(message) for message in messages} for name, messages in self.refused.items()}
        all_of_them = collections.Counter(reason for several in reasons.values() for reason in several)
        alone = collections.Counter(reason for several in reasons.values() if len(several) == 1 for reason in several)
        return [(reason, count, alone[reason]) for reason, count in all_of_them.most_common()]


def option_of(message: str) -> str:
    """What an error is about: its text up to the reason."""
    message = re.sub(r"^\S+\.json: ", "DeepSpeed's ", message)
    return re.split(r" cannot be used| needs | must be |: ", message)[0]


def functional_tests(checkout: Path) -> dict[str, list[Config]]:
    """Those of Megatron-LM that pre-train, twins together."""
    import yaml

    configs: dict[str, list[Config]] = {}
    cases = checkout / "tests/functional_tests/test_cases"
    for path in sorted(cases.glob("*/*/model_config.yaml")):
        model, name = path.parts[-3:-1]
        if model in OTHER_MODELS or NO_TRAINING.search(name):
            continue
        case = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        environment = {variable: str(value) for variable, value in case.get("ENV_VARS", {}).items()}
        words = words_of(case["MODEL_ARGS"])
        config = Config(f"{model}/{name}", str(path.parent), [words], environment)
        configs.setdefault(f"{model}/{TWINS.sub('', name)}", []).append(config)
    return configs


def words_of(arguments: dict) -> list[str]:
    """Options as the shell script of the functional tests hands them to the training script."""
    words = []
    for option, value in arguments.items():
        words.append(option)
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True and re.fullmatch(r"\[[^]]+\]", str(value)):
            words += shlex.split(str(value)[1:-1])
        elif value is not True:
            words.append(SET_BY_THE_TEST_RUNNER.get(str(value), str(value)))
    return words


def example_scripts(checkout: Path, folder: Path) -> dict[str, list[Config]]:
    """Shell scripts of examples, run with nothing but harmless commands, in copies in ``folder``."""
    configs = {}
    for examples in ("examples", "examples_deepspeed"):
        if not (checkout / examples).is_dir():
            continue
        shutil.copytree(checkout / examples, folder / examples, symlinks=True)
        (folder / "dataset").mkdir(exist_ok=True)
        for script in ("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py"):
            (folder / script).touch()  # looked for by some
        for path in sorted((folder / examples).rglob("*.sh")):
            text = path.read_text(errors="replace")
            if not STARTS.search(text):
                continue
            path.write_text(BLANKS.sub("=/given/path", LOGS.sub(" ", text)))
            (path.parent / "tmp").mkdir(exist_ok=True)
            runs = [recorded(path, given, where, folder) for where in (path.parent, folder) for given in given_to(path)]
            command_lines = sorted(filter(None, runs), key=lambda words: "--mock-data" in words)
            if command_lines:
                name = str(path.relative_to(folder))
                configs[name] = [Config(name, str(path.parent), command_lines)]
    return configs


STARTS = re.compile("pretrain_(gpt|hybrid|mamba)")
BLANKS = re.compile(r"=<[^<>\n]+>")
"""What the reader of a script is asked to fill in."""
LOGS = re.compile(r"&>>?\s*\S+?(?=[\s\"']|$)|2>&1\s*\|\s*tee\s+(?:-a\s+)?[^\s\"']+", re.MULTILINE)
"""Redirections to files in folders that are not there."""


def given_to(path: Path) -> list[list[str]]:
    """Arguments to try a script with: none, as many paths or numbers as it may want, and its own options."""
    of_its_own = [["--checkpoint-path", ".", "--data", "/given/data", "--tokenizer", "/given/tokenizer"]]
    paths = [f"/given/{number}" for number in range(1, 10)]
    numbers = [str(number) for number in range(1, 20)]
    return [[], paths, numbers, *(of_its_own if "--checkpoint-path)" in path.read_text(errors="replace") else [])]


HARMLESS = "basename bash cat cut date dirname expr grep head realpath sed seq sh sort tail tr uname wc"
LAUNCHERS = "deepspeed mpirun nsys python python3 srun torchrun uv"
RECORD = """#!/bin/bash
printf '%s\\0' "$@" >> "$RECORD"
printf '\\0\\0' >> "$RECORD"
"""
SUBMIT = """#!/bin/bash
exec bash "$@"
"""
MAKE_FOLDERS = """#!/bin/bash
for name in "$@"; do
    case $(realpath -m -- "$name") in {folder}/*) {mkdir} -p -- "$name" ;; esac
done
"""


def write_commands(commands: Path, folder: Path) -> None:
    """Make a folder of the only commands that scripts will find: launchers record what they are given, and other
    commands that are not harmless do nothing, or only inside ``folder``."""
    commands.mkdir()
    for name in HARMLESS.split():
        (commands / name).symlink_to(shutil.which(name))
    make_folders = MAKE_FOLDERS.format(folder=folder, mkdir=shutil.which("mkdir"))
    for name, text in {**dict.fromkeys(LAUNCHERS.split(), RECORD), "sbatch": SUBMIT, "mkdir": make_folders}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (commands / "others.sh").write_text("command_not_found_handle() { return 0; }\n")


def recorded(path: Path, given: list[str], where: Path, folder: Path) -> list[str] | None:
    """The options that a script starts a training script with; None if it starts none."""
    commands, record = folder / "commands", folder / "record"
    if not commands.exists():
        write_commands(commands, folder)
    record.write_bytes(b"")
    environment = {"PATH": str(commands), "BASH_ENV": str(commands / "others.sh"), "RECORD": str(record)}
    environment |= {"HOME": str(folder), "HOSTNAME": "host", "SLURM_JOB_NUM_NODES": "1", "USER": "user"}
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for something
        subprocess.run(["bash", path, *given], cwd=where, env=environment, timeout=5, **quiet)
    for command in record.read_text(errors="replace").split("\0\0\0"):
        words = command.split("\0")
        if not any(map(SCRIPTS.search, words)):  # in one word, for another shell
            words = [part for word in words for part in split_of(word)]
        for number, word in enumerate(words):
            if SCRIPTS.search(word):
                return words[number + 1 :]
    return None


def split_of(word: str) -> list[str]:
    try:
        return shlex.split(word)
    except ValueError:
        return [word]


def checked(checkout: Path, configs: list[Config], folder: Path) -> dict[str, dict]:
    """What ``refusals_of_configs.py`` says of each config, by name.

    Args:
        checkout: can be imported on this machine.
    """
    swaps = [replace(config, command_lines=list(map(swapped, config.command_lines))) for config in configs]
    (folder / "configs.json").write_text(json.dumps([asdict(config) for config in swaps]))
    (folder / "transformers.py").write_text("AutoTokenizer = None")  # imported with tokenizers, of which none is made
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "TORCHDYNAMO_DISABLE": "1", "NO_VCS_VERSION": "1"}
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    is_deepspeed = (checkout / "megatron/arguments.py").exists()
    paths = [folder if is_deepspeed else INTEGRATION / "megatron_lm_on_cpu", checkout, ROOT]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, str(INTEGRATION / "refusals_of_configs.py")]
    command += [str(folder / "configs.json"), str(folder / "refusals.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, cwd=folder)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])
    return {answer["name"]: answer for answer in json.loads((folder / "refusals.json").read_text())}


def count(checkout: Path, importable: Path | None = None) -> Count:
    """Check all configs of a checkout.

    Args:
        importable: a copy of the checkout whose modules can be imported here; None for the checkout itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        groups = functional_tests(checkout) | example_scripts(checkout, Path(folder))
        answers = checked(importable or checkout, [c for group in groups.values() for c in group], Path(folder))
    result = Count()
    for name, group in groups.items():
        of_group = [answers[config.name] for config in group]
        unread = [answer["unread"] for answer in of_group if answer["unread"]]
        result.not_validated |= {a["name"]: a["not_validated"] for a in of_group if a["not_validated"]}
        messages = list(dict.fromkeys(message for answer in of_group for message in answer["refusals"]))
        if len(unread) == len(group):
            result.unread[name] = unread[0]
        elif messages:
            result.refused[name] = messages
        else:
            result.accepted.append(name)
            result.mocked += [name] if any("--mock-data" in config.command_lines[0] for config in group) else []
            result.untested[name] = list(dict.fromkeys(line for answer in of_group for line in answer["untested"]))
    return result


def report(result: Count) -> str:
    """What was counted, in lines."""
    total = len(result.accepted) + len(result.refused)
    lines = [f"accepted {len(result.accepted)} of {total} configs ({result.share:.0%})", "", "refused  alone  option"]
    lines += [f"{number:7}  {alone:5}  {option}" for option, number, alone in result.by_option()]
    lines += ["", "refused configs:"]
    lines += [f"  {name}: {'; '.join(map(option_of, messages))}" for name, messages in sorted(result.refused.items())]
    of_configs = [line for lines_of_one in result.untested.values() for line in lines_of_one]
    untested = collections.Counter(re.split(": | is accepted", line)[1] for line in of_configs)
    lines += ["", "accepted, but with an option that no test has run:"]
    lines += [f"{number:7}  {option}" for option, number in untested.most_common()]
    lines += ["", "accepted, with a dataset in place of --mock-data:", *(f"  {name}" for name in result.mocked)]
    lines += ["", "not validated by the checkout on this machine, and so checked as parsed:"]
    lines += [f"  {name}: {why}" for name, why in result.not_validated.items()]
    lines += ["", "not read by the checkout's own parser:", *(f"  {n}: {why}" for n, why in result.unread.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(count(Path(sys.argv[1]).resolve())))
