"""What each rank saw of document boundaries in the first training step, and how all ranks come to one verdict."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import distributed

from ..errors import IntegrationError
from .positions import ONE_EACH, describe_positions


@dataclass(frozen=True)
class Report:
    """What one rank saw in the first step. Small, as every rank sends it to all."""

    faults: tuple[str, ...]
    """What is wrong, one line each; empty if nothing."""
    replica: int = 0
    """The data-parallel rank: ranks that share it train on the same batches."""
    stage: int = 0
    """The pipeline stage."""
    layers: dict[str, int] = field(default_factory=dict)
    """Kind of module, with its kernel -> modules that got the right boundaries."""
    positions: dict[str, int] = field(default_factory=dict)
    """What is true of positions -> attention layers; 0 for what an embedding adds."""
    seen: bytes = b""
    """Digest of the boundaries that attention got; empty without attention on this rank."""
    read: bytes = b""
    """Digest of the boundaries of the batches; empty if this rank reads none."""


def gather_reports(report: Report) -> list[Report]:
    """The reports of all ranks, in their order. All ranks must call it."""
    if not distributed.is_initialized():
        return [report]
    reports: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(reports, report)
    return reports


def agree(reports: list[Report]) -> str:
    """What all ranks saw together, in words.

    Args:
        reports: of all ranks, in their order.

    Raises:
        IntegrationError: boundaries did not reach attention, or not the right ones. The same on all ranks.
    """
    raise_first_fault(reports)
    read = {report.replica: report.read for report in reports if report.read}
    for rank, report in enumerate(reports):
        if report.seen and report.seen != read.get(report.replica, report.seen):
            raise stopped("attention got other boundaries than those of the batches", rank)
    layers: Counter[str] = Counter()
    positions: Counter[str] = Counter()
    by_stage = {report.stage: report for report in sorted(reports, key=_unknown_positions, reverse=True)}
    for _, report in sorted(by_stage.items()):
        layers.update(report.layers)
        positions.update(report.positions)  # keeps those that are counted 0 times
    if not layers:
        raise IntegrationError("no attention layer was called in the first step, so its boundaries are not known")
    return f"{_in_words(layers)}; {describe_positions(positions)}"


def _unknown_positions(report: Report) -> int:
    """Kinds of positions about which this rank's rows showed nothing, where those of another may have."""
    return sum(text.endswith(ONE_EACH) for text in report.positions)


def raise_first_fault(reports: list[Report]) -> None:
    """Stop if a rank has a fault.

    Raises:
        IntegrationError: one has; the same on all ranks.
    """
    for rank, report in enumerate(reports):
        if report.faults:
            more = sum(len(other.faults) for other in reports) - 1
            raise stopped(report.faults[0] + (f" (and {more:,} more like this)" if more else ""), rank)


def stopped(fault: str, rank: int) -> IntegrationError:
    """The error that ends a run."""
    return IntegrationError(
        f"rank {rank}: {fault}. Attention would cross documents, so training stops before the first update; leave out "
        "the option, layer spec or wrapper that calls the model without boundaries"
    )


def _in_words(layers: Counter[str]) -> str:
    return ", ".join(f"{count:,} x {kind}" for kind, count in sorted(layers.items()))
