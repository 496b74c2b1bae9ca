"""Checkpoints that are found whole or not at all, and that other numbers of data-parallel ranks can go on from.

    FOLDER/iter_0001000/        DeepSpeed's files
        complete.json           written when all others are on disk: their sizes, and what kind of run saved them
    FOLDER/latest               its name, for DeepSpeed's own tools

A run resumes from the last folder whose files are those of its ``complete.json``. ZeRO cuts the optimizer's state for
a number of ranks; for another number it is converted into DeepSpeed's universal checkpoint, which is removed once read.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from deepspeed.checkpoint import constants
from megatron.core import parallel_state
from torch import distributed

from megatron_bfp.errors import InputError, OptionError
from megatron_bfp.files import sync_file, write_whole

from .ranks import log, on_first_rank, timestamp
from .resume import OVERRIDE, DataHistory, differences
from .save_folder import smallest_checkpoint

COMPLETE = "complete.json"
FOLDER_NAME = re.compile(r"iter_(\d{7,})")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """What ``complete.json`` says of the run that saved a checkpoint."""

    iteration: int
    consumed_samples: int
    global_batch_size: int
    data_parallel_size: int
    tensor_model_parallel_size: int
    zero_stage: int
    data: dict[str, Any] | None = None
    """What decides data and model, and what was consumed (``DataHistory.at``); None if its version recorded nothing."""


class Checkpoint(NamedTuple):
    """A complete checkpoint, to be resumed from."""

    path: str
    saved: SavedRun
    universal: str | None
    """The folder of its conversion for this run's number of ranks, if it had to be converted."""


def smallest_of(options: argparse.Namespace, vocab_size: int) -> int:
    """Bytes that a checkpoint of these options takes at least, before the model is built."""
    groups = options.num_query_groups if options.group_query_attention else options.num_attention_heads
    hidden, heads = options.hidden_size, options.num_attention_heads
    attention = 2 * hidden * hidden + 2 * hidden * hidden * groups // heads
    layer = attention + 3 * hidden * options.ffn_hidden_size
    return smallest_checkpoint(options.num_layers * layer + 2 * vocab_size * hidden)


def save_checkpoint(engine: Any, options: argparse.Namespace, iteration: int, history: DataHistory) -> None:
    """Save everything a run needs to go on as if it had not stopped, then remove checkpoints that are older than the
    ``--keep-last``. Call it on all ranks."""
    start = time.monotonic()
    name = f"iter_{iteration:07d}"
    path = os.path.join(options.save, name)
    consumed_samples = iteration * options.global_batch_size
    if distributed.get_rank() == 0:
        _remove(path)  # files of another number of ranks would mix with ours
    distributed.barrier()
    state = {constants.UNIVERSAL_CHECKPOINT_INFO: _tensor_parallel_layout(engine.module)}
    engine.save_checkpoint(options.save, tag=name, client_state=state, save_latest=False)
    distributed.barrier()  # all ranks have written
    if os.environ.get("LOCAL_RANK", "0") == "0":  # each node has its own files to bring to disk
        _sync(path)
    distributed.barrier()
    if distributed.get_rank() == 0:
        saved = SavedRun(
            iteration=iteration,
            consumed_samples=consumed_samples,
            global_batch_size=options.global_batch_size,
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            zero_stage=engine.zero_optimization_stage(),
            data=history.at(consumed_samples),
        )
        _complete(path, saved)
        if options.keep_last:
            _remove_older(options.save, iteration, options.keep_last)
    distributed.barrier()  # a rank that ended before could make its launcher kill rank 0
    log(f"saved {path} in {time.monotonic() - start:.1f} s | {timestamp()}")


def _complete(path: str, saved: SavedRun) -> None:
    """Declare a checkpoint complete, whose files are on disk, and the latest: each on disk before the next."""
    folder = os.path.dirname(path)
    sync_file(folder)
    content = dataclasses.asdict(saved) | {"files": _sizes(path)}
    write_whole(os.path.join(path, COMPLETE), json.dumps(content, indent=1).encode())
    sync_file(path)
    write_whole(os.path.join(folder, "latest"), os.path.basename(path).encode())
    sync_file(folder)


def _remove_older(folder: str, iteration: int, number: int) -> None:
    """Remove the complete checkpoints before that of ``iteration``, but for the last ones, so that ``number`` are left
    with it. One that another process loads stays until the next time."""
    names, complete = _iterations(folder), []
    for older in sorted(found for found in names if found < iteration):
        with contextlib.suppress(InputError):
            complete.append(open_checkpoint(os.path.join(folder, names[older])).path)
    for path in complete[: max(0, len(complete) - (number - 1))]:
        with _lock(path, fcntl.LOCK_EX) as is_free:
            if not is_free:
                log(f"kept {path}, which another process reads")
                continue
            try:
                _remove(path)
                log(f"removed {path} (--keep-last {number})")
            except OSError as error:
                log(f"{path} could not be removed (--keep-last {number}): {error}")


@contextlib.contextmanager
def _lock(path: str, kind: int) -> Iterator[bool]:
    """Lock a checkpoint's folder without waiting: shared while it is read, exclusive while it is removed.

    Yields:
        False where another process holds a lock that forbids it. A file system without locks forbids nothing.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        is_free = True
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        except OSError:
            pass
        yield is_free
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Keep a checkpoint from being removed by another run while it is read."""
    with _lock(path, fcntl.LOCK_SH):
        yield


def find_checkpoint(options: argparse.Namespace, description: dict[str, Any]) -> Checkpoint | None:
    """The latest complete checkpoint of ``--load``. Call it on all ranks.

    Args:
        description: of this run, by ``describe_run``.

    Returns:
        None where there is none.

    Raises:
        OptionError: it does not fit the options, or a rank does not see it.
    """
    if options.load is None:
        return None
    found = on_first_rank(lambda: _latest(options.load))
    if found is None:
        log(f"--load {options.load}: no complete checkpoint there, starting from the beginning")
        return None
    _check_visible(found.path)
    check_options(found.path, found.saved, options)
    check_description(found.path, found.saved, description, options.override_checkpoint_args)
    return found


def check_description(path: str, saved: SavedRun, description: dict[str, Any], override: bool) -> None:
    """Check that a run goes on with the data and the model of a checkpoint, or says that it is not to.

    Raises:
        OptionError: it does neither.
    """
    if saved.data is None:
        log(
            f"--load {path}: saved by a version that did not record its data; make sure that --data-path, --split, "
            "--seq-length and --seed are those of its run"
        )
        return
    changes = "; ".join(differences(saved.data, description))
    if not changes:
        return
    if not override:
        raise OptionError(
            f"--load {path}: it was saved with {changes}; resume with what it was saved with, or give {OVERRIDE} to "
            "go on with this: some samples may then be seen twice and others never"
        )
    log(f"{OVERRIDE}: {path} was saved with {changes}")
    log(f"{OVERRIDE}: {_consumed(saved)}; the run goes on at sample {saved.consumed_samples:,} of the new order")


def _consumed(saved: SavedRun) -> str:
    counts = ", ".join(f"{count:,} of {prefix}" for prefix, count in saved.data["consumed"].items())
    return f"samples consumed so far: {counts}"


def continue_history(
    options: argparse.Namespace, description: dict[str, Any], dataset: Any, checkpoint: Checkpoint | None
) -> DataHistory:
    """The history of a run that begins, or goes on from a checkpoint in the same order. Call it on all ranks.

    Raises:
        OptionError: the order of samples has changed.
    """
    if checkpoint is None or checkpoint.saved.data is None:
        return DataHistory(description, dataset)
    saved = checkpoint.saved
    same_order = on_first_rank(lambda: DataHistory(description, dataset).order(saved.consumed_samples))
    is_same = same_order == saved.data["order"]
    if not is_same and not options.override_checkpoint_args:
        also = " (with --data-impl mmap, --train-iters may change it)" if options.data_impl == "mmap" else ""
        raise OptionError(
            f"--load {checkpoint.path}: the order of samples is another one than that of its run{also}; resume with "
            f"the options and the version that saved it, or give {OVERRIDE} to go on with this order: some samples may "
            "then be seen twice and others never"
        )
    if not is_same:
        log(f"{OVERRIDE}: the order of samples is another one than before; {_consumed(saved)}")
    return DataHistory(description, dataset, saved.consumed_samples, saved.data["consumed"])


def convert_for_ranks(options: argparse.Namespace, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Convert a checkpoint that another number of ranks has saved than is to load it. Call it on all ranks.

    Raises:
        OptionError: it cannot be converted.
    """
    replicas = parallel_state.get_data_parallel_world_size()
    if not checkpoint or not checkpoint.saved.zero_stage or checkpoint.saved.data_parallel_size == replicas:
        return checkpoint
    ranks = checkpoint.saved.data_parallel_size
    log(f"converting {checkpoint.path}, saved by {ranks} data-parallel ranks, for {replicas}")
    return checkpoint._replace(universal=on_first_rank(lambda: convert(checkpoint, options.save or options.load)))


def load_checkpoint(engine: Any, checkpoint: Checkpoint) -> None:
    """Load weights and the optimizer's state. The engine must have been built with ``checkpoint.load_universal`` where
    the checkpoint was converted. Call it on all ranks.

    Raises:
        InputError: DeepSpeed did not load it.
    """
    decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
    folder, name = os.path.split(checkpoint.universal or checkpoint.path)
    with reading(checkpoint.path):
        if engine.load_checkpoint(folder, tag=name)[0] is None:
            raise InputError(
                f"--load {checkpoint.path}: DeepSpeed found nothing in it for rank {distributed.get_rank()}"
            )
    # from a universal checkpoint, ZeRO 3 gives all groups the values of the first, and one tensor as count of steps
    for group, decay in zip(engine.optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
    if checkpoint.universal:
        for state in engine.optimizer.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()  # each group counts up its own
    distributed.barrier()
    if checkpoint.universal and distributed.get_rank() == 0:
        shutil.rmtree(checkpoint.universal)
    log(f"resumed from {checkpoint.path} at iteration {checkpoint.saved.iteration}")


def check_options(path: str, saved: SavedRun, options: argparse.Namespace) -> None:
    """Check that a run with these options can go on from a checkpoint.

    Raises:
        OptionError: it cannot.
    """
    for option in ("global_batch_size", "tensor_model_parallel_size", "zero_stage"):
        found, wanted = getattr(saved, option), getattr(options, option)
        if wanted is not None and found != wanted:
            raise OptionError(
                f"--load {path}: it was saved with --{option.replace('_', '-')} {found}, not {wanted}; resume with that"
            )


def open_checkpoint(path: str) -> Checkpoint:
    """Read what a checkpoint says of itself, and look whether all of it is there.

    Raises:
        InputError: it is not complete.
    """
    try:
        with open(os.path.join(path, COMPLETE), encoding="utf-8") as file:
            content = json.load(file)
        sizes = content.pop("files")
        saved = SavedRun(**content)
    except FileNotFoundError:
        raise InputError(f"it has no {COMPLETE}: its run ended while writing it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{COMPLETE}: {error}") from None
    for name, size in sizes.items():
        file_path = os.path.join(path, name)
        if not os.path.isfile(file_path):
            raise InputError(f"{name} is missing")
        if os.path.getsize(file_path) != size:
            raise InputError(f"{name} has {os.path.getsize(file_path)} bytes, not {size}")
    return Checkpoint(path, saved, universal=None)


def convert(checkpoint: Checkpoint, folder: str) -> str:
    """Convert a checkpoint into DeepSpeed's universal form.

    Args:
        folder: where the result goes, as large as the checkpoint.

    Returns:
        The path of the result.

    Raises:
        OptionError: DeepSpeed has no conversion for this kind of run.
        InputError: it failed.
    """
    saved = checkpoint.saved
    if saved.zero_stage == 3 and saved.tensor_model_parallel_size > 1:
        raise OptionError(
            f"--load {checkpoint.path}: DeepSpeed cannot convert ZeRO 3 with tensor parallelism; resume with the "
            f"{saved.data_parallel_size} data-parallel ranks that saved it"
        )
    output = os.path.join(folder, f"{os.path.basename(checkpoint.path)}_universal")
    shutil.rmtree(output, ignore_errors=True)  # of a run that ended before it had loaded it
    # a process of its own: it makes others by fork, which CUDA does not survive
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    command = [sys.executable, os.path.join(os.path.dirname(__file__), os.pardir, "convert_checkpoint.py")]
    command += ["--input_folder", checkpoint.path, "--output_folder", output]
    environment |= {"CUDA_VISIBLE_DEVICES": "", "CONVERTED_FOR": str(os.getpid())}
    with reading(checkpoint.path):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode:
        reason = (done.stdout.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise InputError(
            f"--load {checkpoint.path}: converting it into {output} failed: {reason}; resume with the "
            f"{saved.data_parallel_size} data-parallel ranks that saved it, or mend that"
        )
    os.remove(os.path.join(folder, "latest_universal"))
    return output


def _latest(folder: str) -> Checkpoint | None:
    """The complete checkpoint of the highest iteration. Prints a line for each later folder that is not complete."""
    iterations = _iterations(folder)
    for iteration in sorted(iterations, reverse=True):
        path = os.path.join(folder, iterations[iteration])
        try:
            return open_checkpoint(path)
        except InputError as error:
            log(f"--load {folder}: skipped {path}: {error}")
    return None


def _iterations(folder: str) -> dict[int, str]:
    """The names of a folder's checkpoints, complete or not, by iteration.

    Raises:
        InputError: the folder cannot be read.
    """
    try:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    except OSError as error:
        raise InputError(f"--load {folder}: cannot be read: {error.strerror}") from None
    return {int(match[1]): name for name in names if (match := FOLDER_NAME.fullmatch(name))}


def _check_visible(path: str) -> None:
    """Check that all ranks see a checkpoint that rank 0 has found.

    Raises:
        OptionError: one does not.
    """
    sees: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(sees, os.path.isfile(os.path.join(path, COMPLETE)))
    if not all(sees):
        raise OptionError(
            f"--load {path}: rank {sees.index(False)} does not see it; use a file system that all nodes share"
        )


def _tensor_parallel_layout(model: torch.nn.Module) -> dict[str, Any]:
    """How the parts of each parameter fit together, as patterns of names, for DeepSpeed's conversion: they are joined
    along the first dimension, but for these."""
    rows, whole = set(), set()
    for name, parameter in model.named_parameters():
        pattern = re.sub(r"\d+", r"\\d+", re.escape(name)) + "$"
        if not getattr(parameter, "tensor_model_parallel", False):
            whole.add(pattern)
        elif parameter.partition_dim == 1:
            rows.add(pattern)
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        constants.TP_REPLICATED_PARAMETER_PATTERNS: sorted(whole),
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: sorted(rows),
    }


def _remove(path: str) -> None:
    """Remove a checkpoint, its mark of completeness first."""
    if os.path.isfile(os.path.join(path, COMPLETE)):
        os.remove(os.path.join(path, COMPLETE))
    if os.path.isdir(path):
        shutil.rmtree(path)


def _files(path: str) -> list[str]:
    return [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]


def _sync(path: str) -> None:
    """Force a checkpoint's files and folders to disk, inner ones first."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync_file(os.path.join(folder, name))
        sync_file(folder)


def _sizes(path: str) -> dict[str, int]:
    return {os.path.relpath(file, path): os.path.getsize(file) for file in sorted(_files(path))}
