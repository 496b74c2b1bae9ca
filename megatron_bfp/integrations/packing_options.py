"""The options that Megatron-LM and Megatron-DeepSpeed get for ``--data-impl bfp``, the same in both."""

from typing import Any


def add_packing_options(group: Any) -> None:
    """Declare how documents are packed and batches are composed.

    Args:
        group: an argument group of the parser.
    """
    group.add_argument(
        "--max-documents-per-sequence", type=int, help="with --data-impl bfp: most documents in a sequence"
    )
    group.add_argument(
        "--even-sequences",
        action="store_true",
        help="with --data-impl bfp: give every sequence about as many documents as the others",
    )
    group.add_argument(
        "--targets-only",
        action="store_true",
        help="with --data-impl bfp: leave the last token of each document, from which nothing is learned, out of the "
        "inputs",
    )
    group.add_argument(
        "--balance-batches",
        type=int,
        default=1,
        metavar="N",
        help="with --data-impl bfp: order training samples by their work, so that ranks need not wait for each other. "
        "1 (default): inside each global batch, which keeps its samples. 0: off. More: over N global batches; which "
        "samples share a batch then depends on their work",
    )
