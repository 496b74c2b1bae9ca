"""Raw documents to a dataset, and the example trainer started on it with the real launcher."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from helpers.datasets import DATA, ROOT
from helpers.texts import texts

STEP = re.compile(
    r"^(?:\S+: )?iteration (\d+)/\d+ \| loss (\S+) .* grad norm (\S+) .* consumed samples (\d+) ", re.MULTILINE
)
TRAINER = "examples/pretrain_gpt.py"
FAULTY_TRAINER = "tests/helpers/programs/faulty_trainer.py"
WATCHED_TRAINER = "tests/helpers/programs/watched_trainer.py"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"],
    "OMP_NUM_THREADS": "1",
}


PORTS = itertools.count(10_000 + 20 * (os.getpid() % 1000))
"""Below those that the system gives to outgoing connections. Tests that run at the same time begin elsewhere."""


def free_port():
    """A port that nobody listens on, another one at each call."""
    for port in PORTS:
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port


def make_corpus(folder):
    """A small corpus, tokenized and indexed by the tool; returns the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    documents = texts()
    good = (DATA / "nasty" / "00_good.jsonl").read_text()
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents) + good)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<eod>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    command = [sys.executable, str(ROOT / "tools/preprocess_bfp.py"), "--input", str(folder / "corpus.jsonl")]
    command += ["--output-prefix", str(folder / "data"), "--tokenizer-model", str(folder / "tokenizer.json")]
    command += ["--eod-token", "<eod>", "--append-eod", "--seq-length", "128", "--split", "90,5,5", "--workers", "2"]
    subprocess.run(command, check=True, timeout=120)
    return folder


def launch(corpus, *options, ranks=2, train_iters=6, on_gpu=False, fault=None, watched=None, launcher="deepspeed"):
    """Run the trainer; returns the launcher's exit status and all output.

    Args:
        fault: an accident that happens to it, as ``faulty_trainer.py`` describes them.
        watched: a folder that gets a record of each step, as ``watched_trainer.py`` writes it.
        launcher: ``deepspeed``, or ``ranks`` for ``ranks.py``, which imports once for all ranks.
    """
    environment = ENVIRONMENT if on_gpu else ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    command = {
        "deepspeed": ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port())],
        "ranks": [sys.executable, str(ROOT / "tests/helpers/programs/ranks.py"), str(ranks), str(free_port())],
    }[launcher]
    script = TRAINER
    if fault:
        environment, script = environment | {"FAULT": fault}, FAULTY_TRAINER
    if watched:
        environment, script = environment | {"WATCHED": str(watched)}, WATCHED_TRAINER
    command += trainer(corpus, *options, train_iters=train_iters, script=script)
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=corpus)
    return done.returncode, done.stdout + done.stderr


def trainer(corpus, *options, train_iters=6, script=TRAINER):
    """The command line of a tiny run, from the script on; options given replace its own."""
    command = [str(ROOT / script), "--train-iters", str(train_iters)]
    command += ["--group-query-attention", "--num-query-groups", "2", "--lr", "3e-3", "--lr-warmup-iters", "2"]
    command += ["--tokenizer-model", str(corpus / "tokenizer.json"), "--eod-token", "<eod>"]
    defaults = {"--global-batch-size": 8, "--micro-batch-size": 2, "--num-workers": 0, "--split": "90,5,5"}
    defaults |= {"--num-layers": 2, "--hidden-size": 64, "--num-attention-heads": 4, "--seq-length": 128}
    defaults["--data-path"] = corpus / "data_text_document"
    for name, value in defaults.items():
        if name not in options:
            command += [name, str(value)]
    return [*command, *map(str, options)]


def train(corpus, *options, **keywords):
    """The printed (loss, gradient norm, consumed samples) of each iteration."""
    status, output = launch(corpus, *options, **keywords)
    assert status == 0, output[-5000:]
    return steps(output)


def together(*runs):
    """What functions return that run at the same time: a launch imports for longer than it trains, on one core."""
    with ThreadPoolExecutor(len(runs)) as threads:
        return [run.result() for run in [threads.submit(run) for run in runs]]


def steps(output):
    """The printed (loss, gradient norm, consumed samples) of each iteration of a log."""
    return {int(iteration): values for iteration, *values in STEP.findall(output)}


def in_folder(folder):
    """Options that save to a folder and resume from it."""
    return ("--save", folder, "--load", folder)


class BackgroundRun:
    """A launcher that runs while a test does something to it."""

    def __init__(self, command, log, cwd, environment=ENVIRONMENT):
        self.log = log
        with open(log, "w") as file:
            self.process = psutil.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment | {"CUDA_VISIBLE_DEVICES": ""},
                cwd=cwd,
                start_new_session=True,
            )
        self._children = []

    def output(self):
        return self.log.read_text()

    def wait_for_steps(self, number, seconds=120):
        """Wait until so many steps are printed, and remember the processes."""
        end = time.monotonic() + seconds
        while len(steps(self.output())) < number:
            self._children = self.process.children(recursive=True)  # for `kill`, should the steps not come
            assert self.process.poll() is None and time.monotonic() < end, self.output()[-5000:]
            time.sleep(0.02)
        self._children = self.process.children(recursive=True)

    def processes(self):
        return [process for process in (self.process, *self._children) if process.is_running()]

    def ranks(self):
        """The processes that train, not those that launch them or read their samples."""
        started = [process for process in self._children if "LOCAL_RANK" in process.environ()]
        return [process for process in started if "LOCAL_RANK" not in process.parent().environ()]

    def end(self, seconds=90):
        """Wait for all processes to end; returns the launcher's exit status."""
        _, alive = psutil.wait_procs([self.process, *self._children], timeout=seconds)
        assert not alive, (alive, self.output()[-5000:])
        return self.process.returncode

    def kill(self):
        """SIGKILL to all."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs([self.process, *self._children], timeout=30)


def as_numbers(steps):
    return [[float(loss), float(norm)] for loss, norm, _ in steps.values()]
