"""A report as Markdown that is readable in a terminal, as JSON, and as a figure."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from ..errors import InputError
from ..optional import pip_command
from ..tables import format_table, wrap
from .report import Compactness, Report, Spread


def to_json(title: dict[str, Any], reports: Sequence[Report]) -> str:
    """All figures, with the ``title``'s entries before them."""
    return json.dumps(title | {"reports": [asdict(report) for report in reports]}, indent=2)


def to_markdown(prefix: str, order: str, reports: Sequence[Report]) -> str:
    """The whole report, in lines of at most 80 columns; what people came for is first.

    Args:
        prefix: the dataset's path.
        order: a sentence that says in which order concatenation joins the documents.
    """
    parts = [f"# Best-fit packing of {prefix}", _headline(reports), _corpus(reports), wrap(order)]
    for report in reports:
        parts += [f"## seq_length {report.seq_length}", wrap(_verdict(report)), _compactness(report)]
        parts += [_sequences(report), _cuts(report)]
    return "\n\n".join(parts) + "\n"


def can_draw() -> bool:
    """Whether matplotlib is installed, which ``draw`` needs."""
    return find_spec("matplotlib") is not None


def draw(reports: Sequence[Report]) -> bytes:
    """Truncations by document length as a PNG, a column for each sequence length.

    Raises:
        InputError: matplotlib is not installed.
    """
    if not can_draw():
        raise InputError(f"the figure needs matplotlib: {pip_command('matplotlib')}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(reports), 6.4), layout="constrained")
    panels = figure.subplots(2, len(reports), squeeze=False, sharex="col", sharey="row")
    for report, (cuts, shares) in zip(reports, panels.T):
        classes = report.length_classes
        lengths = [row.longest for row in classes]
        concatenation = {"color": "black", "linestyle": "-", "marker": "o", "label": "concatenation"}
        packing = {"color": "0.55", "linestyle": "--", "marker": "s", "markerfacecolor": "white", "label": "packing"}
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
        cuts.set_ylim(
            -0.4, 3 * max(1, *(row.cuts_of_concatenation for other in reports for row in other.length_classes))
        )
        cuts.set_title(f"seq_length {report.seq_length:,}")
        shares.set_xlabel("document length up to (tokens)")
    panels[0][0].set_ylabel("truncations (how often documents are cut)")
    panels[1][0].set_ylabel("documents cut (%)")
    panels[0][0].legend(loc="upper left")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    return image.getvalue()


def _headline(reports: Sequence[Report]) -> str:
    """Documents that are cut though they would fit into a sequence, before and after."""
    rows = []
    for report in reports:
        cut, sequences = cut_needlessly(report), report.packings[0].sequences
        extra = sequences - report.concatenated_sequences
        rows.append([report.seq_length, *cut, extra, f"{_percent(extra, report.concatenated_sequences, 5)} %"])
    header = ["seq_length", "concatenation", "packing", "more sequences", "by"]
    note = "Documents cut needlessly, that is, though they fit into one sequence:"
    return f"{note}\n\n{format_table(header, rows, markdown=True)}"


def cut_needlessly(report: Report) -> tuple[int, int]:
    """Documents of at most seq_length tokens that concatenation cuts, and that packing cuts."""
    fitting = [row for row in report.length_classes if row.longest <= report.seq_length]
    return sum(row.cut_by_concatenation for row in fitting), sum(row.cut_by_packing for row in fitting)


def _corpus(reports: Sequence[Report]) -> str:
    rows = []
    for report in reports:
        shares = [_percent(report.long_documents, report.documents), _percent(report.long_tokens, report.tokens)]
        rows.append([report.seq_length, report.long_documents, shares[0], report.long_tokens, shares[1]])
    first = reports[0]
    size = f"{first.documents:,} documents ({first.empty_documents:,} of them empty), {first.tokens:,} tokens"
    header = ["seq_length", "longer documents", "%", "tokens in them", "%"]
    note = wrap(f"{size}. Documents longer than a sequence must be cut:")
    return f"{note}\n\n{format_table(header, rows, markdown=True)}"


def _verdict(report: Report) -> str:
    """What packing does here, in sentences."""
    best = report.packings[0]
    cut = cut_needlessly(report)
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
    length, fewest = report.seq_length, report.concatenated_sequences
    padding = fewest * length - report.tokens
    sequences = [["concatenation", fewest, 0, "0.00000", fewest]]
    positions = [["concatenation", padding, _percent(padding, fewest * length, 4)]]
    for packing in report.packings:
        extra = packing.sequences - fewest
        sequences.append([_name(packing), packing.sequences, extra, _percent(extra, fewest, 5), packing.lower_bound])
        positions.append([_name(packing), packing.padding, _percent(packing.padding, packing.sequences * length, 4)])
    tables = [
        format_table(["", "sequences", "more than concatenation", "%", "lower bound"], sequences, markdown=True),
        format_table(["", "padding", "% of positions"], positions, markdown=True),
    ]
    if len(report.packings) > 1:
        caps = (packing.max_documents_per_sequence for packing in report.packings)
        cap = next(cap for cap in caps if cap)
        tables.insert(0, f'"at most {cap:,}" is packing with --max-documents-per-sequence {cap}.')
    return "\n\n".join(tables)


def _sequences(report: Report) -> str:
    rows = []
    for packing in report.packings:
        documents, work = _spread(packing.documents_per_sequence, ""), _spread(packing.attention_work, ".4f")
        rows.append([_name(packing), *documents, *work])
    header = ["", "documents p50", "p99", "max", "work p50", "p99", "max"]
    note = (
        "Documents per sequence, and attention work: the sum of squared chunk lengths over L squared; full causal "
        "attention is 1."
    )
    return f"{wrap(note)}\n\n{format_table(header, rows, markdown=True)}"


def _cuts(report: Report) -> str:
    rows = []
    for row in report.length_classes:
        share = _percent(row.cut_by_concatenation, row.documents)
        concatenation = [row.cut_by_concatenation, share, row.cuts_of_concatenation]
        packing = [row.cut_by_packing, row.cuts_of_packing]
        rows.append([f"{row.shortest:,} to {row.longest:,}", row.documents, *concatenation, *packing])
    header = ["length (tokens)", "documents", "cut", "%", "times", "packing", "times"]
    note = "By document length: documents cut, and how often, by concatenation and then by packing."
    return f"{wrap(note)}\n\n{format_table(header, rows, markdown=True)}"


def _name(packing: Compactness) -> str:
    cap = packing.max_documents_per_sequence
    return "packing" if cap is None else f"at most {cap:,}"


def _spread(spread: Spread, form: str) -> list[str]:
    return [format(value, form or ",") for value in (spread.median, spread.p99, spread.maximum)]


def _percent(part: int, whole: int, digits: int = 2) -> str:
    return f"{100 * part / whole if whole else 0:.{digits}f}"
