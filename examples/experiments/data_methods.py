"""The ways to make sequences from documents that the experiments compare, as in the paper's appendix C.3."""

from typing import Any, NamedTuple


class Method(NamedTuple):
    """One way to make sequences."""

    title: str
    options: dict[str, Any]
    """The trainer's options for it."""


METHODS = {
    "concat": Method("concatenation", {"data-impl": "mmap"}),
    "concat_masked": Method(
        "concatenation, document mask", {"data-impl": "mmap", "dataloader-inter-document-masking": True}
    ),
    "pack": Method("packing", {"data-impl": "bfp"}),
}
BASELINE = "concat"
