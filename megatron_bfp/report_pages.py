"""A report as Markdown that is readable in a terminal, as JSON, and as a figure."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from .errors import InputError
from .report import Compactness, Report, Spread
from .tables import format_table


def to_json(title: dict[str, Any], reports: Sequence[Report]) -> str:
    """All figures, with the ``title``'s entries before them."""
    return json.dumps(title | {"reports": [asdict(report) for report in reports]}, indent=2)


def to_markdown(prefix: str, order: str, reports: Sequence[Report]) -> str:
    """The whole report.

    Args:
        prefix: the dataset's path.
        order: a sentence that says in which order concatenation joins the documents.
    """
    parts = [f"# Best-fit packing of {prefix}", _corpus(reports), order]
    for report in reports:
        parts += [f"## seq_length {report.seq_length}", _verdict(report), _compactness(report), _sequences(report)]
        parts += [_cuts(report)]
    return "\n\n".join(parts) + "\n"


def check_drawing() -> None:
    """Raises:
    InputError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise InputError("the figure needs matplotlib: pip install 'megatron-bfp[report]'")


def draw(reports: Sequence[Report]) -> bytes:
    """Truncations by document length as a PNG, a column for each sequence length.

    Raises:
        InputError: matplotlib is not installed.
    """
    check_drawing()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(reports), 6.4), layout="constrained")
    panels = figure.subplots(2, len(reports), squeeze=False, sharex="col", sharey="row")
    for report, (cuts, shares) in zip(reports, panels.T):
        classes = report.length_classes
        lengths = [found.longest for found in classes]
        concatenation = {"color": "black", "linestyle": "-", "marker": "o", "label": "concatenation"}
        packing = {"color": "0.55", "linestyle": "--", "marker": "s", "markerfacecolor": "white", "label": "packing"}
        cuts.plot(lengths, [found.cuts_of_concatenation for found in classes], **concatenation)
        cuts.plot(lengths, [found.cuts_of_packing for found in classes], **packing)
        shares.plot(lengths, [100 * found.cut_by_concatenation / found.documents for found in classes], **concatenation)
        shares.plot(lengths, [100 * found.cut_by_packing / found.documents for found in classes], **packing)
        for panel in (cuts, shares):
            panel.axvline(report.seq_length, color="0.4", linewidth=1, linestyle=":", zorder=0, label="seq_length")
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:g}" if tokens < 1024 else f"{tokens / 1024:g}k")
            panel.grid(axis="y", color="0.92")
        cuts.set_yscale("symlog", linthresh=1)
        cuts.set_ylim(
            -0.4, 3 * max(1, *(found.cuts_of_concatenation for other in reports for found in other.length_classes))
        )
        cuts.set_title(f"seq_length {report.seq_length:,}")
        shares.set_xlabel("document length up to (tokens)")
    panels[0][0].set_ylabel("truncations (places where documents are cut)")
    panels[1][0].set_ylabel("documents cut (%)")
    panels[0][0].legend(loc="upper left")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    return image.getvalue()


def _corpus(reports: Sequence[Report]) -> str:
    rows = []
    for report in reports:
        shares = [_percent(report.long_documents, report.documents), _percent(report.long_tokens, report.tokens)]
        rows.append([report.seq_length, report.documents, report.empty_documents, report.tokens])
        rows[-1] += [report.long_documents, shares[0], report.long_tokens, shares[1]]
    header = ["L", "documents", "of these empty", "tokens", "documents longer than L", "%", "tokens in them", "%"]
    return format_table(header, rows, markdown=True)


def _verdict(report: Report) -> str:
    """What packing does here, in sentences."""
    best = report.packings[0]
    cut = [
        sum(getattr(found, name) for found in report.length_classes if found.longest <= report.seq_length)
        for name in ("cut_by_concatenation", "cut_by_packing")
    ]
    extra = best.sequences - report.concatenated_sequences
    sentences = [
        f"Of the documents that fit into a sequence, concatenation cuts {cut[0]:,}, packing {cut[1]:,}.",
        f"Packing needs {extra:,} more sequences than concatenation "
        f"({_percent(extra, report.concatenated_sequences, 5)} % of {report.concatenated_sequences:,}).",
    ]
    if best.sequences == best.lower_bound:
        sentences.append(f"No packing could do better than {best.lower_bound:,}: this one is optimal.")
    else:
        above = best.sequences - best.lower_bound
        sentences.append(
            f"No packing could do better than {best.lower_bound:,}: this one is at most {above:,} "
            f"({_percent(above, best.lower_bound, 5)} %) above the best."
        )
    if best.lower_bound > report.concatenated_sequences:
        sentences.append(
            "There are too few short documents to fill the sequences, whatever packs them; a longer seq_length would."
        )
    return " ".join(sentences)


def _compactness(report: Report) -> str:
    length, rows = report.seq_length, []
    fewest = report.concatenated_sequences
    padding = fewest * length - report.tokens
    rows.append(["concatenation", fewest, padding, _percent(padding, fewest * length, 4), 0, "0.00000", fewest])
    for found in report.packings:
        extra = found.sequences - fewest
        rows.append(
            [_name(found), found.sequences, found.padding, _percent(found.padding, found.sequences * length, 4)]
        )
        rows[-1] += [extra, _percent(extra, fewest, 5), found.lower_bound]
    header = ["", "sequences", "padding", "% of positions", "more than concatenation", "%", "lower bound"]
    return format_table(header, rows, markdown=True)


def _sequences(report: Report) -> str:
    rows = []
    for found in report.packings:
        documents, work = _spread(found.documents_per_sequence, ""), _spread(found.attention_work, ".4f")
        rows.append([_name(found), *documents, *work])
    header = ["", "documents a sequence, p50", "p99", "max", "attention work, p50", "p99", "max"]
    note = "Attention work is the sum of squared chunk lengths over L squared; full causal attention is 1."
    return f"{format_table(header, rows, markdown=True)}\n\n{note}"


def _cuts(report: Report) -> str:
    rows = []
    for found in report.length_classes:
        counts = [found.documents, found.tokens, found.cut_by_concatenation]
        counts += [_percent(found.cut_by_concatenation, found.documents), found.cuts_of_concatenation]
        rows.append([f"{found.shortest:,} to {found.longest:,}", *counts, found.cut_by_packing, found.cuts_of_packing])
    header = ["length (tokens)", "documents", "tokens", "cut by concatenation", "%", "times", "cut by packing", "times"]
    return format_table(header, rows, markdown=True)


def _name(found: Compactness) -> str:
    cap = found.max_documents_per_sequence
    return "packing" if cap is None else f"packing, at most {cap} documents"


def _spread(found: Spread, form: str) -> list[str]:
    return [format(value, form or ",") for value in (found.median, found.p99, found.maximum)]


def _percent(part: int, whole: int, digits: int = 2) -> str:
    return f"{100 * part / whole if whole else 0:.{digits}f}"
