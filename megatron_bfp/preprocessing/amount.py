"""How much of something was done: what workers tell and what progress shows."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Amount:
    """Adds up."""

    documents: int = 0
    """Good and bad ones."""
    text_bytes: int = 0
    """Of documents as they are in their files, decompressed."""
    tokens: int = 0
    input_bytes: float = 0.0
    """Of input files, as they are on disk."""

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(*map(sum, zip(astuple(self), astuple(other))))
