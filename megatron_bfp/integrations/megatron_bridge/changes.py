"""Checks that are added to functions of Megatron-Bridge. With other datasets than ours, these work as before."""

import functools
from collections.abc import Callable
from typing import Any

from megatron.bridge.data import loaders
from megatron.bridge.training import checkpointing, config, gpt_step, train
from megatron.bridge.utils import instantiate_utils

from ...attention.boundary_check import BoundaryCheck
from ...errors import UnsupportedMegatronError
from ..hooks import replace
from ..megatron_lm.first_step import report_first_step
from ..refusals import print_refusals_in_one_line
from . import options
from .provider import BFPDatasetProvider
from .split_rows import count_targets_of_whole_rows, split_whole_rows

OF_LOADERS = "cfg, train_state, build_train_valid_test_datasets_provider, dp_group, eval_dp_group"
OF_STEP = (
    "forward_step_func, data_iterator, model, optimizer, scheduler, global_state, pg_collection, "
    "forward_backward_func, p2p_communicator"
)


def make() -> None:
    """Change Megatron-Bridge in this process, and let its saved recipes name our class.

    Raises:
        UnsupportedMegatronError: this Megatron-Bridge is not one that we know.
    """
    options.check_version()
    try:
        replace(config.ConfigContainer, "validate", "self", check_recipe)
        replace(loaders, "build_train_valid_test_data_loaders", OF_LOADERS, begin_at_the_resumed_sample)
        replace(train, "train_step", OF_STEP, check_first_step)
        replace(gpt_step, "_partition_packed_batch_for_cp", "batch, cp_group", split_whole_rows)
        replace(checkpointing, "read_run_config", "run_config_filename", keep_what_is_read)
    except UnsupportedMegatronError as error:
        raise options.unsupported(str(error)) from None
    print_refusals_in_one_line()
    instantiate_utils.register_allowed_target_prefix(BFPDatasetProvider.__module__)


def check_recipe(validate: Callable) -> Callable:
    """``ConfigContainer.validate``, before which our dataset checks the recipe."""

    @functools.wraps(validate)
    def check_and_validate(self: Any) -> None:
        if isinstance(self.dataset, BFPDatasetProvider):
            self.dataset.fit(self)
        validate(self)

    return check_and_validate


_of_the_checkpoint: dict[str, Any] = {}
"""The recipe that is stored in the checkpoint that was loaded, as Megatron-Bridge read it."""


def keep_what_is_read(read_run_config: Callable) -> Callable:
    """The function that reads the recipe in a checkpoint, which also keeps it for us."""

    @functools.wraps(read_run_config)
    def read_and_keep(run_config_filename: str) -> dict[str, Any]:
        run_config = read_run_config(run_config_filename)
        _of_the_checkpoint.clear()
        _of_the_checkpoint.update(run_config)
        return run_config

    return read_and_keep


def begin_at_the_resumed_sample(build_loaders: Callable) -> Callable:
    """The function that builds loaders, before which our dataset learns where the run begins."""

    @functools.wraps(build_loaders)
    def begin_and_build(cfg: Any, train_state: Any, *others: Any, **keywords: Any) -> Any:
        if isinstance(cfg.dataset, BFPDatasetProvider):
            group = keywords["dp_group"] if "dp_group" in keywords else others[1]
            cfg.dataset.begin(cfg, train_state, group.size(), _of_the_checkpoint)
        return build_loaders(cfg, train_state, *others, **keywords)

    return begin_and_build


def check_first_step(train_step: Callable) -> Callable:
    """``train_step``, the first time with a check that boundaries reach attention."""

    @functools.wraps(train_step)
    def check_and_step(
        forward_step: Callable,
        batches: Any,
        model: list[Any],
        optimizer: Any,
        scheduler: Any,
        state: Any,
        groups: Any,
        forward_backward: Callable,
        *others: Any,
    ) -> Any:
        dataset = state.cfg.dataset
        if isinstance(dataset, BFPDatasetProvider) and dataset.counts_by_rows(state.cfg.model):
            forward_step = count_targets_of_whole_rows(forward_step, groups.cp)
        if isinstance(dataset, BFPDatasetProvider) and not dataset._is_checked:
            dataset._is_checked = True
            check = BoundaryCheck(
                model,
                dataset.seq_length,
                groups.dp.rank(),
                groups.pp.rank(),
                context_ranks=groups.cp.size(),
                context_rank=groups.cp.rank(),
            )
            forward_backward = report_first_step(forward_backward, check)
        return train_step(forward_step, batches, model, optimizer, scheduler, state, groups, forward_backward, *others)

    return check_and_step
