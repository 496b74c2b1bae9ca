"""``--fim-rate`` with ``--data-impl bfp``, and sentinel tokens by name, with Megatron-LM's names of options."""

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import OptionError
from ..samples.fill_in_the_middle import FimForm, FimTokens

OPTIONS = {"prefix": "--fim-prefix-token", "middle": "--fim-middle-token", "suffix": "--fim-suffix-token"}


def add_fim_options(group: Any) -> None:
    """Declare the options, for a Megatron that does not have them.

    Args:
        group: an argument group of the parser.
    """
    group.add_argument(
        "--fim-rate",
        type=float,
        metavar="R",
        help="with --data-impl bfp: the share of documents that are rearranged for fill-in-the-middle",
    )
    group.add_argument(
        "--fim-spm-rate",
        type=float,
        default=0.5,
        metavar="R",
        help="the share of them that are shown as suffix, prefix and middle",
    )
    for name, option in OPTIONS.items():
        group.add_argument(option, default=f"<fim_{name}>", metavar="TEXT", help=f"the token before the {name}")


def sentinel_ids(args: Any, ids_of: Callable[[list[str]], Sequence[int | None]]) -> dict[str, int] | None:
    """The ids of the sentinels that options name; None without fill-in-the-middle.

    Args:
        args: the options.
        ids_of: gives the ids of tokens, None for what is no token.

    Raises:
        OptionError: one is no token of the tokenizer, or two are the same.
    """
    if args.fim_rate is None:
        return None
    texts = [getattr(args, f"fim_{name}_token") for name in OPTIONS]
    ids: dict[str, int] = {}
    for (name, option), text, number in zip(OPTIONS.items(), texts, ids_of(texts), strict=True):
        if number is None or number in ids.values():
            raise OptionError(
                f"{option} {text!r}: --fim-rate needs a token of its own for it, and the tokenizer has none; name one "
                "that it has, or add it to the tokenizer"
            )
        ids[name] = number
    return ids


def fim_form(ids: dict[str, int] | None, eod: int | None, spm_rate: float) -> FimForm | None:
    """How rearranged documents are shown.

    Args:
        ids: as ``sentinel_ids`` gives them.
    """
    return None if ids is None else FimForm(FimTokens(**ids, eod=eod), spm_rate)
