"""Launchers that start nothing: what they print for a recipe, and the options that reach the trainer."""

import shlex
import subprocess

from helpers import launching
from helpers.datasets import ROOT

LAUNCH, RECIPES = ROOT / "examples/cluster/launch", ROOT / "examples/cluster/recipes"


def dry_run(folder, launcher, recipe, *options, **variables):
    """Exit status, and what a launcher prints that starts nothing."""
    settings = {"HOSTFILE": "hosts", "NODES": 2, "NODE_RANK": 1, "MASTER_ADDR": "node-1", "DRY_RUN": 1}
    settings |= {"DATA_PATH": "0.3 a_text_document 0.7 b_text_document", "TOKENIZER_MODEL": "tokenizer.model"}
    settings |= {"EOD_TOKEN": "<|endoftext|>"}
    environment = launching.ENVIRONMENT | {name: str(value) for name, value in (settings | variables).items()}
    command = ["bash", str(LAUNCH / f"{launcher}.sh"), f"{RECIPES / recipe}.sh", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=60)
    return done.returncode, done.stdout + done.stderr


def commands(output):
    """The commands of a dry run, as words."""
    return [shlex.split(line[2:]) for line in output.splitlines() if line.startswith("+ ")]


def training_options(output, script):
    """The options of the training script in the last command, as they arrive on a node: pdsh hands them to a shell."""
    words = commands(output)[-1]
    if words[0] == "pdsh":
        words = shlex.split(words[-1])
    elif words[0] == "deepspeed" and "--no_ssh" not in words:
        words = shlex.split(" ".join(words))
    return words[next(number for number, word in enumerate(words) if word.endswith(script)) + 1 :]
