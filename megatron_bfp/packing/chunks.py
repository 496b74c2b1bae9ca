"""The one shape of a chunk: which tokens of which document are in a training sequence."""

from typing import NamedTuple


class ChunkSpan(NamedTuple):
    """A chunk: the part of a document that is in one training sequence.

    ``SequenceIndex`` counts tokens from the start of the .bin. For example, with L = 8 a document of 11 tokens that
    starts at token 100 has the chunks ``ChunkSpan(7, 100, 108, 111)`` and ``ChunkSpan(7, 108, 111, 111)``. With targets
    only, the second one is ``ChunkSpan(7, 108, 110, 111)``: the last token is no input.
    """

    document: int
    start: int
    """Its first token."""
    end: int
    """The end of its tokens that are inputs, exclusive."""
    document_end: int
    """The end of the whole document, exclusive."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are inputs."""
        return self.end - self.start

    @property
    def continues(self) -> bool:
        """Whether the document has a token after this chunk, so that the last input has a target. Without targets only,
        that token is in another sequence."""
        return self.end < self.document_end
