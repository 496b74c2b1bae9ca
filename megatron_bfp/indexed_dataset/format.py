"""The bytes of PREFIX.bin and PREFIX.idx, as in megatron-core's ``megatron/core/datasets/indexed_dataset.py``.

The .bin holds the tokens of all documents, one after another, without a header. The .idx, little-endian, with s idx
sequences and d documents::

    offset                  type            content
    0                       9 bytes         MAGIC
    9                       uint64          VERSION
    17                      uint8           code of the token dtype, a key of TOKEN_DTYPES
    18                      uint64          s
    26                      uint64          d + 1
    34                      int32 [s]       tokens of each idx sequence
    34 + 4 s                int64 [s]       offset of each idx sequence in the .bin, bytes
    34 + 12 s               int64 [d + 1]   first idx sequence of each document; at the end, s
    34 + 12 s + 8 (d + 1)   int8 [s]        mode of each idx sequence, in multimodal datasets only

Most datasets have one idx sequence per document, but a document may have several.
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
