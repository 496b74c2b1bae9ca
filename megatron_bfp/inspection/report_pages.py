"""A report as Markdown that is readable in a terminal, and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..tables import format_table, wrap
from .report import Compactness, Report, Spread
from .waiting import ATTENTION_COEFFICIENT, BALANCED_TOGETHER, STEPS, TimeLost


def to_json(title: dict[str, Any], reports: Sequence[Report]) -> str:
    """All figures, with the ``title``'s entries before them."""
    return json.dumps(title | {"reports": [asdict(report) for report in reports]}, indent=2)


def to_markdown(prefix: str, order: str, reports: Sequence[Report], hidden_size: int) -> str:
    """The whole report, in lines of at most 80 columns; what people came for is first.

    Args:
        prefix: the dataset's path.
        order: a sentence that says in which order concatenation joins the documents.
        hidden_size: of the model whose ranks were simulated.
    """
    parts = [f"# Best-fit packing of {prefix}", _headline(reports), _corpus(reports), wrap(order)]
    if any(report.waiting for report in reports):
        parts.append(_waiting(reports, hidden_size))
    for report in reports:
        parts += [f"## seq_length {report.seq_length}", wrap(_verdict(report)), _compactness(report)]
        parts += [_sequences(report), _cuts(report)]
    return "\n\n".join(parts) + "\n"


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


def _waiting(reports: Sequence[Report], hidden_size: int) -> str:
    """Time that ranks lose by waiting for the slowest."""
    rows = []
    for report in reports:
        for waiting in report.waiting:
            ranks = f"{waiting.data_parallel_size}x{waiting.micro_batches}"
            for name, plan in (("best fit", waiting.best_fit), ("even", waiting.even)):
                lost = [_lost(order) for order in (plan.random, plan.balanced, plan.over_batches)]
                rows.append([f"{report.seq_length:,}", ranks, name, *lost])
    header = ["seq_length", "ranks", "packing", "random", "balanced", f"{BALANCED_TOGETHER} batches"]
    first = (
        "In each step, ranks wait for the slowest one. Time lost, in % of the mean rank's computing time, if ranks "
        "meet once per step / in every micro-step (ZeRO 3, FSDP). Orders of samples: random (--balance-batches 0), "
        f"balanced (1, the default) and over {BALANCED_TOGETHER} batches ({BALANCED_TOGETHER}). Ranks: data-parallel "
        'size x micro-batches of one sequence. "even" is packing with --even-sequences.'
    )
    second = (
        f"This is simulated on {STEPS} steps of these plans. With attention inside documents, a sequence takes the "
        f"time 1 + {ATTENTION_COEFFICIENT} * work / (seq_length * {hidden_size}). Work is the sum of its squared chunk "
        f"lengths, {hidden_size} the --hidden-size, and {ATTENTION_COEFFICIENT} the coefficient of flash-attn 2 on an "
        "H100, from layer times of LLaMA 7B. With faster attention less is lost: it is 0.09 with flash-attn 4."
    )
    table = format_table(header, rows, markdown=True)
    return f"## Time lost by waiting\n\n{wrap(first)}\n\n{table}\n\n{wrap(second)}"


def _lost(lost: TimeLost) -> str:
    return f"{100 * lost.once_per_step:.1f} / {100 * lost.every_micro_step:.1f}"


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
    saved = best.sequences - report.targets_only.sequences
    sentences.append(
        "With --targets-only, which leaves the last token of each document out of the inputs, packing needs "
        f"{report.targets_only.sequences:,} sequences instead of {best.sequences:,} "
        f"({_percent(saved, best.sequences, 3)} % fewer)."
    )
    if report.one_token_documents:
        sentences.append(f"Documents of one token, of which nothing would be left: {report.one_token_documents:,}.")
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
    for name, packing in [*_named_packings(report), ("targets only", report.targets_only)]:
        extra = packing.sequences - fewest
        sequences.append([name, packing.sequences, extra, _percent(extra, fewest, 5), packing.lower_bound])
        positions.append([name, packing.padding, _percent(packing.padding, packing.sequences * length, 4)])
    tables = [
        format_table(["", "sequences", "more than concatenation", "%", "lower bound"], sequences, markdown=True),
        format_table(["", "padding", "% of positions"], positions, markdown=True),
    ]
    names = '"even" is packing with --even-sequences, "targets only" with --targets-only'
    if len(report.packings) > 1:
        cap = report.packings[1].max_documents_per_sequence
        names += f', "at most {cap:,}" with --max-documents-per-sequence {cap}'
    tables.insert(0, wrap(f"{names}."))
    return "\n\n".join(tables)


def _sequences(report: Report) -> str:
    best_fit = report.packings[0].sequences
    documents, work = [], []
    for name, packing in _named_packings(report):
        extra = packing.sequences - best_fit
        spread = _spread(packing.documents_per_sequence, "")
        documents.append([name, *spread, extra, _percent(extra, best_fit)])
        work.append([name, *_spread(packing.attention_work, ".4f")])
    note = "Documents per sequence, and what it costs to have fewer:"
    table = format_table(["", "documents p50", "p99", "max", "more sequences", "%"], documents, markdown=True)
    note_on_work = (
        "Attention work per sequence: the sum of squared chunk lengths over L squared; full causal attention is 1."
    )
    table_of_work = format_table(["", "work p50", "p99", "max"], work, markdown=True)
    return f"{note}\n\n{table}\n\n{wrap(note_on_work)}\n\n{table_of_work}"


def _named_packings(report: Report) -> list[tuple[str, Compactness]]:
    """Packing without a cap, even, and with each cap."""
    first, *capped = report.packings
    return [("packing", first), ("even", report.even), *((_name(packing), packing) for packing in capped)]


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
    return f"at most {packing.max_documents_per_sequence:,}"


def _spread(spread: Spread, form: str) -> list[str]:
    return [format(value, form or ",") for value in (spread.median, spread.p99, spread.maximum)]


def _percent(part: int, whole: int, digits: int = 2) -> str:
    return f"{100 * part / whole if whole else 0:.{digits}f}"
