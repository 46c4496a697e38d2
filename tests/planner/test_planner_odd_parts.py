"""Parts of the application that are not what they should be: named, or answered, and never a bare TypeError."""

import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from planner_ext import ApprovalFilter, Budget, Deny
from planner_ext.errors import InvalidHistoryError, PlannerInvalidConfigurationError
from planner_ext.testing import ScriptedChatCompletion, calls, say
from support.planner import (
    ADD,
    GOAL,
    Clock,
    Math,
    invoke,
    kernel_of,
    planner_with,
    scripted,
)
from support.values import each_of


class OddClock(Clock):
    """A clock that gives one odd value."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        setattr(self, name, lambda: value)


@each_of("value", [None, "12:00", math.nan, math.inf, True, object()])
@pytest.mark.parametrize("name", ["now", "monotonic"])
async def test_a_clock_that_gives_no_number_is_named(name: str, value: Any) -> None:
    """Before anything is sent, and in a sentence."""
    kernel, service = scripted([ADD, say("It is 3.")])
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=rf"clock\.{name}\(\) must give a finite number",
    ):
        await planner_with(plan=False, clock=OddClock(name, value)).invoke(kernel, GOAL)
    assert service.requests == []


async def test_a_clock_that_goes_back_gives_no_time_back() -> None:
    """What a run has spent it has spent."""

    class Backwards(Clock):
        def monotonic(self) -> float:
            self.seconds -= 10
            return self.seconds

    kernel, _ = scripted([ADD, say("It is 3.")])
    result = await planner_with(plan=False, clock=Backwards()).invoke(kernel, GOAL)
    assert (result.status, result.usage.active_seconds) == ("answered", 0)


@pytest.mark.parametrize("kind", ["auto_function_invocation", "function_invocation"])
async def test_a_filter_whose_second_parameter_has_another_name_is_answered(
    kind: Any,
) -> None:
    """Semantic Kernel passes ``next`` by name: the call fails, its sibling too, the function does not run."""

    async def filtered(context: Any, following: Any) -> None:
        await following(context)

    math_plugin = Math()
    kernel = kernel_of(
        ScriptedChatCompletion([calls(ADD, ADD), say("No idea.")]), math=math_plugin
    )
    kernel.add_filter(kind, filtered)
    result = await invoke(planner_with(plan=False), kernel)
    assert result.status == "answered"
    assert result.final_answer == "No idea."
    assert math_plugin.sums == []


@each_of("left", [None, "text", 7, ["text"], [None]])
async def test_what_an_iteration_callback_leaves_is_checked(left: Any) -> None:
    """Anything but a list of messages is named; the history is on the error."""

    def callback(context: Any) -> None:
        context.messages = left

    kernel, service = scripted([ADD, say("It is 3.")])
    with pytest.raises(
        InvalidHistoryError, match="must leave a list of ChatMessageContent"
    ):
        await planner_with(plan=False, iteration_completed=callback).invoke(
            kernel, GOAL
        )
    assert len(service.requests) == 1


async def test_a_reason_of_blanks_is_dropped() -> None:
    """The model reads that the call was refused, and no empty reason."""
    kernel, service = scripted([ADD, say("Then not.")])
    await planner_with(plan=False, interceptors=[lambda call: Deny(" \n ")]).invoke(
        kernel, GOAL
    )
    assert (
        service.requests[1].messages[-1]["content"]
        == "The call was refused and did not run."
    )


@pytest.mark.parametrize("over", ["reject_batch", "fill_remaining"])
async def test_a_returned_batch_is_returned_whole(over: Any) -> None:
    """With return_calls none of a batch over the limit runs, whichever way a batch is filled."""
    math_plugin = Math()
    kernel = kernel_of(ScriptedChatCompletion([calls(ADD, ADD, ADD)]), math=math_plugin)
    budget = Budget(max_tool_calls=2, batch_over_limit=over, on_limit="return_calls")
    result = await planner_with(plan=False, budget=budget).invoke(kernel, GOAL)
    assert result.status == "limit_reached"
    assert result.limit == "max_tool_calls"
    assert math_plugin.sums == []
    assert result.chat_history is not None
    assert len(result.chat_history.messages[-1].items) == 3


async def test_a_call_where_nothing_is_offered_does_not_answer() -> None:
    """On the reserved trip a model that calls on has given no answer: it stays "", and the reason says why."""
    kernel, _ = scripted([ADD, ADD])
    result = await planner_with(plan=False, max_iterations=2).invoke(kernel, GOAL)
    assert result.status == "limit_reached"
    assert result.limit == "max_iterations"
    assert result.final_answer == ""
    assert "max_iterations=2" in result.reason
    assert "called math-add" in result.reason


@each_of(
    "option",
    [
        "approver",
        "iteration_completed",
        "clarifier",
        "get_available_functions",
        "observers",
    ],
)
@pytest.mark.parametrize(
    "function", [lambda: None, lambda one, two, three: None], ids=["none", "three"]
)
def test_a_function_that_takes_something_else_is_refused_by_name(
    option: str, function: Any
) -> None:
    """What would be a TypeError in the midst of a run is said when the planner is made."""
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=f"{option} must take .* got a function that takes",
    ):
        planner_with(
            None, **{option: [function] if option == "observers" else function}
        )


class Ask:
    """What a program may pass without making one of it."""

    def __init__(self, call: Any = None) -> None: ...


async def yields(_: Any) -> AsyncIterator[Any]:
    yield None


class Yields:
    def __call__(self, _: Any) -> Iterator[Any]:
        yield None


@each_of(
    "option",
    ["interceptors", "observers", "pre_invoke", "approver", "iteration_completed"],
)
@each_of(
    ("function", "problem"),
    [
        (Ask, "got a class. Give Ask"),
        (yields, "which yields"),
        (Yields(), "got a Yields, which yields"),
    ],
    ids=["class", "async generator", "generator object"],
)
def test_what_returns_no_answer_is_refused_by_name(
    option: str, function: Any, problem: str
) -> None:
    """A class returns an object and a generator function a generator: as an interceptor each would deny every call."""
    with pytest.raises(
        PlannerInvalidConfigurationError, match=f"{option} must .*{problem}"
    ):
        planner_with(
            None,
            **{
                option: [function]
                if option in ("interceptors", "observers")
                else function
            },
        )
    if option == "approver":
        for given in ({"policy": function}, {"policy": print, "approver": function}):
            with pytest.raises(PlannerInvalidConfigurationError, match=problem):
                ApprovalFilter(**given)
