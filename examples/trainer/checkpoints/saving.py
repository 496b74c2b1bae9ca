"""Saving a checkpoint: its files are on disk before ``complete.json``, and that before older checkpoints go.

One that cannot be written is removed, and the older ones stay.
"""

import contextlib
import dataclasses
import json
import os
import re
import time
from typing import Any

import torch
from deepspeed.checkpoint import constants
from megatron.core import parallel_state
from torch import distributed

from megatron_bfp.errors import BFPError, InputError, OptionError
from megatron_bfp.files import sync_file, write_whole
from megatron_bfp.huggingface.checkpoint import COMPLETE

from ..config import TrainerConfig, key_value_heads
from ..ranks import log, on_first_rank, replicas, timestamp
from .failed_writes import FailedWrites, lack_of_room
from .folder import SavedRun, checkpoint_names, is_abandoned, open_checkpoint, remove_checkpoint, removing
from .history import DataHistory
from .save_folder import smallest_checkpoint


def smallest_of(config: TrainerConfig, vocab_size: int) -> int:
    """Fewest bytes that a checkpoint of this configuration takes; needs no model."""
    hidden = config.hidden_size
    attention = 2 * hidden * hidden + 2 * hidden * hidden * key_value_heads(config) // config.num_attention_heads
    layer = attention + 3 * hidden * config.ffn_hidden_size
    return smallest_checkpoint(config.num_layers * layer + 2 * vocab_size * hidden)


def check_writer(config: TrainerConfig, settings: dict[str, Any]) -> None:
    """Check that DeepSpeed writes checkpoints by ``torch.save``, and before ``save_checkpoint`` of its engine returns.

    Its decoupled writer is a process that shares the weights until the next update. If a write fails it ends, and later
    saves do nothing (DeepSpeed 0.19, ``runtime/checkpoint_engine/decoupled_checkpoint_engine.py``).

    Raises:
        OptionError: the configuration has another writer.
    """
    for name, value in (
        ("checkpoint.writer", settings.get("checkpoint", {}).get("writer")),
        ("datastates_ckpt", settings.get("datastates_ckpt")),
    ):
        if value:
            raise OptionError(
                f"--deepspeed_config {config.deepspeed_config}: {name} writes checkpoints in ways in which a failed "
                "write can go unnoticed; remove it"
            )


class NotSaved(BFPError):
    """A checkpoint that the run must not end without cannot be written."""

    on_every_rank = True


def save_checkpoint(engine: Any, config: TrainerConfig, iteration: int, history: DataHistory) -> str | None:
    """Save everything a run needs to resume exactly, then remove checkpoints beyond ``--keep-last``. Call it on all
    ranks.

    Returns:
        Why it could not be saved; None if it was. What was written of it is removed then.
    """
    start = time.monotonic()
    path = os.path.join(config.save, f"iter_{iteration:07d}")
    reason = on_first_rank(lambda: _make_room(engine, config, iteration, path))
    if reason is None:
        reason = _save(engine, config, iteration, history, path)
        if reason is not None and distributed.get_rank() == 0:
            remove_checkpoint(path)
    if reason is not None:
        log(f"{path} could not be saved: {reason} | {timestamp()}")
        return reason
    if distributed.get_rank() == 0 and _removes(config):
        _remove_older(config.save, iteration, config.keep_last or 1, config.save_retain_interval)
    distributed.barrier()  # a rank that ended before could make its launcher kill rank 0
    log(f"saved {path} in {time.monotonic() - start:.1f} s | {timestamp()}")
    return None


def _make_room(engine: Any, config: TrainerConfig, iteration: int, path: str) -> str | None:
    """Remove what is in the way of a checkpoint, and say what room is missing for it."""
    remove_checkpoint(path)  # files of another number of ranks would mix with ours
    if _removes(config):
        _remove_abandoned(config.save, iteration)
    return lack_of_room(config.save, _expected_bytes(engine, config.save))


def _removes(config: TrainerConfig) -> bool:
    return bool(config.keep_last or config.save_retain_interval)


def _expected_bytes(engine: Any, folder: str) -> int:
    """Size of a checkpoint: that of the last complete one, else the least for the model's parameters."""
    names = checkpoint_names(folder)
    complete = [step for step, name in names.items() if os.path.isfile(os.path.join(folder, name, COMPLETE))]
    if complete:
        return sum(_sizes(os.path.join(folder, names[max(complete)])).values())
    parts = parallel_state.get_tensor_model_parallel_world_size()
    return smallest_checkpoint(parts * sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()))


def _remove_abandoned(folder: str, iteration: int) -> None:
    """Remove what runs that were killed left of checkpoints before ``iteration``: it would fill the disk."""
    for older, name in checkpoint_names(folder).items():
        path = os.path.join(folder, name)
        if older < iteration and is_abandoned(path):
            with contextlib.suppress(OSError):
                remove_checkpoint(path)
                log(f"removed {path}, which is incomplete (--keep-last)")


def _save(engine: Any, config: TrainerConfig, iteration: int, history: DataHistory, path: str) -> str | None:
    """Write a checkpoint and complete it; returns the first failure of any rank."""
    failed = FailedWrites()
    state = {constants.UNIVERSAL_CHECKPOINT_INFO: _tensor_parallel_layout(engine.module)}
    with failed.noted_in(engine):
        engine.save_checkpoint(config.save, tag=os.path.basename(path), client_state=state, save_latest=False)
    reason = failed.of_any_rank()  # all ranks have written
    if reason is None:
        with failed.noted():
            if os.environ.get("LOCAL_RANK", "0") == "0":  # each node has its own files to bring to disk
                _sync(path)
        reason = failed.of_any_rank()
    if reason is None:
        with failed.noted():
            if distributed.get_rank() == 0:
                _complete(path, _saved_run(engine, config, iteration, history))
        reason = failed.of_any_rank()
    return reason


def _saved_run(engine: Any, config: TrainerConfig, iteration: int, history: DataHistory) -> SavedRun:
    consumed_samples = iteration * config.global_batch_size
    return SavedRun(
        iteration=iteration,
        consumed_samples=consumed_samples,
        global_batch_size=config.global_batch_size,
        data_parallel_size=replicas().size(),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        zero_stage=engine.zero_optimization_stage(),
        data=history.at(consumed_samples),
    )


def _complete(path: str, saved: SavedRun) -> None:
    """Declare a checkpoint complete, whose files are on disk, and the latest: each on disk before the next."""
    folder = os.path.dirname(path)
    sync_file(folder)
    content = dataclasses.asdict(saved) | {"files": _sizes(path)}
    write_whole(os.path.join(path, COMPLETE), json.dumps(content, indent=1).encode())
    sync_file(path)
    write_whole(os.path.join(folder, "latest"), os.path.basename(path).encode())
    sync_file(folder)


def _remove_older(folder: str, iteration: int, number: int, retained: int | None = None) -> None:
    """Remove complete checkpoints before ``iteration``, so that ``number`` are left with it, and those of steps
    divisible by ``retained``. One that another process reads stays until the next time."""
    names, complete = checkpoint_names(folder), []
    for older in sorted(other for other in names if other < iteration):
        with contextlib.suppress(InputError):
            complete.append((older, open_checkpoint(os.path.join(folder, names[older])).path))
    for older, path in complete[: max(0, len(complete) - (number - 1))]:
        if retained and older % retained == 0:
            continue
        with removing(path) as is_free:
            if not is_free:
                log(f"kept {path}, which another process reads")
                continue
            try:
                remove_checkpoint(path)
                log(f"removed {path} (--keep-last {number})")
            except OSError as error:
                log(f"{path} could not be removed (--keep-last {number}): {error}")


def _tensor_parallel_layout(model: torch.nn.Module) -> dict[str, Any]:
    """How the parts of each parameter fit together, for DeepSpeed's conversion. It takes patterns of names: parts are
    joined along the first dimension, unless a pattern says otherwise."""
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


def _sync(path: str) -> None:
    """Force a checkpoint's files and folders to disk, inner ones first."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync_file(os.path.join(folder, name))
        sync_file(folder)


def _sizes(path: str) -> dict[str, int]:
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    return {os.path.relpath(file, path): os.path.getsize(file) for file in sorted(files)}
