"""The bytes of PREFIX.bin and PREFIX.idx, as in megatron-core's ``megatron/core/datasets/indexed_dataset.py``.

The .bin holds all tokens one after another. The .idx, little-endian::

    bytes   type            what
    0-8     9 bytes         MAGIC
    9-16    uint64          VERSION
    17      uint8           code of the token dtype
    18-25   uint64          number of sequences s
    26-33   uint64          number of documents d, plus 1
    34-     int32 [s]       tokens of each sequence
            int64 [s]       where each sequence begins in the .bin, bytes
            int64 [d + 1]   number of each document's first sequence; at the end, s
            int8 [s]        mode of each sequence, in multimodal datasets only

Most datasets have one sequence per document, but a document may have several.
"""

import numpy as np

from ..errors import IndexedDatasetError

MAGIC = b"MMIDIDX\x00\x00"


VERSION = 1


HEADER_BYTES = len(MAGIC) + 8 + 1 + 8 + 8


TOKEN_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Megatron's dtype codes that can hold tokens; its codes 6 and 7 are floating point."""


def bin_path(prefix: str) -> str:
    """The file of a dataset's tokens."""
    return prefix + ".bin"


def idx_path(prefix: str) -> str:
    """The file of a dataset's lengths, pointers and documents."""
    return prefix + ".idx"


def optimal_dtype(vocab_size: int) -> type:
    """The token dtype Megatron chooses for a vocabulary: uint16 below 65,500 tokens, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


def dtype_code(dtype: np.dtype) -> int:
    """Megatron's code of a token dtype."""
    codes = {np.dtype(known): code for code, known in TOKEN_DTYPES.items()}
    if dtype not in codes:
        raise IndexedDatasetError(f"{dtype} cannot hold tokens; use uint16 or int32")
    return codes[dtype]
