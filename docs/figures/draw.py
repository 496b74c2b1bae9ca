"""Draw the figures of the documentation: ``python docs/figures/draw.py``, with matplotlib.

- packing.svg: the same five documents in training sequences, by concatenation and by packing.
- attention.svg: the first three kernels of the table in docs/performance.md, "Attention on a GPU".
"""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

FOLDER = Path(__file__).parent
SETTINGS = {"svg.hashsalt": "megatron_bfp", "font.size": 11}
COLORS = {"a": "#3f51b5", "b": "#00897b", "c": "#ef6c00", "d": "#8e24aa", "e": "#6d4c41", ".": "#eeeeee"}
ROWS = {
    "documents": ("aaaaaaaaaaaaaa", "bbbbbbb", "ccccc", "dd", "eee"),
    "concatenation cuts a, b and c": ("aaaaaaaa", "aaaaaabb", "bbbbbccc", "ccddeee."),
    "packing cuts only a, which is longer than a sequence": ("aaaaaaaa", "bbbbbbb.", "aaaaaadd", "ccccceee"),
}
"""Label -> documents or training sequences of 8 tokens, a letter per token; a dot is padding."""
LENGTHS = (2048, 8192, 32768)
RATIOS = {
    "torch-varlen": (0.95, 0.78, 0.44),
    "flash-attn": (0.96, 0.78, 0.44),
    "flash-attn-4": (0.98, 0.86, 0.60),
}
"""Kernel -> time of a layer inside documents / with full causal attention, at each of LENGTHS."""


def draw_packing() -> Figure:
    """Five documents, and the sequences that both methods make of them."""
    figure = Figure(figsize=(7.0, 2.4))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    for row, (label, blocks) in enumerate(ROWS.items()):
        left, bottom = 0.0, -2.3 * row
        axes.text(0, bottom + 1.4, label, va="center")
        for block in blocks:
            for i, letter in enumerate(block):
                axes.add_patch(Rectangle((left + i, bottom), 1, 1, color=COLORS[letter], linewidth=0))
                color = "#757575" if letter == "." else "white"
                axes.text(left + i + 0.5, bottom + 0.45, letter.strip("."), color=color, ha="center", va="center")
            axes.add_patch(Rectangle((left, bottom), len(block), 1, fill=False, edgecolor="#212121", linewidth=1.2))
            left += len(block) + 0.6
    axes.set(xlim=(-0.3, 34.3), ylim=(-4.9, 2.0))
    axes.axis("off")
    return figure


def draw_attention() -> Figure:
    """Bars of RATIOS in groups of equal length, and a line at full causal attention."""
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    width = 0.26
    for i, (kernel, ratios) in enumerate(RATIOS.items()):
        bars = axes.bar([group + (i - 1) * width for group in range(len(LENGTHS))], ratios, width * 0.92, label=kernel)
        axes.bar_label(bars, fmt="%.2f", fontsize=9, padding=-13, color="white")
    axes.axhline(1, color="#757575", linewidth=1, linestyle="--")
    axes.text(len(LENGTHS) - 0.6, 1.02, "full causal attention", color="#757575", ha="right", va="bottom", fontsize=9)
    axes.set_xticks(range(len(LENGTHS)), [f"L = {length:,}" for length in LENGTHS])
    axes.set(ylim=(0, 1.2), ylabel="time of a layer, relative")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(RATIOS), frameon=False)
    return figure


def main() -> None:
    """Write the figures beside this file, the same bytes each time."""
    with matplotlib.rc_context(SETTINGS):
        for name, draw in {"packing": draw_packing, "attention": draw_attention}.items():
            draw().savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
