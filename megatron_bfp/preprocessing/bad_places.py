"""Where bad documents stand in their files. A shard knows only how far a line is from the first of its piece."""

from collections.abc import Callable, Iterable, Iterator

from .documents import BadDocument
from .inputs import Piece, count_lines
from .plan import Shard
from .shards import ShardRecord


def bad_documents(shards: Iterable[Shard], record_of: Callable[[int], ShardRecord | None]) -> Iterator[BadDocument]:
    """The bad documents of all records, in order, with their lines counted from the first of their files.

    Args:
        shards: in order, from the first on.
        record_of: the record of the shard with a number, None if there is none. Lines of such a shard are counted in
            its input when a bad document follows.

    Raises:
        InputError: an input cannot be read.
    """
    num_lines = 0
    uncounted: list[Piece] = []
    for shard in shards:
        record = record_of(shard.number)
        found: dict[int, list[BadDocument]] = {}
        for number, document in record.bad if record else []:
            found.setdefault(number, []).append(document)
        for number, piece in enumerate(shard.pieces):
            if piece.begin == 0:
                num_lines, uncounted = 0, []
            for document in found.get(number, []):
                while uncounted and document.place.line is not None:
                    num_lines += count_lines(uncounted.pop())
                yield _moved(document, num_lines)
            if record is None:
                uncounted.append(piece)
            else:
                num_lines += record.num_lines[number]


def _moved(document: BadDocument, num_lines: int) -> BadDocument:
    place = document.place
    if place.line is None:
        return document
    return document._replace(place=place._replace(line=place.line + num_lines))
