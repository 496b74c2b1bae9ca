"""The checks of numbers that callers give: counts, sequence lengths and caps."""

from typing import Any

import numpy as np

from .errors import OptionError

MOST_TOKENS = 1 << 24
"""Largest ``seq_length``. A sample of this length takes 0.6 GB, and packing some hundred MB beside the corpus."""


def checked_count(name: str, value: Any) -> int:
    """``value`` as an int, if it is an integer from 1 to 2**31 - 1 (cu_seqlens are int32).

    Args:
        name: of the option or argument, for the message.

    Raises:
        OptionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < 1 << 31:
        raise OptionError(f"{name} must be an integer from 1 to 2**31 - 1, got {value!r}")
    return int(value)


def checked_seq_length(name: str, value: Any) -> int:
    """``value`` as an int, if it is an integer from 1 to ``MOST_TOKENS``: arrays of this length are made.

    Args:
        name: of the option or argument, for the message.

    Raises:
        OptionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= MOST_TOKENS:
        raise OptionError(f"{name} must be an integer from 1 to {MOST_TOKENS:,} tokens, got {value!r}")
    return int(value)


def checked_cap(value: Any) -> int | None:
    """``value`` as ``max_documents_per_sequence``: None, or as ``checked_count``."""
    return None if value is None else checked_count("max_documents_per_sequence", value)


def checked_flag(name: str, value: Any) -> bool:
    """``value`` as a bool, if it is True or False (numpy's as well).

    Args:
        name: of the option or argument, for the message.

    Raises:
        OptionError: it is not.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise OptionError(f"{name} must be True or False, got {value!r}")
    return bool(value)
