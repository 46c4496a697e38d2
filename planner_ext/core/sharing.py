"""Immutable collections of which a changed copy shares nearly all with the original.

A batch of n calls makes some 3 n facts, and each fact a new state: to copy all n calls for each of them takes time, and
where states are held memory, in proportion to n².
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, Generic, Protocol, TypeVar, cast

__all__ = ["Row", "Tally", "row_of"]

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)

_WIDTH: Final = 64


class Row(Protocol[_T_co]):
    """A tuple that gives copies with another item in a place; made by `row_of`."""

    def changed(self, index: int, item: Any) -> "Row[_T_co]":
        """Copy the row with another item in a place from 0 on."""
        ...

    def __getitem__(self, index: int, /) -> _T_co: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[_T_co]: ...


def row_of(items: Iterable[_T]) -> Row[_T]:
    """Make a row: a plain tuple, or blocks of it where copying the whole would take longer."""
    whole = tuple(items)
    return _Short(whole) if len(whole) <= _WIDTH else _Long(whole)


class _Short(tuple[_T, ...]):
    __slots__ = ()

    def changed(self, index: int, item: _T) -> "_Short[_T]":
        return _Short((*self[:index], item, *self[index + 1 :]))


class _Long(Generic[_T]):
    """A row in blocks; a copy with another item has one block of its own."""

    __slots__ = ("_blocks",)

    def __init__(self, whole: tuple[_T, ...]) -> None:
        self._blocks = tuple(whole[start : start + _WIDTH] for start in range(0, len(whole), _WIDTH))

    def changed(self, index: int, item: _T) -> "_Long[_T]":
        place, inner = divmod(index, _WIDTH)
        block, row = self._blocks[place], object.__new__(type(self))
        block = (*block[:inner], item, *block[inner + 1 :])
        row._blocks = (*self._blocks[:place], block, *self._blocks[place + 1 :])
        return row

    def __getitem__(self, index: int) -> _T:
        return self._blocks[index // _WIDTH][index % _WIDTH]

    def __len__(self) -> int:
        return (len(self._blocks) - 1) * _WIDTH + len(self._blocks[-1])

    def __iter__(self) -> Iterator[_T]:
        return chain.from_iterable(self._blocks)

    def __eq__(self, other: object) -> bool:
        return self._blocks == cast("_Long[object]", other)._blocks if isinstance(other, _Long) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._blocks)


class Tally(Mapping[str, int]):
    """Counts by key; a copy with another count shares the counts that have not changed lately."""

    __slots__ = ("_counts", "_lately")

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts: dict[str, int] = {}
        self._lately: dict[str, int] = dict(counts or {})

    def plus(self, key: str, more: int) -> "Tally":
        """Copy the counts with one of them changed."""
        tally, count = object.__new__(type(self)), self._lately.get(key)
        count = self._counts.get(key, 0) if count is None else count
        tally._counts, tally._lately = self._counts, {**self._lately, key: count + more}
        if len(tally._lately) > _WIDTH and len(tally._lately) ** 2 > len(tally._counts):
            tally._counts, tally._lately = {**tally._counts, **tally._lately}, {}
        return tally

    def __getitem__(self, key: str) -> int:
        return self._lately[key] if key in self._lately else self._counts[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts.keys() | self._lately.keys() if self._counts else self._lately)

    def __len__(self) -> int:
        return len(self._counts.keys() | self._lately.keys())

    def __repr__(self) -> str:
        return f"Tally({dict(self)!r})"
