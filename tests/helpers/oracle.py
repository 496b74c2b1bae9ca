"""The paper's algorithm as it is written: best-fit decreasing, one chunk at a time, over a segment tree.

A plain implementation to hold ``megatron_bfp.packing`` against, with nothing in common with it. The tree has a leaf for
each remaining space; a leaf's value is its space if some sequence has that much left, else 0; an inner node's value is
its children's maximum. The best fit for a length is the leftmost leaf that is at least the length.
"""


class SpaceTree:
    """Which remaining spaces 0 .. seq_length exist."""

    def __init__(self, seq_length):
        self.size = 1
        while self.size < seq_length + 1:
            self.size *= 2
        self.nodes = [0] * (2 * self.size)

    def set(self, space, exists):
        node = self.size + space
        self.nodes[node] = space if exists else 0
        while node > 1:
            node //= 2
            self.nodes[node] = max(self.nodes[2 * node], self.nodes[2 * node + 1])

    def smallest_at_least(self, length):
        """The best fit, or None."""
        if self.nodes[1] < length:
            return None
        node = 1
        while node < self.size:
            node = 2 * node if self.nodes[2 * node] >= length else 2 * node + 1
        return self.nodes[node]


def chunk_lengths(lengths, seq_length):
    """Lengths of all chunks: full ones and remainders."""
    chunks = []
    for length in lengths:
        chunks += [seq_length] * (length // seq_length)
        if length % seq_length:
            chunks.append(length % seq_length)
    return chunks


def best_fit_decreasing(lengths, seq_length):
    """The chunk lengths of each sequence."""
    tree, by_space, sequences = SpaceTree(seq_length), {}, []
    for length in sorted(chunk_lengths(lengths, seq_length), reverse=True):
        space = tree.smallest_at_least(length)
        if space is None:
            sequences.append([])
            sequence, space = len(sequences) - 1, seq_length
        else:
            sequence = by_space[space].pop()
            tree.set(space, bool(by_space[space]))
        sequences[sequence].append(length)
        by_space.setdefault(space - length, []).append(sequence)
        tree.set(space - length, True)
    return sequences


def best_fit_decreasing_capped(lengths, seq_length, cap):
    """With at most ``cap`` chunks a sequence: ties in space go to the sequence with most chunks. Quadratic."""
    sequences = []
    for length in sorted(chunk_lengths(lengths, seq_length), reverse=True):
        fitting = [s for s in sequences if len(s) < cap and seq_length - sum(s) >= length]
        if fitting:
            min(fitting, key=lambda s: (seq_length - sum(s), -len(s))).append(length)
        else:
            sequences.append([length])
    return sequences
