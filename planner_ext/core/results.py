"""Results longer than the conversation may take: where they are cut, and how the model reads on.

The fact keeps a cut result whole, and says where it is cut: a count of tokens may
differ between machines.
"""

import math
import unicodedata
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Final

from planner_ext.core.limits import is_count
from planner_ext.core.state import READ_RESULT
from planner_ext.core.values import Cut

MOST_READS: Final = 5
"""How often one reply may read on: each piece is counted before anything else goes
on."""

NOT_READ: Final = (
    f"Not read: one reply may read on in results {MOST_READS} times, and the calls before this one did. Read what they "
    "brought, and call it again in the next reply."
)

CountTokens = Callable[[str], int]
"""Counts or estimates the tokens of a text."""

_SAMPLE: Final = 200_000
"""The most characters after a cut that are counted; the rest is extrapolated."""

_ENOUGH: Final = 0.95
"""The share of the cap that a piece has at least, where a longer one would exceed
it."""

_TRIES: Final = 6
"""How often a piece's end is guessed from the tokens per character, before it is
bisected."""

_BESIDE: Final = 32
"""The most characters that belong together."""


def cut_of(text: str, most: int, count: CountTokens) -> Cut | None:
    """Find where a result has to be cut; None if it fits."""
    end = _end_of_piece(text, 0, most, count)
    return (
        None
        if end == len(text)
        else Cut(shown=end, left_out=_tokens_after(text, end, _SAMPLE, count))
    )


def name_of_result(text: str, iteration: int, index: int) -> str:
    """Name a result by its digest and place: the same name in a fork of its run."""
    return (
        f"{sha256(text.encode(errors='replace')).hexdigest()[:6]}.{iteration}.{index}"
    )


def cut_text(text: str, cut: Cut, iteration: int, index: int) -> str:
    """Return the beginning of a cut result, and how to read on."""
    return text[: cut.shown] + _note(
        cut.left_out, name_of_result(text, iteration, index), cut.shown
    )


def piece_of(
    results: Mapping[str, str],
    arguments: Mapping[str, Any],
    most: int | None,
    count: CountTokens,
) -> tuple[str, bool]:
    """Read on in a result, in a time in proportion to the piece; ``most`` are its tokens.

    Returns:
        The piece, or what is wrong with the arguments; and whether it is a piece.
    """
    name = arguments.get("call")
    offset = arguments.get("offset")
    text = results.get(name) if isinstance(name, str) else None
    if text is None or not isinstance(name, str):
        there = ", ".join([*results][-_BESIDE:]) or "none"
        return (
            f"There is no result under this name to read on in; there are: {there}. Results of earlier requests are "
            "not kept: call their function again.",
            False,
        )
    if not is_count(offset, least=0) or offset >= len(text):
        return (
            f"offset must be a whole number from 0 to {len(text) - 1}, the last character of this result.",
            False,
        )
    end = len(text) if most is None else _end_of_piece(text, offset, most, count)
    if end == len(text):
        return text[offset:], True
    left_out = _tokens_after(text, end, end - offset, count)
    return text[offset:end] + _note(left_out, name, end), True


def _note(left_out: int, name: str, offset: int) -> str:
    return (
        f"\n\n[Cut here: about {left_out} more tokens were left out. To read on, call {READ_RESULT} with "
        f'call="{name}" and offset={offset}.]'
    )


def _tokens_after(text: str, end: int, most: int, count: CountTokens) -> int:
    """Extrapolate the tokens of the rest from at most so many characters of it."""
    sample = text[end : end + most]
    return max(round(count(sample) * (len(text) - end) / len(sample)), 1)


def _end_of_piece(text: str, start: int, most: int, count: CountTokens) -> int:
    """Find the end of a piece: at least one character on, and between two visible ones."""
    if _surely_fits(text, start, most):
        return len(text)
    end = _longest(text, start, most, count)
    if end == len(text):
        return end
    apart = next(
        (
            place
            for place in range(end, max(start, end - _BESIDE), -1)
            if not _joined(text, place)
        ),
        end,
    )
    # The last token of the piece was split.
    while apart < end and apart > start + 1 and count(text[start:apart]) > most:
        apart -= 1
    return max(apart, start + 1)


def _surely_fits(text: str, start: int, most: int) -> bool:
    """Return whether a text fits without being counted: no token has less than a byte."""
    left = len(text) - start
    return left * 4 <= most or (left <= most and text.isascii())


def _longest(text: str, start: int, most: int, count: CountTokens) -> int:
    """Find an end that fits, within a twentieth of the cap, without counting the whole text."""
    fits = start
    over = len(text) + 1
    end = min(len(text), start + 4 * most)
    tries = 0
    while fits + 1 < over:
        tokens = count(text[start:end])
        tries = tries + 1
        if tokens <= most:
            fits = end
            if end == len(text) or (over <= len(text) and tokens >= _ENOUGH * most):
                break
        else:
            over = end
        guess = start + math.ceil((end - start) * most / max(tokens, 1))
        if over > len(text):
            end = min(max(guess, start + 2 * (end - start)), len(text))
        else:
            end = (
                min(max(guess, fits + 1), over - 1)
                if tries < _TRIES
                else (fits + over) // 2
            )
    return fits


def _joined(text: str, place: int) -> bool:
    before = text[place - 1]
    after = text[place]
    return (
        unicodedata.combining(after) > 0
        or after in "\u200d\ufe0e\ufe0f"  # zero-width joiner, variation selectors
        or before == "\u200d"
        or "\U0001f3fb" <= after <= "\U0001f3ff"  # skin tones
        or (before == "\r" and after == "\n")
    )
