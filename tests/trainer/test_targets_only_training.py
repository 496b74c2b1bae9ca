"""Training on targets only: a step on a whole epoch has the loss and the gradient of one in which EOD is an input."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from helpers.datasets import documents_of
from helpers.trainer_in_process import run_trainer

from megatron_bfp import pack

LENGTHS = [5, 33, 1, 17, 31, 32, 9, 70, 3, 12, 25, 8, 33, 2, 65]


@pytest.mark.parametrize("options", [(), ("--even-sequences",)], ids=["best fit", "even"])
def test_a_step_on_an_epoch_has_the_same_loss_and_gradient(write_dataset, tmp_path, options):
    prefix = write_dataset(documents_of(LENGTHS)).prefix
    logged = []
    for number, is_on in enumerate((False, True)):
        sequences, log = len(pack(LENGTHS, 32, targets_only=is_on, even=bool(options))), tmp_path / f"{number}.jsonl"
        words = ["--split", "1,0,0", "--micro-batch-size", 1, "--global-batch-size", sequences, "--train-iters", 1]
        words += ["--json-log", log, *options, *["--targets-only"] * is_on]
        run_trainer(prefix, *words)
        logged.append(json.loads(log.read_text()))
    plain, targets_only = logged
    assert targets_only["target_tokens"] == plain["target_tokens"] == sum(LENGTHS) - len(LENGTHS)
    for name in ("loss", "grad_norm"):
        assert targets_only[name] == pytest.approx(plain[name], rel=1e-5)
    run_trainer(prefix, *words[:-1], "--targets-only", "--seed", 5)  # the control: another model
    assert json.loads(log.read_text().splitlines()[-1])["loss"] != pytest.approx(plain["loss"], rel=1e-4)
