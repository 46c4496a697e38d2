"""The values that facts, states and ports consist of.

A message is opaque to the core; `Reply` has beside it what the core needs of a reply.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import chain
from typing import (
    Any,
    Final,
    Generic,
    Literal,
    TypeAlias,
    TypeVar,
    dataclass_transform,
)

_T = TypeVar("_T")


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def frozen(kind: type[_T]) -> type[_T]:
    """Make a frozen dataclass with slots and keyword arguments, which is made in half the time.

    The ``__init__`` of a frozen dataclass calls ``object.__setattr__`` for each field.
    This one sets the fields while the object is of a class with the same slots that is
    not frozen. Of a subclass, and where a field has a default factory, it is the
    dataclass's.
    """
    made: Any = dataclass(frozen=True, slots=True, kw_only=True)(kind)
    own = fields(made)
    if not own or any(one.default_factory is not MISSING for one in own):
        return made
    plain = made.__init__
    open_members = {
        "__slots__": (),
        "__setattr__": object.__setattr__,
        "__delattr__": object.__delattr__,
    }
    given: dict[str, Any] = {
        "_made": made,
        "_open": type(kind.__name__, (made,), open_members),
        "_set_class": vars(object)["__class__"].__set__,
        "_plain": plain,
    }
    names = [one.name for one in own]
    source = [
        f"def with_names({', '.join(given)}):",
        f" def __init__(self, *, {', '.join(names)}):",
        "  if self.__class__ is not _made:",
        f"   return _plain(self, {', '.join(f'{name}={name}' for name in names)})",
        "  _set_class(self, _open)",
        *(f"  self.{name} = {name}" for name in names),
        "  self.__class__ = _made",
        "  self.__post_init__()" if hasattr(made, "__post_init__") else "",
        " return __init__",
    ]
    found: dict[str, Any] = {}
    exec("\n".join(source), vars(sys.modules[kind.__module__]), found)  # noqa: S102  (as `dataclasses` does)
    quick = found["with_names"](**given)
    quick.__annotations__ = plain.__annotations__
    quick.__kwdefaults__ = plain.__kwdefaults__
    quick.__qualname__ = plain.__qualname__
    made.__init__ = quick
    return made


_WIDTH: Final = 64
"""Items of a block; a tuple up to this long is copied whole."""


@frozen
class _Blocks(Sequence[_T]):
    """A long row; a changed copy shares all blocks but one."""

    blocks: tuple[tuple[_T, ...], ...]

    def __getitem__(self, index: int) -> _T:  # pyright: ignore[reportIncompatibleMethodOverride]  (never sliced)
        return self.blocks[index // _WIDTH][index % _WIDTH]

    def __len__(self) -> int:
        return (len(self.blocks) - 1) * _WIDTH + len(self.blocks[-1])

    def __iter__(self) -> Iterator[_T]:
        return chain.from_iterable(self.blocks)


def row_of(items: Iterable[_T]) -> Sequence[_T]:
    """Make an immutable row, of which `with_item` makes cheap copies.

    A batch of n calls makes some 3 n states: copying all calls for each would take n²
    steps.
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
    """Counts by key, with cheap changed copies."""

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
    """Copy a frozen dataclass like `dataclasses.replace`, in a third of the time or less.

    The dataclass has no slots, and its ``__post_init__`` is not called.

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
"""A message of the adapters' library, or its JSON when read from a journal."""

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
    """What one request, one call with the runs inside it, or a run so far has used.

    Attributes:
        iterations: Round trips charged, as each reply's metadata reports them, at least
            1 a request.
        tool_calls: Functions started, failures included.
        prompt_tokens, completion_tokens: As the service reported them. Without a
            report: an estimate in a run whose tokens or cost are limited, else 0.
        cached_tokens: The part of the prompt that the service read from its cache.
        cost: US dollars; known under ``max_cost`` or ``price`` only.
        active_seconds: Working time, without pauses; 0 for a call.
        estimated_tokens: The part of the tokens that was estimated.
        calls_by_function: Functions started, by fully qualified name.
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
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return self if other is NOTHING else self._plus(other, 1)

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
        return updated(
            self,
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


NOTHING: Final = Usage()
"""No usage; to add it costs nothing."""


def start_of(function: str) -> Usage:
    """Return what one start of a function uses."""
    return updated(NOTHING, tool_calls=1, calls_by_function={function: 1})


@frozen
class RequestedCall:
    """One function call as the model asked for it; nothing in it is trusted yet.

    Attributes:
        id: Unique within its batch; missing, duplicate and overlong ids were reissued.
        arguments: JSON text as received, or "".
        sent_name: The name in the transcript, where servers would refuse the model's.
    """

    id: str
    name: str
    arguments: str
    sent_name: str = ""


@frozen
class Reply:
    """The reply to one request to the model; several messages make one batch of calls."""

    message: Message
    text: str = ""
    calls: tuple[RequestedCall, ...] = ()
    finish_reason: str | None = None
    usage: Usage = Usage(iterations=1)
    functions_available: bool = True


@frozen
class ResolvedCall:
    """A requested call with its function and its validated arguments.

    Attributes:
        kind: ``function``: a kernel function that may run; ``unknown``: not offered;
            ``invalid``: unusable arguments; ``final_answer`` and ``question``: the
            planner's own functions; ``read``: reads on in a result; ``external``: known
            by schema only, so the caller must run it.
        function: Fully qualified name; of an unknown one, the requested name.
        arguments: Converted to the parameters' types.
        converted: Their JSON text; None if equivalent to the model's.
        answer: What the model reads for ``unknown`` and ``invalid``; the text of a
            ``final_answer`` or ``question``.
        nested: Whether the function may be called again where a run in it waits: see
            `planner_ext.core.facts.CallDecided.nested`.
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
    """The newest values of a kind, so many at most."""

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        self._values: dict[_T, None] = {}

    def __contains__(self, value: object) -> bool:
        return value in self._values

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: _T) -> None:
        """Remember a value, and forget the oldest beyond the most."""
        self._values[value] = None
        while len(self._values) > self._most:
            self._values.pop(next(iter(self._values)), None)

    def discard(self, value: _T) -> None:
        """Forget a value."""
        self._values.pop(value, None)


@frozen
class CallResult:
    """A transcript item: what the model reads as the result of one call.

    Attributes:
        inside: As `planner_ext.core.state.Call.inside`.
    """

    call_id: str
    name: str
    text: str
    inside: tuple[str, ...] = ()


@frozen
class EditedReply:
    """A transcript item: a reply that differs from the message as received.

    Attributes:
        message: As received.
        kept: Ids of the calls that stay in it.
        edited: Call id, and JSON text of the arguments that replace the model's.
    """

    message: Message
    kept: tuple[str, ...]
    edited: tuple[tuple[str, str], ...] = ()


@frozen
class TextMessage:
    """A transcript item: plain text that did not come as a message."""

    role: Literal["user", "assistant"]
    text: str


TranscriptItem: TypeAlias = Message | EditedReply | CallResult | TextMessage
"""One message of a transcript."""


@frozen
class Cut:
    """Where a result was cut.

    Attributes:
        shown: Characters that the model reads, from the beginning.
        left_out: Tokens of the rest, counted or estimated.
    """

    shown: int
    left_out: int
