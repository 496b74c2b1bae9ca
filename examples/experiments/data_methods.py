"""The ways to make sequences from documents that the experiments compare: those of the paper's appendix C.3, and
packing with its options."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_bfp.arguments import checked_count
from megatron_bfp.errors import OptionError
from megatron_bfp.files import write_whole

from .intervals import checked_seeds
from .training_runs import TrainingRun


class Method(NamedTuple):
    """One way to make sequences."""

    title: str
    options: dict[str, Any]
    """The trainer's options for it."""


class Comparison(NamedTuple):
    """Two methods whose runs with the same seed are compared."""

    method: str
    baseline: str


METHODS = {
    "concat": Method("concatenation", {"data-impl": "mmap"}),
    "concat_masked": Method(
        "concatenation, document mask", {"data-impl": "mmap", "dataloader-inter-document-masking": True}
    ),
    "pack": Method("packing", {"data-impl": "bfp"}),
}
BASELINE = "concat"
COMPARISONS = (Comparison("concat_masked", "concat"), Comparison("pack", "concat"), Comparison("pack", "concat_masked"))

PACKING_OPTIONS = {
    "pack_even": Method("packing, even sequences", {"data-impl": "bfp", "even-sequences": True}),
    # over one batch, on one rank, balancing changes no batch: over four it does
    "pack_balanced": Method("packing, balanced over 4 batches", {"data-impl": "bfp", "balance-batches": 4}),
    "pack_targets": Method("packing, targets only", {"data-impl": "bfp", "targets-only": True}),
}
"""Options that must not train worse models: each is compared with packing."""

Methods = dict[str, Method]


def chosen_methods(packing_options: bool) -> tuple[Methods, tuple[Comparison, ...]]:
    """The methods of an experiment, with or without those of ``--packing-options``, and what is compared."""
    if not packing_options:
        return METHODS, COMPARISONS
    return METHODS | PACKING_OPTIONS, (*COMPARISONS, *(Comparison(name, "pack") for name in PACKING_OPTIONS))


def add_run_options(parser: argparse.ArgumentParser, seeds: int) -> None:
    """Options that say which runs an experiment has.

    Args:
        seeds: default of ``--seeds``.
    """
    parser.add_argument("--seeds", type=int, default=seeds, metavar="N", help="runs per method (default: %(default)s)")
    parser.add_argument(
        "--first-seed",
        type=int,
        default=1,
        metavar="N",
        help="seed of the first runs; the pilots have others than the experiment (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument(
        "--packing-options",
        action="store_true",
        help="also run packing with even sequences, balanced batches and targets only (default: off)",
    )


def check_run_options(options: argparse.Namespace) -> None:
    """Check the options of ``add_run_options``.

    Raises:
        OptionError: one cannot be used.
    """
    checked_seeds(options.seeds)
    checked_count("--first-seed", options.first_seed)
    checked_count("--jobs", options.jobs)


def check_settings(folder: str, settings: object) -> None:
    """Refuse a folder with runs that have other settings, such as those of an older version of the experiment.

    Raises:
        OptionError: it has such runs.
    """
    path = os.path.join(folder, "settings.json")
    if not os.path.exists(path):
        write_whole(path, json.dumps({"settings": repr(settings)}).encode())
    with open(path, encoding="utf-8") as file:
        if json.load(file)["settings"] != repr(settings):
            raise OptionError(f"--output {folder}: has runs with other settings; give another folder")


def seeds_of(options: argparse.Namespace) -> range:
    """The seeds that the options ask for."""
    return range(options.first_seed, options.first_seed + options.seeds)


def method_runs(folder: str, methods: Methods, seeds: Sequence[int], options: Mapping[str, Any]) -> list[TrainingRun]:
    """A run for each seed and method, ordered by seed and then by method, in a folder of its own.

    Args:
        options: of the trainer, the same for all runs.
    """
    runs = []
    for seed in seeds:
        for name, method in methods.items():
            own = run_folder(folder, name, seed)
            # without a cache of their own, methods would write megatron-core's indices to the same files
            of_run = {"seed": seed, "data-cache-path": os.path.join(own, "cache")}
            runs.append(TrainingRun(f"{name}, seed {seed}", own, {**options, **method.options, **of_run}))
    return runs


def run_folder(folder: str, method: str, seed: int) -> str:
    """The folder of a run."""
    return os.path.join(folder, f"{method}_seed{seed}")


def by_method(methods: Methods, results: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """The results of ``method_runs``, for each method in the order of the seeds."""
    return {name: results[number :: len(methods)] for number, name in enumerate(methods)}
