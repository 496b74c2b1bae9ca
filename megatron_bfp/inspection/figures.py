"""The figures of a report, as PNG files. They need matplotlib."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

from ..errors import InputError
from ..optional import pip_command
from .report import Report

BEFORE = {"color": "black", "linestyle": "-"}
AFTER = {"color": "0.55", "linestyle": "--"}
BEFORE_MARKS = {"marker": "o"}
AFTER_MARKS = {"marker": "s", "markerfacecolor": "white"}
LEAST_PERCENT = 0.01
"""Bottom of the axis of sequences: one in ten thousand."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_truncations(reports: Sequence[Report]) -> bytes:
    """Truncations by document length as a PNG, a column for each sequence length.

    Raises:
        InputError: matplotlib is not installed.
    """
    figure, panels = _panels(len(reports), share_x="col")
    for report, (cuts, shares) in zip(reports, panels.T):
        classes = report.length_classes
        lengths = [row.longest for row in classes]
        concatenation = BEFORE | BEFORE_MARKS | {"label": "concatenation"}
        packing = AFTER | AFTER_MARKS | {"label": "packing"}
        cuts.plot(lengths, [row.cuts_of_concatenation for row in classes], **concatenation)
        cuts.plot(lengths, [row.cuts_of_packing for row in classes], **packing)
        shares.plot(lengths, [100 * row.cut_by_concatenation / row.documents for row in classes], **concatenation)
        shares.plot(lengths, [100 * row.cut_by_packing / row.documents for row in classes], **packing)
        for panel in (cuts, shares):
            panel.axvline(report.seq_length, color="0.4", linewidth=1, linestyle=":", zorder=0, label="seq_length")
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:g}" if tokens < 1024 else f"{tokens / 1024:g}k")
            panel.grid(axis="y", color="0.92")
        cuts.set_yscale("symlog", linthresh=1)
        most_cuts = max([1, *(row.cuts_of_concatenation for other in reports for row in other.length_classes)])
        cuts.set_ylim(-0.4, 3 * most_cuts)
        cuts.set_title(f"seq_length {report.seq_length:,}")
        shares.set_xlabel("document length up to (tokens)")
    panels[0][0].set_ylabel("truncations (how often documents are cut)")
    panels[1][0].set_ylabel("documents cut (%)")
    panels[0][0].legend(loc="upper left")
    return _png(figure)


def draw_sequences(reports: Sequence[Report]) -> bytes:
    """Documents and work per sequence as a PNG, without and with even sequences; a column for each sequence length.

    Raises:
        InputError: matplotlib is not installed.
    """
    figure, panels = _panels(len(reports), share_x="none")
    for report, (documents, work) in zip(reports, panels.T):
        points = report.distribution
        more = [100 - point.percent for point in points]
        at_least = [max(percent, LEAST_PERCENT) for percent in more]  # a logarithmic axis has no 0
        best_fit, even = BEFORE | {"label": "best fit"}, AFTER | {"label": "--even-sequences"}
        documents.plot([point.documents for point in points], at_least, **best_fit)
        documents.plot([point.documents_even for point in points], at_least, **even)
        work.plot([point.work for point in points], more, **best_fit)
        work.plot([point.work_even for point in points], more, **even)
        documents.set_xscale("log")
        documents.xaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
        documents.set_yscale("log")
        documents.set_ylim(LEAST_PERCENT, 130)
        documents.yaxis.set_major_formatter(lambda share, _: f"{share:g}")
        work.set_ylim(0, 103)
        for panel in (documents, work):
            panel.grid(color="0.92")
        documents.set_title(f"seq_length {report.seq_length:,}")
        documents.set_xlabel("documents per sequence")
        work.set_xlabel("work per sequence (1: full causal attention)")
    for first_of_row in panels[:, 0]:
        first_of_row.set_ylabel("sequences with more (%)")
    panels[0][0].legend(loc="lower left")
    return _png(figure)


def _panels(columns: int, share_x: Literal["none", "col"]) -> tuple[Any, Any]:
    """A figure of two rows, and its panels [2, columns]."""
    if not can_draw():
        raise InputError(f"the figures need matplotlib: {pip_command('matplotlib')}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, 6.4), layout="constrained")
    return figure, figure.subplots(2, columns, squeeze=False, sharex=share_x, sharey="row")


def _png(figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    return image.getvalue()
