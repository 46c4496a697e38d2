"""The values that facts, states and ports consist of.

A message is opaque: the core passes it on, and never looks inside. What it needs of a
reply, its text, calls, usage and finish reason, is next to the message in `Reply`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

_T = TypeVar("_T")

_WIDTH: Final = 64
"""Items of a block: a tuple up to this long is copied whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks(Sequence[_T]):
    """A long row; a changed copy shares all blocks but one with its original."""

    blocks: tuple[tuple[_T, ...], ...]

    def __getitem__(self, index: int) -> _T:  # pyright: ignore[reportIncompatibleMethodOverride]  (never sliced)
        return self.blocks[index // _WIDTH][index % _WIDTH]

    def __len__(self) -> int:
        return (len(self.blocks) - 1) * _WIDTH + len(self.blocks[-1])

    def __iter__(self) -> Iterator[_T]:
        return chain.from_iterable(self.blocks)


def row_of(items: Iterable[_T]) -> Sequence[_T]:
    """Make an immutable row, of which `with_item` makes cheap copies.

    A batch of n calls makes some 3 n facts, each a new state: copying all calls for
    each would take n² steps.
    """
    whole = tuple(items)
    if len(whole) <= _WIDTH:
        return whole
    return _Blocks(
        blocks=tuple(
            whole[start : start + _WIDTH] for start in range(0, len(whole), _WIDTH)
        )
    )


def with_item(row: Sequence[_T], index: int, item: _T) -> Sequence[_T]:
    """Copy a row with another item at an index from 0 on."""
    if not isinstance(row, _Blocks):
        return (*row[:index], item, *row[index + 1 :])
    place, inner = divmod(index, _WIDTH)
    block = row.blocks[place]
    block = (*block[:inner], item, *block[inner + 1 :])
    return _Blocks(blocks=(*row.blocks[:place], block, *row.blocks[place + 1 :]))


class Tally(Mapping[str, int]):
    """Counts by key; a copy with another count shares the counts that did not change recently."""

    __slots__ = ("_counts", "_lately")

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts: dict[str, int] = {}
        self._lately: dict[str, int] = dict(counts or {})

    def plus(self, key: str, more: int) -> "Tally":
        """Copy the counts with one of them changed."""
        tally = object.__new__(type(self))
        count = self._lately.get(key)
        count = self._counts.get(key, 0) if count is None else count
        tally._counts = self._counts
        tally._lately = {**self._lately, key: count + more}
        if len(tally._lately) > _WIDTH and len(tally._lately) ** 2 > len(tally._counts):
            tally._counts = {**tally._counts, **tally._lately}
            tally._lately = {}
        return tally

    def __getitem__(self, key: str) -> int:
        return self._lately[key] if key in self._lately else self._counts[key]

    def __iter__(self) -> Iterator[str]:
        return iter(
            self._counts.keys() | self._lately.keys() if self._counts else self._lately
        )

    def __len__(self) -> int:
        return len(self._counts.keys() | self._lately.keys())

    def __repr__(self) -> str:
        return f"Tally({dict(self)!r})"


def updated(value: _T, changes: dict[str, Any] | None = None, /, **more: Any) -> _T:
    """Copy a frozen dataclass as `dataclasses.replace` does, in an eighth to a third of the time.

    The fold makes several such copies for each fact. The dataclass must have neither
    slots, since all fields are copied as one dict, nor a ``__post_init__``, which is
    not called.

    Args:
        value: The dataclass.
        changes: New values by field.
        **more: The same as keywords, if there are no ``changes``.

    Raises:
        AttributeError: If a change names something other than a field.
    """
    before = vars(value)
    after = before | (more if changes is None else changes)
    if len(after) != len(before):
        raise AttributeError(
            f"{type(value).__name__} has no {', '.join(sorted(after.keys() - before.keys()))}."
        )
    made = object.__new__(type(value))
    object.__setattr__(made, "__dict__", after)
    return made


Message: TypeAlias = Any
"""A message of the adapters' library, or that library's own JSON when read from a
journal."""

Status: TypeAlias = Literal[
    "answered", "incomplete", "paused", "asked", "limit_reached", "stopped"
]
"""How a run ended, or why it waits."""

CallKind: TypeAlias = Literal[
    "function", "unknown", "invalid", "final_answer", "question", "read", "external"
]
"""The kind of a resolved call: see `ResolvedCall`."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What was used: by one request, by one call and the runs inside it, or by a run so far.

    A call's usage leaves out its active time, which the run around it measures.

    Attributes:
        iterations: Round trips charged: what each reply's metadata reports, at least 1
            a request.
        tool_calls: Functions started, failures included.
        prompt_tokens: Tokens sent, as the service reported them. Without a report: an
            estimate in a run whose tokens or cost are limited, else 0.
        completion_tokens: Tokens received, reported or estimated as above.
        cached_tokens: The part of the tokens sent that the service read from its prompt
            cache.
        cost: Price in US dollars; None if it is not known. It is known under
            ``max_cost`` or ``price`` only.
        active_seconds: Time in which the run worked, without the time that it waited
            for a person while paused.
        estimated_tokens: Those of the tokens sent and received that were estimated, not
            reported.
        calls_by_function: The functions started, by fully qualified name.
    """

    iterations: int = 0
    tool_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float | None = None
    active_seconds: float = 0.0
    estimated_tokens: int = 0
    calls_by_function: Mapping[str, int] = field(
        default_factory=dict[str, int], hash=False, repr=False
    )

    @property
    def total_tokens(self) -> int:
        """Tokens sent and received."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return self._plus(other, 1)

    def __sub__(self, other: "Usage") -> "Usage":
        return self._plus(other, -1)

    def _plus(self, other: "Usage", times: int) -> "Usage":
        cost = self.cost
        if other.cost is not None:
            cost = (cost or 0.0) + times * other.cost
        calls = self.calls_by_function
        if other.calls_by_function:
            sums = {
                name: calls.get(name, 0) + times * count
                for name, count in other.calls_by_function.items()
            }
            calls = {name: count for name, count in {**calls, **sums}.items() if count}
        return Usage(
            iterations=self.iterations + times * other.iterations,
            tool_calls=self.tool_calls + times * other.tool_calls,
            prompt_tokens=self.prompt_tokens + times * other.prompt_tokens,
            completion_tokens=self.completion_tokens + times * other.completion_tokens,
            cached_tokens=self.cached_tokens + times * other.cached_tokens,
            cost=cost,
            active_seconds=self.active_seconds + times * other.active_seconds,
            estimated_tokens=self.estimated_tokens + times * other.estimated_tokens,
            calls_by_function=calls,
        )

    @property
    def by_part(self) -> dict[str, float]:
        """@private What counts against each limit of `planner_ext.core.limits.LIMIT_OF_PART`."""
        return {
            "iterations": self.iterations,
            "tool_calls": self.tool_calls,
            "tokens": self.total_tokens,
            "cost": self.cost or 0.0,
            "seconds": self.active_seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedCall:
    """One function call as the model asked for it; nothing in it is trusted yet.

    Attributes:
        id: Unique within its batch; missing, duplicate and overlong ids were reissued
            before.
        name: The name that the model used.
        arguments: JSON text as received, "" if the model sent none.
        sent_name: The name of the call in the transcript, where servers would refuse
            the model's; else "".
    """

    id: str
    name: str
    arguments: str
    sent_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply to one request to the model.

    Attributes:
        message: The reply's message, opaque, with the ids of `calls`.
        text: All text of the message, "" without any.
        calls: The function calls in it, in order; several messages of one reply make
            one ordered batch.
        finish_reason: Why the model stopped, as the connector reports it; None without
            a report.
        usage: Tokens of this request, and the round trips that the connector reports
            for it, at least 1.
        functions_available: Whether there was any function that could have been
            offered.
    """

    message: Message
    text: str = ""
    calls: tuple[RequestedCall, ...] = ()
    finish_reason: str | None = None
    usage: Usage = Usage(iterations=1)
    functions_available: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCall:
    """A requested call after it was resolved to its function and its arguments were validated.

    Attributes:
        kind: ``function``: a kernel function that may run; ``unknown``: no such
            function was offered; ``invalid``: its arguments cannot be used;
            ``final_answer``: the planner's own final-answer function; ``question``: its
            own function that asks the user; ``read``: the loop's own function that
            reads on in a result; ``external``: known by schema only, so the caller must
            run it.
        function: Fully qualified name of the resolved function; for an unknown one, the
            requested name.
        arguments: The function's arguments, each converted to its parameter's type;
            empty if the call is neither a ``function`` nor a ``question`` nor a
            ``read``.
        converted: JSON text of ``arguments``; None if the text that was checked is
            equivalent.
        signature: The function's parameters, ``name=digest`` of each; "" if they are
            not known.
        parameters: JSON text of the schema of its parameters, as sent to the model; ""
            without one.
        answer: What the model reads for ``unknown`` and ``invalid``; the text of a
            ``final_answer`` or ``question``.
        nested: Whether the function is a planner.
        threaded: Whether the function is synchronous, and runs in a thread.
        said: The arguments that differ from the parameters' defaults; None if all do.
    """

    kind: CallKind
    function: str
    plugin_name: str = ""
    function_name: str = ""
    arguments: Mapping[str, Any]
    converted: str | None = None
    signature: str = ""
    parameters: str = ""
    answer: str = ""
    nested: bool = False
    threaded: bool = False
    said: Mapping[str, Any] | None = None


class Newest(Generic[_T]):
    """The newest values of a kind, so many at most: an object that lives long does not grow with what it has seen."""

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        self._values: dict[_T, None] = {}

    def __contains__(self, value: object) -> bool:
        return value in self._values

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: _T) -> None:
        """Remember a value; the oldest is forgotten where there are too many."""
        self._values[value] = None
        while len(self._values) > self._most:
            self._values.pop(next(iter(self._values)), None)

    def discard(self, value: _T) -> None:
        """Forget a value."""
        self._values.pop(value, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """A transcript item: what the model reads as the result of one call.

    Attributes:
        inside: The functions whose results may be part of it, beside its own: see
            `planner_ext.core.state.Call.inside`.
    """

    call_id: str
    name: str
    text: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedReply:
    """A transcript item: a reply that differs from the message as received.

    Attributes:
        message: The message as received.
        kept: Ids of the calls that stay in it; the others are omitted.
        edited: Call id and JSON text of the arguments that replace the model's.
    """

    message: Message
    kept: tuple[str, ...]
    edited: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMessage:
    """A transcript item: plain text that did not come as a message."""

    role: Literal["user", "assistant"]
    text: str


TranscriptItem: TypeAlias = Message | EditedReply | CallResult | TextMessage
"""One message of a transcript."""
