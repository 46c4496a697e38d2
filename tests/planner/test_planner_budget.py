"""What a run may spend: the hard cap on round trips, and what happens at a limit."""

from typing import Any

import pytest
from semantic_kernel.contents import FunctionCallContent

from planner_ext import (
    Budget,
    FunctionCallingStepwisePlannerResult,
    FunctionInvokingChatCompletion,
)
from planner_ext.errors import (
    LimitReachedError,
    PlannerInvalidConfigurationError,
    RunNotAnsweredError,
)
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.planner import (
    ADD,
    ENOUGH,
    FINAL_ANSWER,
    PLAN,
    Math,
    both_ways,
    check_sendable,
    final,
    invoke,
    kernel_of,
    never_stops,
    openai_kernel,
    planner_with,
    scripted,
)
from support.stock import first_result
from support.values import each_of


@both_ways
@each_of("control", ["iterations_metadata", "use_attempts", "pre_invoke"])
@pytest.mark.parametrize("plan", [True, False], ids=["plan", "no-plan"])
@each_of("most", [1, 2, 5])
async def test_a_model_that_never_stops_makes_exactly_the_requests_allowed(
    most: int, plan: bool, control: str, streamed: bool
) -> None:
    """With max_iterations=N the server gets N requests, N are charged, and the run is answered."""
    math = Math()
    planner = planner_with(
        max_iterations=most, plan=plan, control=control, pre_invoke=lambda *_: True
    )
    async with openai_kernel(never_stops, math=math) as (kernel, server):
        result = await invoke(planner, kernel, streamed=streamed)
        asked_last = server.requests[-1]

    assert (len(server.requests), result.iterations) == (most, most)
    assert result.status == "limit_reached"
    assert result.final_answer == "Enough."
    assert result.limit == "max_iterations"
    assert asked_last.tools == ()
    assert result.tool_calls == len(math.sums)
    assert result.usage.total_tokens == server.total_tokens
    check_sendable(result.chat_history)


async def test_no_plan_is_asked_for_unless_two_trips_remain() -> None:
    """With one round trip no plan is requested, whether or not a plan would be charged; with two one is."""
    for most, charge, trips in [(1, True, 1), (1, False, 1), (2, True, 2)]:
        async with openai_kernel(never_stops) as (kernel, server):
            planner = planner_with(max_iterations=most, charge_plan=charge)
            result = await invoke(planner, kernel)
        planned = [fact for fact in result.facts if fact.type == "Planned"]
        assert (len(server.requests), len(planned)) == (trips, most - 1)


async def test_an_uncharged_plan_comes_on_top() -> None:
    """With charge_plan=False the plan request costs no round trip of the budget, but its tokens are counted."""
    async with openai_kernel(never_stops) as (kernel, server):
        result = await invoke(planner_with(max_iterations=3, charge_plan=False), kernel)

    assert (len(server.requests), result.iterations) == (4, 3)
    assert result.usage.total_tokens == server.total_tokens


async def test_two_hundred_tool_turns_do_not_recurse() -> None:
    """A long run is a loop: 200 tool rounds, then the answer."""
    script = [*[ADD] * 200, say("It is 3.")]
    kernel, _ = scripted(script)
    result = await invoke(planner_with(plan=False, max_iterations=None), kernel)

    assert result.status == "answered"
    assert result.iterations == 201
    assert result.tool_calls == 200


async def test_the_budget_may_say_how_many_iterations() -> None:
    """``budget.max_iterations`` is the same as ``max_iterations``: set alone it holds, above the default too."""
    async with openai_kernel(never_stops) as (kernel, server):
        result = await invoke(
            planner_with(plan=False, budget=Budget(max_iterations=20)),
            kernel,
        )

    assert (len(server.requests), result.iterations) == (20, 20)


@pytest.mark.parametrize(("option", "budget"), [(3, 7), (7, 3)])
async def test_of_two_round_trip_limits_the_smaller_holds(
    option: int, budget: int
) -> None:
    """Where max_iterations is set in the options and in the budget, the smaller one holds."""
    async with openai_kernel(never_stops) as (kernel, server):
        planner = planner_with(
            plan=False, max_iterations=option, budget=Budget(max_iterations=budget)
        )
        await invoke(planner, kernel)

    assert len(server.requests) == 3


@both_ways
@each_of(
    ("reported", "charged", "requests"),
    [
        ({"iterations": 2}, 4, 2),
        ({"Iterations": 2}, 4, 2),
        ({"iterations": "2"}, 4, 4),
        ({"iterations": True}, 4, 4),
    ],
    ids=["ours", "adr", "text", "bool"],
)
async def test_trips_are_charged_from_the_metadata(
    reported: dict[str, Any], charged: int, requests: int, streamed: bool
) -> None:
    """A service that loops by itself is charged what it reports; anything but a whole number charges 1."""
    kernel, service = scripted(never_stops, metadata=reported)
    result = await invoke(
        planner_with(plan=False, max_iterations=4), kernel, streamed=streamed
    )

    assert (result.iterations, len(service.requests)) == (charged, requests)


@both_ways
async def test_a_service_that_spends_more_than_allowed_ends_the_run(
    streamed: bool,
) -> None:
    """A reply that reports more iterations than were left ends the run at the limit; its text is the answer."""
    kernel, service = scripted([say("It is 3.")], metadata={"iterations": 9})
    result = await invoke(
        planner_with(plan=False, max_iterations=4), kernel, streamed=streamed
    )

    assert result.status == "limit_reached"
    assert result.final_answer == "It is 3."
    assert result.limit == "max_iterations"
    assert (result.iterations, len(service.requests)) == (9, 1)


limits = pytest.mark.parametrize(
    ("limit", "budget", "trips"),
    [("max_iterations", {}, 2), ("max_tool_calls", {"max_tool_calls": 1}, 9)],
    ids=["trips", "calls"],
)
"""Two ways to the same end: the call of the second trip may not run."""


@both_ways
@limits
async def test_stop_ends_the_run_as_a_value(
    limit: str, budget: Any, trips: int, streamed: bool
) -> None:
    """Under on_limit="stop" calls beyond the limit are answered "not executed", and no further request is made."""
    math = Math()
    async with openai_kernel(never_stops, math=math) as (kernel, server):
        planner = planner_with(
            plan=False, max_iterations=trips, budget=Budget(on_limit="stop", **budget)
        )
        result = await invoke(planner, kernel, streamed=streamed)

    assert result.status == "limit_reached"
    assert result.final_answer == ""
    assert result.limit == limit
    assert len(server.requests) == 2
    assert len(math.sums) == 1
    assert result.tool_calls == 1
    check_sendable(result.chat_history)
    assert result.chat_history is not None
    assert "Not executed" in str(first_result(result.chat_history.messages[-1]).result)
    assert limit in result.reason
    with pytest.raises(LimitReachedError):
        result.raise_for_status()


@both_ways
@limits
async def test_raise_ends_the_run_with_everything_it_had(
    limit: str, budget: Any, trips: int, streamed: bool
) -> None:
    """Under on_limit="raise" the error carries history, usage, limit and checkpoint."""
    math = Math()
    async with openai_kernel(never_stops, math=math) as (kernel, server):
        planner = planner_with(
            plan=False, max_iterations=trips, budget=Budget(on_limit="raise", **budget)
        )
        with pytest.raises(LimitReachedError, match=limit) as raised:
            await invoke(planner, kernel, streamed=streamed)

    error = raised.value
    assert error.limit == limit
    assert error.status == "limit_reached"
    assert error.iterations == 2
    assert error.tool_calls == 1
    assert error.usage is not None
    assert error.usage.total_tokens == server.total_tokens
    assert error.checkpoint is not None
    assert len(math.sums) == 1
    check_sendable(error.chat_history)


async def test_the_error_for_tool_calls_has_the_expected_words() -> None:
    """The message of an error at max_tool_calls starts with "Max number of tool call reached"."""
    kernel, _ = scripted(never_stops)
    planner = planner_with(
        plan=False, budget=Budget(max_tool_calls=1, on_limit="raise")
    )
    with pytest.raises(LimitReachedError, match=r"^Max number of tool call reached"):
        await invoke(planner, kernel)


@both_ways
@limits
async def test_return_calls_ends_the_history_with_the_calls(
    limit: str, budget: Any, trips: int, streamed: bool
) -> None:
    """Under on_limit="return_calls" the calls of the last trip end the history, unanswered."""
    math = Math()
    async with openai_kernel(never_stops, math=math) as (kernel, server):
        planner = planner_with(
            plan=False,
            max_iterations=trips,
            budget=Budget(on_limit="return_calls", **budget),
        )
        result = await invoke(planner, kernel, streamed=streamed)

    assert result.status == "limit_reached"
    assert result.limit == limit
    assert len(server.requests) == 2
    assert len(math.sums) == 1
    assert result.chat_history is not None
    *_, last = result.chat_history.messages
    assert [
        item.name for item in last.items if isinstance(item, FunctionCallContent)
    ] == ["math-add"]


async def test_answer_asks_once_more_without_functions() -> None:
    """Under on_limit="answer" a call limit answers the calls "not executed" and the next request has no functions."""
    async with openai_kernel(never_stops) as (kernel, server):
        result = await invoke(
            planner_with(plan=False, budget=Budget(max_tool_calls=1)),
            kernel,
        )

    assert [bool(request.tools) for request in server.requests] == [True, True, False]
    assert result.status == "limit_reached"
    assert result.final_answer == "Enough."
    assert result.limit == "max_tool_calls"
    with pytest.raises(LimitReachedError, match=r"^Max number of tool call reached"):
        result.raise_for_status()


@pytest.mark.parametrize(
    ("batch_over_limit", "ran"), [("reject_batch", 0), ("fill_remaining", 2)]
)
async def test_a_batch_is_counted_as_it_is(batch_over_limit: Any, ran: int) -> None:
    """A batch of three is three calls: over a limit of two, none of it runs, or the first two, and never three."""
    math = Math()
    kernel = kernel_of(
        ScriptedChatCompletion([calls(ADD, ADD, ADD), ENOUGH]), math=math
    )
    planner = planner_with(
        plan=False, budget=Budget(max_tool_calls=2, batch_over_limit=batch_over_limit)
    )
    result = await invoke(planner, kernel)

    assert len(math.sums) == ran
    assert result.tool_calls == ran
    assert result.status == "limit_reached"
    check_sendable(result.chat_history)


async def test_the_planners_own_calls_are_free() -> None:
    """The final-answer function does not count as a tool call: with a limit of 0 the run still has its answer."""
    kernel, _ = scripted([PLAN, final()])
    result = await invoke(planner_with(budget=Budget(max_tool_calls=0)), kernel)

    assert result.status == "answered"
    assert result.final_answer == "It is 3."
    assert result.tool_calls == 0


async def test_the_last_request_can_keep_the_schema() -> None:
    """With last_trip="none" the reserved request has the tool schema with choice "none" instead of none."""
    async with openai_kernel(
        lambda r: ENOUGH if r.tool_choice in (None, "none") else ADD
    ) as (kernel, server):
        planner = planner_with(
            plan=False, max_iterations=2, budget=Budget(last_trip="none")
        )
        result = await invoke(planner, kernel)

    assert (server.requests[-1].tool_choice, bool(server.requests[-1].tools)) == (
        "none",
        True,
    )
    assert (result.status, result.final_answer) == ("limit_reached", "Enough.")


async def test_a_function_in_a_budget_must_be_offered() -> None:
    """A misspelt name in max_calls_per_function is refused before the first request, with the names there are."""
    kernel, service = scripted(never_stops)
    planner = planner_with(
        plan=False, budget=Budget(max_calls_per_function={"math-ad": 1})
    )
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=r"max_calls_per_function.*math-ad\b.*math-add",
    ):
        await invoke(planner, kernel)
    assert service.requests == []


async def test_the_budget_of_a_wrapped_service_holds_too() -> None:
    """A service that loops by itself is unwrapped: of both budgets the tighter holds, and requests are not doubled."""
    for of_planner, of_service in [(9, 3), (3, 9)]:
        async with openai_kernel(never_stops) as (kernel, server):
            inner = kernel.get_service("chat")
            wrapped = FunctionInvokingChatCompletion(
                inner, budget=Budget(max_iterations=of_service)
            )
            doubly = FunctionInvokingChatCompletion(wrapped)
            result = await invoke(
                planner_with("chat", plan=False, max_iterations=of_planner),
                kernel_of(doubly),
            )
        assert (len(server.requests), result.iterations) == (3, 3)
        assert (result.status, result.limit) == ("limit_reached", "max_iterations")


def test_a_result_that_was_stored_still_raises_for_its_status() -> None:
    """``raise_for_status`` says how the run ended also where the result was written as JSON and read again."""
    stored = FunctionCallingStepwisePlannerResult(
        status="limit_reached",
        limit="max_tool_calls",
        iterations=3,
        tool_calls=2,
        reason="The limit was reached.",
    ).model_dump_json()
    with pytest.raises(RunNotAnsweredError) as raised:
        FunctionCallingStepwisePlannerResult.model_validate_json(
            stored
        ).raise_for_status()
    error = raised.value
    assert error.status == "limit_reached"
    assert error.limit == "max_tool_calls"
    assert error.iterations == 3
    assert error.tool_calls == 2


async def test_a_printed_result_leaves_the_conversation_out() -> None:
    """``print(result)`` shows how the run ended, not each of its messages."""
    kernel = kernel_of(ScriptedChatCompletion([say("Three.")]))
    result = await invoke(planner_with(None, plan=False), kernel)
    assert result.chat_history
    assert "final_answer='Three.'" in str(result)
    assert "messages=" not in str(result)


async def test_calls_in_reply_to_a_request_without_functions_do_not_run() -> None:
    """A model that calls although nothing is offered ends the run at the limit; nothing of it runs."""
    math = Math()
    kernel = kernel_of(
        ScriptedChatCompletion(
            lambda _: calls(ADD, call(FINAL_ANSWER, {"answer": "3"}))
        ),
        math=math,
    )
    result = await invoke(planner_with(max_iterations=1), kernel)

    assert result.status == "limit_reached"
    assert result.limit == "max_iterations"
    assert math.sums == []
    check_sendable(result.chat_history)
