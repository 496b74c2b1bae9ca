"""What is fuzzed: each target takes bytes that may be anything, and may raise no other errors than ours."""

import bz2
import gzip
import json
import lzma
import os
import shutil
import struct
from pathlib import Path

import numpy as np
from helpers.datasets import DATA, documents_of, write

from fuzzing.mutations import mutated, other_value
from megatron_bfp.errors import BFPError
from megatron_bfp.indexed_dataset.format import HEADER_BYTES
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IndexedDatasetWriter
from megatron_bfp.preprocessing.readers.inputs import Piece, read_batches
from megatron_bfp.preprocessing.readers.parquet import row_group_sizes
from megatron_bfp.progress import without_progress
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.fingerprints import ends_sha256, file_sha256
from megatron_bfp.sequence_index.format import canonical_json, checksum
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.reader import SequenceIndex
from megatron_bfp.sequence_index.verify import verify

LENGTHS = [5, 0, 12, 3, 16, 2, 2, 9, 7, 1, 20, 8]
SOME = 40
"""Documents and sequences that are read of each end of what opens."""
LARGEST_BIN = 1 << 20


class IdxTarget:
    """An .idx, with a .bin of the size that it describes, if that is a small one."""

    def __init__(self, folder):
        self.prefix = str(folder / "data")
        self.folder = folder
        documents = documents_of(LENGTHS)
        self.seeds = []
        for shape in (documents, [documents[:3], documents[3:4], documents[4:]], [], [[]], [[1]] * 300):
            write(folder / "seed", shape)
            self.seeds.append((folder / "seed.idx").read_bytes())
        self.seeds.append(self.seeds[0] + bytes(len(LENGTHS)))  # modes of a multimodal dataset
        with IndexedDatasetWriter(str(folder / "seed"), np.int32) as writer:
            writer.add(np.arange(6), np.array([1, 2, 3, 0]), np.array([2, 0, 1, 1]))
            writer.finalize()
        self.seeds.append((folder / "seed.idx").read_bytes())

    def input(self, rng):
        return mutated(rng, rng.choice(self.seeds))

    def run(self, content):
        Path(self.prefix + ".idx").write_bytes(content)
        with open(self.prefix + ".bin", "wb") as file:
            file.truncate(self.described_bytes(content))
        dataset = IndexedDataset(self.prefix, mmap=len(content) % 2 == 0)
        for number in some(dataset.num_documents):
            outcome_of(lambda: dataset.document(number))
        outcome_of(dataset.check_pointers)
        outcome_of(lambda: dataset.document_lengths[:])
        shutil.rmtree(index_directory(self.prefix), ignore_errors=True)
        key = IndexKey(8, min(1, dataset.num_documents), dataset.num_documents)
        index = build(dataset, key, index_directory(self.prefix))
        for sequence in some(len(index)):
            index.chunk_spans(sequence)
        verify(index.path, dataset)

    def described_bytes(self, content):
        """As the .idx says, so that more than the comparison of sizes is fuzzed."""
        try:
            code, sequences = struct.unpack_from("<BQ", content, 17)
            (pointer,) = struct.unpack_from("<q", content, HEADER_BYTES + sequences * 12 - 8)
            (length,) = struct.unpack_from("<i", content, HEADER_BYTES + sequences * 4 - 4)
        except (struct.error, OverflowError):
            return 0
        size = pointer + length * (2 if code == 8 else 4)
        return size if 0 <= size <= LARGEST_BIN else 0


class IndexTarget:
    """A sequence index: one of its files changed, half of the time with all checksums made right again."""

    def __init__(self, folder):
        self.dataset = write(folder / "data", documents_of(LENGTHS))
        self.index = build(self.dataset, IndexKey(8, 1, 11), index_directory(self.dataset.prefix))
        self.path = Path(self.index.path)
        self.whole = {file.name: file.read_bytes() for file in self.path.iterdir()}
        shutil.rmtree(folder / "data.bfp")

    def input(self, rng):
        """A byte that says which file, whether checksums are made right, and its content."""
        number, is_forged = rng.randrange(len(self.whole)), rng.random() < 0.7
        name = sorted(self.whole)[number]
        if name == "index.json" and is_forged:
            content = json.dumps(other_value(rng, json.loads(self.whole[name]))).encode()
        else:
            content = mutated(rng, self.whole[name])
        return bytes([number + 128 * is_forged]) + content

    def run(self, content):
        number, content = content[0] if content else 0, content[1:]
        name = sorted(self.whole)[number % 128 % len(self.whole)]
        self.path.mkdir(parents=True, exist_ok=True)
        for other, whole in self.whole.items():
            (self.path / other).write_bytes(whole)
        (self.path / name).write_bytes(content)
        if number >= 128:
            self.make_checksums_right(None if name == "index.json" else name)
        for check in (self.read, lambda: verify(str(self.path), self.dataset)):
            outcome_of(check)

    def make_checksums_right(self, name):
        try:
            metadata = json.loads((self.path / "index.json").read_bytes())
            if name is not None:
                path = str(self.path / name)
                sums = {"ends_sha256": ends_sha256(path), "sha256": file_sha256(path, without_progress)}
                metadata["files"][name] = sums | {"bytes": os.path.getsize(path)}
            (self.path / "index.json").write_bytes(canonical_json(metadata | {"checksum": checksum(metadata)}))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return  # it is no JSON object

    def read(self):
        index = SequenceIndex(str(self.path), self.dataset)
        for sequence in some(len(index)):
            outcome_of(lambda: index.chunk_spans(sequence))


class JsonLinesTarget:
    """A file of JSON Lines, plain or compressed."""

    def __init__(self, folder):
        from backports import zstd

        self.file = folder / "in"
        names = sorted(path for path in (DATA / "nasty").iterdir() if path.suffix != ".parquet")
        self.seeds = [path.read_bytes() for path in names if path.stat().st_size < 20_000]
        lines = b'{"text": "a\\u00e9\\ud83d\\ude00", "n": [1, -2.5e3, null, true, {"x": {}}]}\n' * 20
        self.seeds += [lines, b"[" * 3000 + b"]" * 3000, b'{"text": ' + b'{"text": ' * 3000]
        self.seeds += [compress(lines) for compress in (bz2.compress, gzip.compress, lzma.compress, zstd.compress)]
        checked = zstd.compress(lines, options={zstd.CompressionParameter.checksum_flag: 1})
        self.seeds += [checked, checked + zstd.compress(b"")]

    def input(self, rng):
        return mutated(rng, rng.choice(self.seeds))

    def run(self, content):
        self.file.write_bytes(content)
        read(Piece(str(self.file), len(content)), ["text"])
        if content[:1] == b"{":
            middle = len(content) // 2
            read(Piece(str(self.file), len(content) - middle, middle, len(content)), ["text", "n.x"])


class ParquetTarget:
    """A Parquet file of texts, of several kinds of columns and codecs."""

    def __init__(self, folder):
        import pyarrow
        from pyarrow import parquet

        self.file = folder / "in"
        self.seeds = [path.read_bytes() for path in sorted((DATA / "nasty").glob("*.parquet"))]
        texts = ["one", None, "zwei é", "three\n", "x" * 300] * 8
        table = pyarrow.table({"text": texts, "meta": [{"text": text, "n": 1} for text in texts]})
        for codec in ("none", "snappy", "gzip", "zstd", "brotli", "lz4"):
            parquet.write_table(table, folder / "seed", compression=codec, row_group_size=16, data_page_size=100)
            self.seeds.append((folder / "seed").read_bytes())
        table = pyarrow.table({"text": pyarrow.array(texts).dictionary_encode()})
        for version in ("1.0", "2.0"):
            parquet.write_table(table, folder / "seed", data_page_version=version)
            self.seeds.append((folder / "seed").read_bytes())

    def input(self, rng):
        seed = rng.choice(self.seeds)
        if rng.random() < 0.6:  # what follows the data describes it: changes there go furthest
            start = len(seed) - 8 - min(len(seed) - 12, int.from_bytes(seed[-8:-4], "little"))
            return seed[:start] + mutated(rng, seed[start:])
        return mutated(rng, seed)

    def run(self, content):
        self.file.write_bytes(content)
        with open(self.file, "rb") as file:
            outcome_of(lambda: row_group_sizes(file, str(self.file)))
        for key in ("text", "meta.text"):
            outcome_of(lambda: read(Piece(str(self.file), len(content)), [key]))


def some(number):
    """Numbers of the first and last ``SOME`` things."""
    return sorted({*range(min(SOME, number)), *range(max(0, number - SOME), number)})


def outcome_of(step):
    """Do it; our own errors are as good as a result."""
    try:
        step()
    except BFPError:
        pass


def read(piece, keys):
    for batch, _ in read_batches(piece, keys):
        for _ in batch.records(keys):
            pass


TARGETS = {"idx": IdxTarget, "index": IndexTarget, "json_lines": JsonLinesTarget, "parquet": ParquetTarget}
