"""Megatron's ``--data-path``; without torch, so that what only looks at a dataset starts at once."""

from collections.abc import Sequence

from megatron_bfp.errors import OptionError


def blend(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Megatron's ``--data-path``: prefixes alone, or each after its weight.

    Returns:
        Prefixes, and weights or None.

    Raises:
        OptionError: it is neither.
    """

    def weight(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    weights = [weight(text) for text in data_path[::2]]
    if weights[0] is None or len(data_path) == 1:
        return list(data_path), None
    if len(data_path) % 2 or any(found is None or not 0 < found < float("inf") for found in weights):
        raise OptionError(f"--data-path {' '.join(data_path)}: give prefixes, or a weight above 0 before each prefix")
    return list(data_path[1::2]), weights
