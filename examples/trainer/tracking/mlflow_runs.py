"""MLflow: a run on a tracking server, or in a folder (MLflow's file store)."""

import glob
import os
import urllib.parse
from collections.abc import Sequence
from typing import Any

from .journal import Row
from .run_ids import RunIds
from .tracker import import_for

METRICS_AT_ONCE, PARAMS_AT_ONCE = 1000, 100
"""MLflow's own limits."""
ACTIVE = "active"
"""MLflow's stage of a run that nobody has deleted."""


class MLflow:
    """A run of MLflow. Each number has a history of its own: after a crash in the middle of a step, some have it.

    Args:
        uri: of the tracking server, or a folder.
        experiment: its name. Created if it is new.
        run_name: None: MLflow makes one up.
        options: recorded as the parameters of a new run; MLflow cannot change those of an old one.

    Raises:
        OptionError: MLflow is not installed.
    """

    name = "MLflow"

    def __init__(self, uri: str, experiment: str, run_name: str | None, options: dict[str, Any], ids: RunIds) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._is_folder = "://" not in uri or uri.startswith("file:")
        if self._is_folder:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # 3.17 refuses folders without it
        self._mlflow = import_for("--mlflow-experiment", "mlflow")
        self._uri, self._experiment, self._run_name, self._ids = uri, experiment, run_name, ids
        self._options = options
        self._last: dict[str, int] = {}

    def open(self, iteration: int) -> str:
        """Begin the run or go on with it."""
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        names = f"{self._uri} {self._experiment} {self._run_name}"
        self._run_id = self._ids.get("mlflow", names)
        if self._run_id and self._is_folder:
            _drop_torn_lines(urllib.parse.urlparse(self._uri).path, self._run_id)
        run = self._client.get_run(self._run_id) if self._run_id else None
        if run is None or run.info.lifecycle_stage != ACTIVE:
            run = self._begin(names)
        else:
            self._client.update_run(self._run_id, status="RUNNING")
        self._last = {
            name: max(metric.step for metric in self._client.get_metric_history(self._run_id, name))
            for name in run.data.metrics
        }
        last = max(self._last.values(), default=0)
        resumed = f", resumed after step {last}" if last else ""
        return f"run {run.info.run_name} ({self._run_id}){resumed}, {self._uri}"

    def _begin(self, names: str) -> Any:
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        run = self._client.create_run(number, run_name=self._run_name)
        self._run_id = run.info.run_id
        self._ids.put("mlflow", names, self._run_id)
        params = [self._mlflow.entities.Param(name, str(value)) for name, value in self._options.items()]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[first : first + PARAMS_AT_ONCE])
        return run

    def send(self, rows: Sequence[Row]) -> None:
        """Log rows, number by number."""
        metrics = [
            self._mlflow.entities.Metric(name, float(value), row.milliseconds, row.iteration)
            for row in rows
            for name, value in row.named().items()
            if row.iteration > self._last.get(name, 0)
        ]
        for first in range(0, len(metrics), METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + METRICS_AT_ONCE])

    def close(self, failed: bool) -> None:
        """Mark the run as finished or failed; a later process may go on with it."""
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _drop_torn_lines(folder: str, run_id: str) -> None:
    """Cut off the unfinished last line of each file of numbers, and remove empty ones. A full disk leaves such files,
    and MLflow cannot read a run with one."""
    for metrics in glob.glob(os.path.join(glob.escape(folder), "*", run_id, "metrics")):
        for inner, _, names in os.walk(metrics):
            for path in (os.path.join(inner, name) for name in names):
                with open(path, "r+b") as file:
                    content = file.read()
                    whole = content.rfind(b"\n") + 1
                    if whole < len(content):
                        file.truncate(whole)
                if not whole:
                    os.remove(path)
