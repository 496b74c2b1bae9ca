"""Resuming: the latest complete checkpoint that fits the run, checked before anything is built, then loaded.

ZeRO divides the optimizer's state by the number of data-parallel ranks. For another number the checkpoint is converted
into DeepSpeed's universal form, which is removed once it is loaded.
"""

import os
import shutil
import subprocess
import sys
from typing import Any

import torch
from torch import distributed

from megatron_bfp.errors import InputError, OptionError
from megatron_bfp.huggingface.checkpoint import COMPLETE, reading

from ..config import TrainerConfig, flag
from ..ranks import log, on_first_rank, replicas
from .folder import Checkpoint, SavedRun, latest_checkpoint
from .history import OVERRIDE, DataHistory, changed_blocks, differences

EXAMPLES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def find_checkpoint(config: TrainerConfig, description: dict[str, Any]) -> Checkpoint | None:
    """The latest complete checkpoint of ``--load``. Call it on all ranks.

    Args:
        description: of this run, by ``describe_run``.

    Returns:
        None without ``--load``, or if the folder has none.

    Raises:
        OptionError: it does not fit the options, or a rank does not see it.
    """
    if config.load is None:
        return None
    checkpoint = on_first_rank(lambda: latest_checkpoint(config.load))
    if checkpoint is None:
        log(f"--load {config.load}: no complete checkpoint there, starting from the beginning")
        return None
    _check_visible(checkpoint.path)
    check_options(checkpoint.path, checkpoint.saved, config)
    check_description(checkpoint.path, checkpoint.saved, description, config.override_checkpoint_args)
    return checkpoint


def _check_visible(path: str) -> None:
    """Check that all ranks see a checkpoint that rank 0 sees.

    Raises:
        OptionError: one does not.
    """
    sees: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(sees, os.path.isfile(os.path.join(path, COMPLETE)))
    if not all(sees):
        raise OptionError(
            f"--load {path}: rank {sees.index(False)} does not see it; use a file system that all nodes share"
        )


def check_options(path: str, saved: SavedRun, config: TrainerConfig) -> None:
    """Check the options that a resumed run must keep.

    Raises:
        OptionError: one differs.
    """
    for name in ("global_batch_size", "tensor_model_parallel_size", "zero_stage"):
        before, now = getattr(saved, name), getattr(config, name)
        if now is not None and before != now:
            raise OptionError(f"--load {path}: it was saved with {flag(name)} {before}, not {now}; resume with that")


def check_description(path: str, saved: SavedRun, description: dict[str, Any], override: bool) -> None:
    """Check that a run resumes with the data and model of a checkpoint, or overrides them.

    Raises:
        OptionError: it does neither.
    """
    if saved.data is None:
        log(
            f"--load {path}: saved by a version that did not record its data; make sure that --data-path, --split, "
            "--seq-length and --seed are those of its run"
        )
    listed = [] if saved.data is None else differences(saved.data, description)
    listed += changed_blocks(saved.data or {}, description, saved.iteration)
    changes = "; ".join(listed)
    if not changes:
        return
    if not override:
        raise OptionError(
            f"--load {path}: it was saved with {changes}; resume with what it was saved with, or give {OVERRIDE} to "
            "go on with this: some samples may then be seen twice and others never"
        )
    log(f"{OVERRIDE}: {path} was saved with {changes}")
    log(f"{OVERRIDE}: {_consumed(saved)}; the run goes on at sample {saved.consumed_samples:,} of the new order")


def continue_history(
    config: TrainerConfig, description: dict[str, Any], dataset: Any, checkpoint: Checkpoint | None
) -> DataHistory:
    """The history of a run that starts, or that resumes in the order of its checkpoint. Call it on all ranks.

    Raises:
        OptionError: the order of samples has changed.
    """
    if checkpoint is None or checkpoint.saved.data is None:
        return DataHistory(description, dataset)
    saved = checkpoint.saved
    same_order = on_first_rank(lambda: DataHistory(description, dataset).order(saved.consumed_samples))
    is_same = same_order == saved.data["order"]
    if not is_same and not config.override_checkpoint_args:
        cause = "--data-impl mmap" if config.data_impl == "mmap" else "--balance-batches above 1"
        is_possible = config.data_impl == "mmap" or config.balance_batches > 1
        also = f" (with {cause}, --train-iters may change it)" if is_possible else ""
        raise OptionError(
            f"--load {checkpoint.path}: the order of samples is another one than that of its run{also}; resume with "
            f"the options and the version that saved it, or give {OVERRIDE} to go on with this order: some samples may "
            "then be seen twice and others never"
        )
    if not is_same:
        log(f"{OVERRIDE}: the order of samples is another one than before; {_consumed(saved)}")
    return DataHistory(description, dataset, saved.consumed_samples, saved.data["consumed"])


def _consumed(saved: SavedRun) -> str:
    if saved.data is None:
        return f"samples consumed so far: {saved.consumed_samples:,}"
    counts = ", ".join(f"{count:,} of {prefix}" for prefix, count in saved.data["consumed"].items())
    return f"samples consumed so far: {counts}"


def convert_for_ranks(config: TrainerConfig, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Convert a checkpoint if another number of ranks saved it. Call it on all ranks.

    Raises:
        OptionError: it cannot be converted.
    """
    number = replicas().size()
    if not checkpoint or not checkpoint.saved.zero_stage or checkpoint.saved.data_parallel_size == number:
        return checkpoint
    ranks = checkpoint.saved.data_parallel_size
    log(f"converting {checkpoint.path}, saved by {ranks} data-parallel ranks, for {number}")
    return checkpoint._replace(universal=on_first_rank(lambda: convert(checkpoint, config.save or config.load)))


def convert(checkpoint: Checkpoint, folder: str) -> str:
    """Convert a checkpoint into DeepSpeed's universal form.

    Args:
        folder: where the result goes; it is as large as the checkpoint.

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
    command = [sys.executable, os.path.join(EXAMPLES, "convert_checkpoint.py")]
    command += ["--input_folder", checkpoint.path, "--output_folder", output]
    environment |= {"CUDA_VISIBLE_DEVICES": "", "CONVERTED_FOR": str(os.getpid())}
    with reading(checkpoint.path):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode:
        reason = (done.stdout.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise InputError(
            f"--load {checkpoint.path}: converting it into {output} failed: {reason}; resume with the "
            f"{saved.data_parallel_size} data-parallel ranks that saved it, or fix that"
        )
    os.remove(os.path.join(folder, "latest_universal"))
    return output


def load_checkpoint(engine: Any, checkpoint: Checkpoint) -> None:
    """Load weights and the optimizer's state. If the checkpoint was converted, the engine must have been built with
    ``checkpoint.load_universal``. Call it on all ranks.

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
