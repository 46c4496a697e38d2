r"""Finds secrets in a text however they are encoded: by decoding it, not by a list of spellings.

Each known encoding is undone wherever a text might be in it, and what comes out is searched and decoded again, to a
bounded depth. So compositions are found as single encodings are, and so is a secret in the midst of what was encoded:

- escapes: of JSON and Python (``\n``, ``\/``, ``\u00e4``, ``\xe4``), of addresses (``%2F``, ``%2f``, ``+``), of HTML
  (named, decimal, hexadecimal);
- hexadecimal, base64 (its two alphabets, wrapped or not) and base32, wherever in them the secret begins;
- UTF-16 of both byte orders, as bytes that one of these brings, or as text with zero characters in it. A secret that is
  encoded in it needs three ASCII characters in a row around.

Not found is what was compressed or encrypted, hashed, split by other characters (``ab:cd``), written in octal,
quoted-printable, base85 or punycode, reversed, in another case, or encoded more than `DEPTH` times.

The time is in proportion to the text: each decoder passes over it once for each place where a group may begin.
"""

import re
from base64 import b32decode, b64decode
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html.entities import html5
from typing import Final, TypeAlias

DEPTH: Final = 4
"""The encodings on top of each other that are undone."""

Span: TypeAlias = tuple[int, int]


class Finder:
    """Finds the places of secrets in a text."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Take the secrets; each has some characters."""
        known = {form for secret in secrets for form in _bytes_of(secret)}
        self._has_space = any(b" " in one for one in known)
        self._secrets = re.compile(b"|".join(map(re.escape, sorted(known, key=len, reverse=True)))) if known else None
        self._shortest = min(map(len, known), default=0)

    def replaced(self, text: str, by: str) -> str:
        """Replace the secrets in a text, each with all characters that encode a part of it."""
        if self._secrets is None:
            return text
        data = text.encode("utf-8", "surrogatepass")
        parts: list[bytes] = []
        done = 0
        for start, end in _merged(self._places(data, DEPTH, {}), data):
            parts += [data[done:start], by.encode()]
            done = end
        return (b"".join(parts) + data[done:]).decode("utf-8", "surrogatepass") if parts else text

    def _places(self, data: bytes, depth: int, seen: dict[bytes, int]) -> Iterator[Span]:
        """Find the secrets in bytes, and in what they decode to.

        Args:
            data: The bytes; those of UTF-16 are also read as such.
            depth: How often they may be decoded.
            seen: What the same escapes made of them in another order, with the depth that was left then.
        """
        yield from self._places_in_text(data, depth, seen)
        for layer in _utf_16(data) if depth else ():
            for start, end in self._places_in_text(layer.data, depth, {}):
                yield layer.start(start), layer.end(end)

    def _places_in_text(self, data: bytes, depth: int, seen: dict[bytes, int]) -> Iterator[Span]:
        assert self._secrets is not None
        for found in self._secrets.finditer(data):
            yield found.span()
        if depth == 0 or seen.get(data, 0) >= depth:
            return
        seen[data] = depth
        texts = _texts(data)
        for decode in _ESCAPES if self._has_space else _ESCAPES[:-1]:
            yield from self._within(texts, decode(texts.data), depth, seen)
        for digits in _BY_DIGITS:
            yield from self._within(texts, digits.layers(texts.data, self._shortest), depth, {})

    def _within(
        self, texts: "_Layer", layers: "Iterable[_Layer]", depth: int, seen: dict[bytes, int]
    ) -> Iterator[Span]:
        for layer in layers:
            for start, end in self._places(layer.data, depth - 1, seen):
                yield texts.start(layer.start(start)), texts.end(layer.end(end))


def _bytes_of(secret: str) -> Iterator[bytes]:
    """Yield the bytes of a secret: an environment's may hold bytes that are not UTF-8."""
    yield secret.encode("utf-8", "surrogatepass")
    yield secret.encode("utf-16-le", "surrogatepass")
    yield secret.encode("utf-16-be", "surrogatepass")
    try:
        yield secret.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return


def _merged(spans: Iterable[Span], data: bytes) -> list[Span]:
    """Join the places that overlap, each widened to whole characters."""
    merged: list[Span] = []
    for span in sorted(_of_characters(span, data) for span in spans):
        if merged and span[0] < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], span[1])
        else:
            merged.append(span)
    return merged


def _of_characters(span: Span, data: bytes) -> Span:
    start, end = span
    while start > 0 and data[start] & 0xC0 == 0x80:
        start -= 1
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return start, end


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a decoder made of a text.

    Attributes:
        data: The decoded bytes.
        begins: Where in them each part begins.
        sources: How the place of a byte in that part is found in what was decoded: the first and the last one.
    """

    data: bytes
    begins: list[int]
    sources: list[Callable[[int], Span]]

    def start(self, place: int) -> int:
        """Return where the byte at a place is encoded."""
        return self._source(place)[0]

    def end(self, place: int) -> int:
        """Return where the byte before a place ends."""
        return self._source(place - 1)[1]

    def _source(self, place: int) -> Span:
        part = bisect_right(self.begins, place) - 1
        return self.sources[part](place - self.begins[part])


class _Maker:
    """Puts a layer together."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._begins: list[int] = []
        self._sources: list[Callable[[int], Span]] = []
        self._size = 0

    def add(self, part: bytes, source: Callable[[int], Span]) -> None:
        self._parts.append(part)
        self._begins.append(self._size)
        self._sources.append(source)
        self._size += len(part)

    def layer(self) -> _Layer:
        return _Layer(b"".join(self._parts), self._begins, self._sources)


_TEXT: Final = re.compile(
    rb"(?:[\x01-\x7f]|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}){8,}"
)
"""Bytes that might be text, enough to hold a secret; an image, or what was no encoding, has few."""


def _texts(data: bytes) -> _Layer:
    """Take the texts out of bytes: only these are decoded further."""
    made = _Maker()
    for found in _TEXT.finditer(data):
        made.add(found[0], _as_itself(found.start()))
        made.add(_APART, _whole(found.end(), found.end()))
    return made.layer()


# Escapes: most characters stand for themselves.


def _unescaped(data: bytes, pattern: re.Pattern[bytes], meaning: Callable[[re.Match[bytes]], bytes | None]) -> _Layer:
    """Replace each escape by its meaning; None leaves it as it is."""
    made = _Maker()
    done = 0
    for found in pattern.finditer(data):
        meant = meaning(found)
        if meant is None:
            continue
        start, end = found.span()
        if done < start:
            made.add(data[done:start], _as_itself(done))
        if meant:
            made.add(meant, _whole(start, end))
        done = end
    if done < len(data):
        made.add(data[done:], _as_itself(done))
    return made.layer()


def _as_itself(start: int) -> Callable[[int], Span]:
    return lambda place: (start + place, start + place + 1)


def _whole(start: int, end: int) -> Callable[[int], Span]:
    return lambda _: (start, end)


def _character(number: int) -> bytes:
    return chr(number).encode("utf-8", "surrogatepass") if number < 0x110000 else b"?"


_BACKSLASH: Final = re.compile(
    rb"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|u([0-9a-f]{4})|x([0-9a-f]{2})|([^ux]))",
    re.IGNORECASE | re.DOTALL,
)
_CONTROL: Final = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"f": b"\f"}


def _of_backslash(found: re.Match[bytes], *, as_bytes: bool) -> bytes:
    high, low, unit, byte, other = found.groups()
    if high is not None:
        return _character(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if unit is not None:
        return _character(int(unit, 16))
    if byte is not None:
        return bytes([int(byte, 16)]) if as_bytes else _character(int(byte, 16))
    return _CONTROL.get(other, other)


def _backslashes(data: bytes) -> Iterator[_Layer]:
    if b"\\" not in data:
        return
    yield _unescaped(data, _BACKSLASH, lambda found: _of_backslash(found, as_bytes=False))
    if _HIGH_BYTE.search(data):
        yield _unescaped(data, _BACKSLASH, lambda found: _of_backslash(found, as_bytes=True))


_HIGH_BYTE: Final = re.compile(rb"\\x[89a-f]", re.IGNORECASE)

_PERCENT: Final = re.compile(rb"%([0-9a-f]{2})|(\+)", re.IGNORECASE)


def _percents(data: bytes) -> Iterator[_Layer]:
    if b"%" in data:
        yield _unescaped(data, _PERCENT, lambda found: None if found[1] is None else bytes([int(found[1], 16)]))


def _forms(data: bytes) -> Iterator[_Layer]:
    if b"+" in data:
        yield _unescaped(data, _PERCENT, lambda found: b" " if found[1] is None else bytes([int(found[1], 16)]))


_ENTITY: Final = re.compile(rb"&(?:#([0-9]{1,7})|#x([0-9a-f]{1,6})|([a-z][a-z0-9]{1,31}));?", re.IGNORECASE)


def _of_html(found: re.Match[bytes]) -> bytes | None:
    decimal, hexadecimal, name = found.groups()
    if name is not None:
        meant = html5.get(found[0][1:].decode())
        return None if meant is None else meant.encode()
    return _character(int(decimal) if decimal is not None else int(hexadecimal, 16))


def _entities(data: bytes) -> Iterator[_Layer]:
    if b"&" in data:
        yield _unescaped(data, _ENTITY, _of_html)


# Groups of bits: every character carries some.


@dataclass(frozen=True, slots=True)
class _Digits:
    """An encoding whose characters have so many bits each.

    Attributes:
        runs: The texts that might be in it: its characters, and line ends between them.
        bits: Of a character.
        group: The characters that stand for whole bytes: what is encoded begins at one of so many places of a run.
        decode: Decodes whole groups.
    """

    runs: re.Pattern[bytes]
    bits: int
    group: int
    decode: Callable[[bytes], bytes]

    def layers(self, data: bytes, shortest: int) -> Iterator[_Layer]:
        """Decode every run that is long enough, from each place in its first group."""
        least = shortest * 8 // self.bits
        runs = [found for found in self.runs.finditer(data) if len(found[0]) >= least]
        for skipped in range(self.group if runs else 0):
            made = _Maker()
            for found in runs:
                self._add(made, found, skipped)
            yield made.layer()

    def _add(self, made: _Maker, found: re.Match[bytes], skipped: int) -> None:
        run = found[0]
        start = found.start()
        digits = run.translate(None, b" \t\r\n")
        at = None if len(digits) == len(run) else [start + n for n, one in enumerate(run) if one not in b" \t\r\n"]
        whole = digits[skipped:]
        decoded = self.decode(whole + b"A" * (-len(whole) % self.group))[: len(whole) * self.bits // 8]
        if decoded:
            made.add(decoded, lambda place: self._source(place, skipped, start, at))
            made.add(_APART, _whole(start, start))

    def _source(self, place: int, skipped: int, start: int, at: list[int] | None) -> Span:
        first = skipped + place * 8 // self.bits
        last = skipped + (place * 8 + 7) // self.bits
        return (start + first, start + last + 1) if at is None else (at[first], at[last] + 1)


_APART: Final = b" \xff "
"""Stands between runs: in no encoding, so that two runs are not read as one."""


def _runs_of(digits: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"[%b]+(?:\r?\n[ \t]*[%b]+)*" % (digits, digits))


_BY_DIGITS: Final = (
    _Digits(_runs_of(rb"0-9A-Fa-f"), 4, 2, lambda digits: bytes.fromhex(digits.decode())),
    _Digits(_runs_of(rb"A-Za-z0-9+/_-"), 6, 4, lambda digits: b64decode(digits.translate(_STANDARD))),
    _Digits(_runs_of(rb"A-Za-z2-7"), 5, 8, lambda digits: b32decode(digits, casefold=True)),
)
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")


# UTF-16, in bytes of which some are a few ASCII characters in it.

_SOME_UTF_16: Final = re.compile(rb"(?:[^\x00]\x00){3}|(?:\x00[^\x00]){3}", re.DOTALL)
_SAME_SIZE: Final = re.compile("([\x00-\x7f]+)|([\x80-\u07ff]+)|([\u0800-\uffff]+)|([\U00010000-\U0010ffff]+)")


def _utf_16(data: bytes) -> Iterator[_Layer]:
    if not _SOME_UTF_16.search(data):
        return
    for encoding in ("utf-16-le", "utf-16-be"):
        for skipped in (0, 1):
            made = _Maker()
            start = skipped
            for some in _SAME_SIZE.finditer(data[skipped:].decode(encoding, "replace")):
                size = some.lastindex or 1
                units = 4 if size == 4 else 2
                made.add(some[0].encode(), _characters(start, size, units))
                start += len(some[0]) * units
            yield made.layer()


def _characters(start: int, size: int, units: int) -> Callable[[int], Span]:
    return lambda place: (start + place // size * units, start + place // size * units + units)


_ESCAPES: Final = (_backslashes, _percents, _entities, _forms)
"""The last one matters only to secrets with a space."""
