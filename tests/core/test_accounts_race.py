"""Drawn trees of runs whose functions make runs: the first to act takes first, and nothing is taken twice."""

from contextlib import nullcontext
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from planner_ext.core.accounts import Account, Tab
from planner_ext.core.facts import CallsWithheld, Fact
from planner_ext.core.fold import apply
from planner_ext.core.limits import Budget
from planner_ext.core.machine import (
    AskModel,
    Finish,
    ReviewCalls,
    RunCalls,
    WithholdCalls,
)
from planner_ext.core.state import State
from support.core import (
    Silent,
    began,
    calls,
    completed,
    decided,
    finished,
    replied,
    run_started,
    says,
)
from support.examples import tried

SILENT = Silent()


@dataclass
class Node:
    """A run in the tree, which acts one step at a time; each of its calls may make a run of its own."""

    width: int
    depth: int
    limits: Budget
    within: Tab | None = None
    state: State = field(default_factory=State)
    below: list["Node"] = field(default_factory=list["Node"])
    requests: int = 0
    starts: int = 0
    refused: str | None = None
    end: Finish | None = None

    def __post_init__(self) -> None:
        self._add(run_started(limits=self.limits))
        self.account = Account(lambda: self.state, self.within, nullcontext())
        self.refused = self.account.open()

    @property
    def done(self) -> bool:
        """Whether it has ended, or was not let in."""
        return self.refused is not None or self.end is not None

    def tree(self) -> list["Node"]:
        """List it and all below it."""
        return [self, *(one for node in self.below for one in node.tree())]

    def ready(self) -> bool:
        """Whether it can act: it has not ended, and no run below it is active."""
        return not self.done and all(
            node.done for node in self.below if node in self.running
        )

    running: list["Node"] = field(default_factory=list["Node"])

    def step(self) -> None:
        """Act once."""
        if self.running:
            self._end_calls()
            return
        action = self.account.decide(self.state)
        match action:
            case AskModel(offer=offer, iteration=iteration):
                self.requests += 1
                called = (
                    calls(*["f"] * self.width)
                    if offer and self.width
                    else says("answer")
                )
                self._add(replied(called, iteration=iteration, offered=offer))
            case ReviewCalls(iteration=iteration, indexes=indexes):
                self._add(*(decided(index, iteration=iteration) for index in indexes))
            case RunCalls(iteration=iteration, indexes=indexes):
                self._begin_calls(iteration, indexes)
            case WithholdCalls(
                iteration=iteration, indexes=indexes, answer=answer, limit=limit
            ):
                withheld = CallsWithheld(
                    iteration=iteration,
                    indexes=indexes,
                    answer=answer,
                    limit=limit,
                    at=0.0,
                )
                self._add(withheld)
            case Finish():
                self.end = action
                self.account.close()
            case _:
                self._add(completed(iteration=self.state.iteration - 1))

    def _add(self, *facts: Fact) -> None:
        for fact in facts:
            self.state = apply(self.state, fact)

    def _begin_calls(self, iteration: int, indexes: tuple[int, ...]) -> None:
        self.account.starting(indexes)
        for index in indexes:
            self.starts += 1
            self._add(began(index, iteration=iteration))
            tab = self.account.tabs[index] = Tab(self.account, index, SILENT)
            if self.depth:
                self.running.append(Node(self.width, self.depth - 1, INSIDE, tab))
        self.account.starting(())
        self.below += self.running
        if not self.running:
            self._end_calls()

    def _end_calls(self) -> None:
        for index, tab in list(self.account.tabs.items()):
            self._add(
                finished(index, iteration=self.state.iteration - 1, spent=tab.spent)
            )
            del self.account.tabs[index]
        self.running = []


INSIDE = Budget()

limits = st.builds(
    Budget,
    max_iterations=st.integers(1, 14),
    max_tool_calls=st.none() | st.integers(0, 12),
    on_limit=st.sampled_from(["answer", "stop"]),
    batch_over_limit=st.sampled_from(["reject_batch", "fill_remaining"]),
)


@tried(30)
@given(data=st.data(), limits=limits, width=st.integers(1, 3), depth=st.integers(0, 2))
def test_runs_beside_each_other_never_take_more_than_is_left(
    data: st.DataObject, limits: Budget, width: int, depth: int
) -> None:
    """Each ends with an answer, or at a limit that it names, or is not let in; all that was made is in the usage."""
    root = Node(width, depth, limits)
    for _ in range(1000):
        able = [node for node in root.tree() if node.ready()]
        if not able:
            break
        able[data.draw(st.integers(0, len(able) - 1))].step()
    nodes = root.tree()
    assert all(node.done for node in nodes)
    assert limits.max_iterations is not None
    requests = sum(node.requests for node in nodes)
    starts = sum(node.starts for node in nodes)
    usage = root.state.usage
    assert (usage.iterations, usage.tool_calls) == (requests, starts)
    assert requests <= limits.max_iterations
    assert limits.max_tool_calls is None or starts <= limits.max_tool_calls
    for node in nodes:
        assert node.refused or (
            node.end is not None and (node.end.answer or node.end.limit)
        )
    if limits.on_limit == "answer":
        assert root.end is not None
        assert root.end.answer == "answer"
        assert all(node.end is None or node.end.answer for node in nodes), (
            "each that was let in has its answer"
        )
