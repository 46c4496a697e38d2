r"""Finds secrets in a text however they are encoded: by decoding it, not by a list of spellings.

What each known encoding gives is searched and decoded again, up to `DEPTH` times:

- escapes: of JSON and Python (``\n``, ``\/``, ``\u00e4``, ``\xe4``), of addresses
  (``%2F``, ``+``), of HTML;
- hexadecimal, base64 (both alphabets, wrapped or not) and base32, wherever in them the
  secret begins;
- UTF-16 of both byte orders, as bytes or as text with zero characters in it, with three
  ASCII characters in a row around the secret.

Not found is what was compressed, encrypted, hashed, split (``ab:cd``), in octal,
quoted-printable, base85 or punycode, reversed, or in another case. The time is in
proportion to the text.
"""

import re
from base64 import b32decode, b64decode
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import unescape
from typing import Final, NamedTuple, TypeAlias

DEPTH: Final = 4
"""Encodings on top of each other."""

Span: TypeAlias = tuple[int, int]


class Finder:
    """Finds the places of secrets in a text."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Take the secrets, none empty."""
        known = {form for secret in secrets for form in _bytes_of(secret)}
        longest_first = sorted(known, key=len, reverse=True)
        pattern = b"|".join(map(re.escape, longest_first))
        self._secrets = re.compile(pattern) if known else None
        self._shortest = min(map(len, known), default=0)

    def replaced(self, text: str, by: str) -> str:
        """Replace the secrets, each with all characters that encode a part of it."""
        data = text.encode("utf-8", "surrogatepass")
        parts: list[bytes] = []
        done = 0
        places = self._places(data, DEPTH, {})
        for start, end in _merged(places, data):
            parts += [data[done:start], by.encode()]
            done = end
        if not parts:
            return text
        replaced = b"".join([*parts, data[done:]])
        return replaced.decode("utf-8", "surrogatepass")

    def _places(
        self, data: bytes, depth: int, seen: dict[bytes, int]
    ) -> Iterator[Span]:
        """Find the secrets in bytes, and in what they decode to.

        ``seen`` has what other orders of the same escapes gave, with the depth left
        then.
        """
        if self._secrets is None:
            return
        for found in self._secrets.finditer(data):
            yield found.span()
        if depth == 0 or seen.get(data, 0) >= depth:
            return
        seen[data] = depth
        yield from self._places_in_text(_texts(data), depth, seen)
        for text in _from_utf_16(data):
            yield from self._places_in_text(text, depth, {})

    def _places_in_text(
        self, text: "_Layer", depth: int, seen: dict[bytes, int]
    ) -> Iterator[Span]:
        layers = [(layer, seen) for layer in _unescaped(text.data)]
        for digits in _BY_DIGITS:
            layers += [
                (layer, {}) for layer in digits.decoded(text.data, self._shortest)
            ]
        for layer, seen_there in layers:
            for start, end in self._places(layer.data, depth - 1, seen_there):
                first, _ = layer.source(start)
                _, after = layer.source(end - 1)
                begins, _ = text.source(first)
                _, ends = text.source(after - 1)
                yield begins, ends


def _bytes_of(secret: str) -> Iterator[bytes]:
    """Yield a secret's bytes: an environment's may not be UTF-8."""
    yield secret.encode("utf-8", "surrogatepass")
    yield secret.encode("utf-16-le", "surrogatepass")
    yield secret.encode("utf-16-be", "surrogatepass")
    try:
        yield secret.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return


def _merged(spans: Iterable[Span], data: bytes) -> list[Span]:
    """Join overlapping places, widened to whole characters."""
    merged: list[Span] = []
    for start, end in sorted(_of_characters(span, data) for span in spans):
        if merged and start < merged[-1][1]:
            first, last = merged[-1]
            merged[-1] = first, max(last, end)
        else:
            merged.append((start, end))
    return merged


def _of_characters(span: Span, data: bytes) -> Span:
    start, end = span
    while start > 0 and data[start] & 0xC0 == 0x80:
        start -= 1
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return start, end


class _Layer(NamedTuple):
    """What a decoder made of a text; ``source`` returns where a byte of it is encoded."""

    data: bytes
    source: Callable[[int], Span]


def _joined(parts: Iterable[tuple[bytes, int, int | None]]) -> _Layer:
    """Join decoded parts with their places in the source; without an end, bytes are themselves."""
    data: list[bytes] = []
    begins: list[int] = []
    sources: list[tuple[int, int | None]] = []
    size = 0
    for part, start, end in parts:
        if part:
            data.append(part)
            begins.append(size)
            sources.append((start, end))
            size += len(part)

    def source(place: int) -> Span:
        number = bisect_right(begins, place) - 1
        start, end = sources[number]
        at = start + place - begins[number]
        if end is None:
            return (at, at + 1)
        return (start, end)

    return _Layer(b"".join(data), source)


_TEXT: Final = re.compile(
    rb"(?:[\x01-\x7f]|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}){8,}"
)
"""Bytes that might be text, enough to hold a secret; an image has few."""

_APART: Final = b" \xff "
"""Stands between two texts, in no encoding."""


def _texts(data: bytes) -> _Layer:
    """Take the texts out of bytes: only these are decoded further."""
    return _joined(
        part
        for found in _TEXT.finditer(data)
        for part in (
            (found[0], found.start(), None),
            (_APART, found.end(), found.end()),
        )
    )


_SOME_UTF_16: Final = re.compile(rb"(?:[^\x00]\x00){3}|(?:\x00[^\x00]){3}", re.DOTALL)
"""Some of these bytes are a few ASCII characters in UTF-16."""

_UTF_16: Final = {
    "utf-16-le": re.compile(rb".[\xd8-\xdb].[\xdc-\xdf]|..", re.DOTALL),
    "utf-16-be": re.compile(rb"[\xd8-\xdb].[\xdc-\xdf].|..", re.DOTALL),
}
"""The characters of each byte order."""


def _from_utf_16(data: bytes) -> Iterator[_Layer]:
    """Read bytes as UTF-16, from the first and from the second one on."""
    if _SOME_UTF_16.search(data):
        for encoding, character in _UTF_16.items():
            for skipped in (0, 1):
                yield _joined(
                    (found[0].decode(encoding, "replace").encode(), *found.span())
                    for found in character.finditer(data, skipped)
                )


# Escapes: most characters stand for themselves.


class _Escape(NamedTuple):
    """A way to write some characters; ``mark`` is in each text that has one."""

    mark: bytes
    pattern: re.Pattern[bytes]
    meaning: Callable[[re.Match[bytes]], bytes]


def _unescaped(data: bytes) -> Iterator[_Layer]:
    for escape in _ESCAPES:
        if escape.mark in data:
            yield _joined(_parts(data, escape))


def _parts(data: bytes, escape: _Escape) -> Iterator[tuple[bytes, int, int | None]]:
    done = 0
    for found in escape.pattern.finditer(data):
        meant = escape.meaning(found)
        if meant != found[0]:
            start, end = found.span()
            yield data[done:start], done, None
            yield meant, start, end
            done = end
    yield data[done:], done, None


def _of_backslash(found: re.Match[bytes], *, as_bytes: bool = False) -> bytes:
    byte, other = found.groups()
    if other is not None:
        return _CONTROL.get(other, other)
    if as_bytes and byte is not None:
        return bytes.fromhex(byte.decode())
    # Two UTF-16 units may be one character.
    meant = found[0].decode("unicode_escape")
    units = meant.encode("utf-16-le", "surrogatepass")
    text = units.decode("utf-16-le", "surrogatepass")
    return text.encode("utf-8", "surrogatepass")


_CONTROL: Final = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"f": b"\f"}
_BACKSLASH: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|x([0-9a-fA-F]{2})|([^ux]))",
    re.DOTALL,
)


def _of_percent(found: re.Match[bytes]) -> bytes:
    if found[1]:
        return bytes.fromhex(found[1].decode())
    return b" "


def _of_html(found: re.Match[bytes]) -> bytes:
    return unescape(found[0].decode()).encode()


_ESCAPES: Final = (
    _Escape(b"\\", _BACKSLASH, _of_backslash),
    _Escape(b"\\x", _BACKSLASH, partial(_of_backslash, as_bytes=True)),
    _Escape(b"%", re.compile(rb"%([0-9a-fA-F]{2})"), _of_percent),
    _Escape(b"+", re.compile(rb"%([0-9a-fA-F]{2})|\+"), _of_percent),
    _Escape(
        b"&",
        re.compile(
            rb"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});?"
        ),
        _of_html,
    ),
)


# Groups of bits: every character carries some.

_SPACE: Final = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class _Digits:
    """An encoding whose characters have so many ``bits`` each.

    Attributes:
        runs: Texts that might be in it, with line ends between them.
        group: Characters that stand for whole bytes.
        decode: Decodes whole groups.
    """

    runs: re.Pattern[bytes]
    bits: int
    group: int
    decode: Callable[[bytes], bytes]

    def decoded(self, data: bytes, shortest: int) -> Iterator[_Layer]:
        """Decode each run that is long enough, from every place in its first group."""
        for run in self.runs.finditer(data):
            digits = run[0].translate(None, _SPACE)
            if len(digits) * self.bits < shortest * 8:
                continue
            at: Sequence[int] = range(*run.span())
            if len(digits) < len(at):
                at = [place for place in at if data[place] not in _SPACE]
            for skipped in range(self.group):
                whole = digits[skipped:]
                padding = b"A" * (-len(whole) % self.group)
                decoded = self.decode(whole + padding)
                size = len(whole) * self.bits // 8
                source = partial(self._source, at[skipped:])
                yield _Layer(decoded[:size], source)

    def _source(self, at: Sequence[int], place: int) -> Span:
        first_bit = place * 8
        last_bit = first_bit + 7
        start = at[first_bit // self.bits]
        end = at[last_bit // self.bits] + 1
        return start, end


def _runs_of(digits: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"[%b]+(?:\r?\n[ \t]*[%b]+)*" % (digits, digits))


_STANDARD: Final = bytes.maketrans(b"-_", b"+/")

_BY_DIGITS: Final = (
    _Digits(
        _runs_of(rb"0-9A-Fa-f"), 4, 2, lambda digits: bytes.fromhex(digits.decode())
    ),
    _Digits(
        _runs_of(rb"A-Za-z0-9+/_-"),
        6,
        4,
        lambda digits: b64decode(digits.translate(_STANDARD)),
    ),
    _Digits(_runs_of(rb"A-Za-z2-7"), 5, 8, partial(b32decode, casefold=True)),
)
