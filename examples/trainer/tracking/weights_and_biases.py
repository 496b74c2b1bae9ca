"""Weights & Biases: a run on its server, or with WANDB_MODE=offline a file that ``wandb sync`` uploads.

A process that goes on with a run offline begins another file of the same run; ``wandb sync`` joins them. What was
written to the files of before is read by wandb's own ``wandb leet inspect``: a process that was killed leaves out its
last seconds.
"""

import contextlib
import glob
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from megatron_bfp.errors import BFPError

from .journal import Row
from .run_ids import RunIds
from .tracker import import_for

INIT_SECONDS = 60.0
FINISH_SECONDS = 8.0
"""How long uploads may take at the end; what is left is in the folder for ``wandb sync``."""


class WeightsAndBiases:
    """A run of ``wandb``. Each step is one row of its history, under the step's number.

    Args:
        names: project, entity and name of the run; the last two may be None.
        folder: for its files; None: the current one.
        options: recorded as its configuration.

    Raises:
        OptionError: wandb is not installed.
    """

    name = "Weights & Biases"

    def __init__(
        self, names: tuple[str, str | None, str | None], folder: str | None, options: dict[str, Any], ids: RunIds
    ) -> None:
        self._wandb = import_for("--wandb-project", "wandb")
        self._names, self._folder, self._options, self._ids = names, folder, options, ids
        self._run: Any = None
        self._is_again = False

    def open(self, iteration: int) -> str:
        """Begin the run or go on with it."""
        if self._is_again:
            with contextlib.suppress(Exception):
                self._run.finish(exit_code=1)
            with contextlib.suppress(Exception):
                self._wandb.teardown(exit_code=1)  # its service may have been killed; another one is started
        self._is_again = True
        project, entity, name = self._names
        key = json.dumps(self._names)
        run_id = self._ids.get("wandb", key) or secrets.token_hex(4)
        self._ids.put("wandb", key, run_id)
        if self._folder:
            os.makedirs(self._folder, exist_ok=True)
        settings = self._wandb.Settings(
            silent=True, console="off", init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS
        )
        if self._wandb.setup().settings.mode in ("online", "run", "shared") and not self._wandb.login(prompt=False):
            raise BFPError("no API key; run `wandb login`, or set WANDB_MODE=offline")
        self._run = self._wandb.init(
            project=project,
            entity=entity,
            name=name,
            id=run_id,
            dir=self._folder,
            resume="allow",
            config=self._options,
            allow_val_change=True,
            settings=settings,
        )
        self._last = self._run.starting_step - 1
        if self._run.offline:
            self._last = _last_step(os.path.dirname(self._run.dir), run_id)
        where = os.path.dirname(self._run.dir) if self._run.offline else self._run.url
        resumed = f", resumed after step {self._last}" if self._last > 0 else ""
        return f"run {self._run.name} ({run_id}){resumed}, {where}"

    def send(self, rows: Sequence[Row]) -> None:
        """Log rows; those of one step become one row of its history."""
        for row in rows:
            if row.iteration > self._last:
                self._run.log(row.named(), step=row.iteration)

    def close(self, failed: bool) -> None:
        """Finish the run; a later process may go on with it."""
        try:
            self._run.finish(exit_code=int(failed))
        finally:
            with contextlib.suppress(Exception):  # if its service is lost, it would print a traceback when Python ends
                self._wandb.teardown(exit_code=int(failed))


def _last_step(own: str, run_id: str) -> int:
    """The last step in the files of a run that were begun before; 0 if none has any.

    Args:
        own: the folder of this process.
    """
    folders = glob.glob(os.path.join(glob.escape(os.path.dirname(own)), f"offline-run-*-{run_id}"))
    for folder in sorted(set(folders) - {own}, reverse=True):
        path = os.path.join(folder, f"run-{run_id}.wandb")
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", path]
        environment = os.environ | {"WANDB_ERROR_REPORTING": "false"}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise BFPError(f"{path} cannot be read: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        steps = [line for line in done.stdout.splitlines() if '"type":"history"' in line]
        if steps:
            return int(json.loads(steps[-1])["history"]["step"]["num"])
    return 0
