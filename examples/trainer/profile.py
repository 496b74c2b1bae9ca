"""What the processor and the GPU do in some steps: torch's profiler on rank 0, and a trace that a browser shows."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

import torch
from torch import distributed
from torch.profiler import ProfilerActivity

from .config import TrainerConfig, profiled_steps
from .ranks import log


class StepProfile(AbstractContextManager["StepProfile"]):
    """Profiles the steps of ``--profile-steps`` on rank 0, and writes the trace after the last of them, or where the
    run ends before."""

    def __init__(self, config: TrainerConfig) -> None:
        self._steps = range(0)
        self._folder = config.profile_dir
        self._profiler: torch.profiler.profile | None = None
        self._seen: list[int] = []
        if config.profile_steps and distributed.get_rank() == 0:
            first, last = profiled_steps(config.profile_steps)
            self._steps = range(first, last + 1)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step, the first being 1."""
        if number not in self._steps:
            yield
            return
        if self._profiler is None:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiler.start()
        self._seen.append(number)
        with torch.profiler.record_function(f"step {number}"):
            yield
        if number == self._steps[-1]:
            self._write()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._profiler is not None:
            self._write()

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = os.path.join(self._folder, f"steps_{self._seen[0]}_to_{self._seen[-1]}.json")
        try:
            os.makedirs(self._folder, exist_ok=True)
            profiler.export_chrome_trace(f"{path}.unfinished")
            os.replace(f"{path}.unfinished", path)
        except OSError as error:
            log(f"--profile-dir {self._folder}: the trace could not be written: {error.strerror}")
            return
        log(f"wrote {path}: open it at https://ui.perfetto.dev or chrome://tracing")
