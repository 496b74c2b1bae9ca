"""Lengths to a plan of which documents share a training sequence: best-fit decreasing at about the cost of a sort.

Documents of n tokens are cut into n // L chunks of exactly L = ``seq_length`` tokens and at most one shorter remainder
chunk; nothing else is ever cut. A full chunk is a training sequence by itself. Remainder chunks are packed best-fit
decreasing: longest first, each into the sequence with the least remaining space that still holds it (Ding et al.,
"Fewer Truncations Improve Language Modeling", ICML 2024, section 3.1 and algorithm 1). Four steps::

    census.take_census       lengths          -> histogram of remainder chunks, documents with full chunks
    best_fit.plan_runs       histogram        -> runs of sequences that hold equal lengths, moves that filled them
    placing.sort_documents   lengths          -> document ids, longest remainder chunk first, equal lengths in order
    placing.place_documents  runs, sorted ids -> document ids, sequence by sequence

Only numpy is used. The price of the histogram is that which of two equally long documents joins which sequence is
decided by their order alone; training order is shuffled afterwards, so nothing depends on it.
"""

from .packed import Packing, pack

__all__ = ["Packing", "pack"]
