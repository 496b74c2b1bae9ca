"""The ways to make sequences of documents that the examples compare, as the paper's appendix C.3 does."""

from typing import Any, NamedTuple


class Method(NamedTuple):
    """One way."""

    title: str
    options: dict[str, Any]
    """Of the trainer."""


METHODS = {
    "concat": Method("concatenation", {"data-impl": "mmap"}),
    "concat_masked": Method(
        "concatenation, document mask", {"data-impl": "mmap", "dataloader-inter-document-masking": True}
    ),
    "pack": Method("packing", {"data-impl": "bfp"}),
}
BASELINE = "concat"
