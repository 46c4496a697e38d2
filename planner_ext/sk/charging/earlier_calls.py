"""The functions after whose calls a call comes: what `planner_ext.approval.policy.ApprovalRule.after` compares."""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from semantic_kernel.contents import ChatMessageContent, FunctionCallContent
from semantic_kernel.filters import AutoFunctionInvocationContext

from planner_ext.core.accounts import Tab
from planner_ext.core.state import State
from planner_ext.core.values import Message
from planner_ext.sk.messages import calls_of, names_in


@dataclass(eq=False)
class GivenMessages:
    """The messages that a run or a request began with."""

    messages: Sequence[Message]

    @cached_property
    def names(self) -> frozenset[str]:
        """The functions that these messages have a call or a result of, read once."""
        return names_in(self.messages)


@dataclass(eq=False, repr=False)
class _EarlierCalls(Set[str]):
    """Functions that runs have started, and those in given messages, read on the first look."""

    started: Set[str]
    given: Sequence[GivenMessages]

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.started).union(*(one.names for one in self.given))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(set(self._names))

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        return frozenset(it)


def before_batch(
    state: State, tab: Tab | None, known: dict[int, GivenMessages]
) -> Set[str]:
    """Name the functions before a run's open batch; ``known`` remembers messages, by identity."""
    around = [] if tab is None else tab.runs_around()
    given = [
        known.setdefault(id(one.given), GivenMessages(one.given))
        for one in (state, *around)
    ]
    started_around = () if tab is None else tab.earlier()
    started = state.inside.union(state.earlier, started_around)
    return _EarlierCalls(started, given)


def before_call(context: object, tab: Tab | None, *, in_run: bool) -> Set[str] | None:
    """Name the functions before a call that a filter sees; None if that is not known.

    A run of this package, for a call ``in_run``, knows more than the filter's history.
    """
    given = (
        [] if tab is None else [GivenMessages(one.given) for one in tab.runs_around()]
    )
    started = set[str]() if tab is None else tab.earlier()
    if (
        isinstance(context, AutoFunctionInvocationContext)
        and context.chat_history is not None
        and not in_run
    ):
        given.append(
            GivenMessages(
                _before(context.chat_history.messages, context.function_call_content)
            )
        )
    if tab is not None or given:
        return _EarlierCalls(started, given)
    return None


def before_message_of(
    call: FunctionCallContent, messages: Sequence[ChatMessageContent]
) -> Set[str]:
    """Name the functions before a call of a history."""
    return _EarlierCalls(set(), [GivenMessages(_before(messages, call))])


def _before(
    messages: Sequence[ChatMessageContent], call: FunctionCallContent | None
) -> Sequence[ChatMessageContent]:
    places = range(len(messages) - 1, -1, -1)
    own = [
        place
        for place in places
        if any(one is call for one in calls_of(messages[place]))
    ]
    if call is not None and not own:  # a filter may have replaced it
        own = [
            place
            for place in places
            if any(one.id == call.id for one in calls_of(messages[place]))
        ]
    if own:
        return messages[: own[0]]
    return list(messages)
