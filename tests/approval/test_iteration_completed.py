"""The iteration-completed callback: the cases of the proposal that it comes from, through every door."""

import logging
from typing import Any

import pytest
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import Budget, Deny, FunctionInvokingChatCompletion
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import IterationCompleted
from planner_ext.hitl_manager import Supply
from planner_ext.iteration import (
    FunctionInvocationIterationContext,
    ToolExecution,
    Usage,
    after_seconds,
    all_of,
    at_cost,
    at_token_fraction,
    when_flagged,
)
from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, call, calls
from support.approval import (
    DONE,
    LOOK,
    REFUND,
    WIPE,
    Clock,
    Door,
    check_sendable,
    one_door,
    only,
    planner_doors,
    results,
    service_or_handler,
    three_doors,
    world,
)
from support.values import each_of

Context = FunctionInvocationIterationContext


class Watch:
    """A callback that keeps what it was shown, as values."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.seen: list[dict[str, Any]] = []
        self._stop_at = stop_at

    async def __call__(self, context: Context) -> None:
        self.seen.append(
            {
                "iteration": context.iteration,
                "usage": context.total_usage,
                "roles": [message.role.value for message in context.messages],
                "response": str(context.response),
                "streaming": context.is_streaming,
            }
        )
        if context.iteration == self._stop_at:
            context.terminate = True


def reply(text: str, *named: ScriptedReply, tokens: int = 10) -> ScriptedReply:
    """A reply with text beside its calls, and the tokens that it reports."""
    made = calls(*named, text=text)
    return ScriptedReply(
        text=text, calls=made.calls, prompt_tokens=tokens, completion_tokens=1
    )


SCRIPT = [
    reply("First.", LOOK),
    reply("Second.", LOOK, LOOK, tokens=20),
    reply("Third.", LOOK, tokens=40),
    DONE,
]


def test_by_default_there_is_no_callback() -> None:
    """By default a run has no callback."""
    assert (
        FunctionInvokingChatCompletion(
            ScriptedChatCompletion([])
        ).options.iteration_completed
        is None
    )


@three_doors
async def test_it_is_called_after_function_calls(door: Door) -> None:
    """Once per batch, with its results stored, and before the next request is made."""
    here, requests = world(SCRIPT), list[int]()
    outcome = await door.ask(
        here, iteration_completed=lambda context: requests.append(here.requests)
    )
    assert requests == [1, 2, 3]
    assert outcome.text == "Done."
    assert here.requests == 4


@one_door
async def test_it_is_not_called_without_function_calls(door: Door) -> None:
    """A plain answer completes no iteration."""
    watch = Watch()
    await door.ask(world([DONE]), iteration_completed=watch)
    assert watch.seen == []


@one_door
async def test_it_is_not_called_where_no_function_ran(door: Door) -> None:
    """Denied, supplied, unknown and malformed calls do not count as function calls; beside one that ran they do."""
    watch, decide = Watch(), [only("refund", Deny()), only("charge", Supply("x"))]
    batches = [
        REFUND,
        call("shop-charge", {"amount": 1}),
        call("shop-none"),
        call("shop-look", "{"),
        calls(REFUND, LOOK),
    ]
    await door.ask(
        world([*batches, DONE]), interceptors=decide, iteration_completed=watch
    )
    assert [one["iteration"] for one in watch.seen] == [4]


@one_door
async def test_a_failing_function_was_called(door: Door) -> None:
    """A function that raised was called: its error is the result, and the iteration is complete."""

    class Failing:
        @kernel_function
        async def fail(self) -> str:
            raise RuntimeError

    watch = Watch()
    await door.ask(
        world([call("f-fail"), DONE], f=Failing()), iteration_completed=watch
    )
    assert [one["roles"] for one in watch.seen] == [["user", "assistant", "tool"]]


@one_door
async def test_iterations_are_numbered_from_zero(door: Door) -> None:
    """The first completed iteration is 0; a trip whose calls did not run keeps its number."""
    watch = Watch()
    await door.ask(
        world([LOOK, REFUND, LOOK, DONE]),
        interceptors=[only("refund", Deny())],
        iteration_completed=watch,
    )
    assert [one["iteration"] for one in watch.seen] == [0, 2]


@one_door
async def test_usage_is_the_sum_so_far(door: Door) -> None:
    """``total_usage`` adds up every request of the run until now."""
    watch = Watch()
    await door.ask(world(SCRIPT), iteration_completed=watch)
    assert [one["usage"].total_tokens for one in watch.seen] == [11, 32, 73]


@one_door
async def test_usage_is_a_copy(door: Door) -> None:
    """What a callback does to ``total_usage`` does not change the usage of the run."""

    def meddling(context: Context) -> None:
        context.total_usage = Usage(prompt_tokens=10**9)

    outcome = await door.ask(
        world(SCRIPT),
        iteration_completed=meddling,
        budget=Budget(max_total_tokens=1000),
    )
    assert outcome.status == "answered"


@one_door
async def test_messages_accumulate(door: Door) -> None:
    """``messages`` are all of the run so far, the calls and results of this iteration last."""
    watch = Watch()
    await door.ask(world(SCRIPT), iteration_completed=watch)
    one, two = ["assistant", "tool"], ["assistant", "tool", "tool"]
    assert [s["roles"] for s in watch.seen] == [
        ["user", *one],
        ["user", *one, *two],
        ["user", *one, *two, *one],
    ]


@one_door
async def test_the_response_is_the_latest(door: Door) -> None:
    """``response`` is the reply whose calls were just handled."""
    watch = Watch()
    await door.ask(world(SCRIPT), iteration_completed=watch)
    assert [one["response"] for one in watch.seen] == ["First.", "Second.", "Third."]


@three_doors
async def test_it_knows_whether_replies_are_streamed(door: Door) -> None:
    """``is_streaming`` says whether requests are streamed."""
    watch = Watch()
    await door.ask(world(SCRIPT), iteration_completed=watch)
    assert {one["streaming"] for one in watch.seen} == {door.streamed}


@three_doors
async def test_terminate_stops_after_the_iteration(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    """``terminate``: the results are kept, no further request is made, the log says so, and the run is ``stopped``."""
    here = world(SCRIPT)
    with caplog.at_level(logging.INFO, logger="planner_ext"):
        outcome = await door.ask(here, iteration_completed=Watch(stop_at=1))
    assert outcome.status == "stopped"
    assert here.requests == 2
    assert outcome.tool_calls == 3
    assert results(outcome.history) == ["sent"] * 3
    assert any("iteration 1" in record.getMessage() for record in caplog.records)
    check_sendable(outcome.history)


@one_door
async def test_it_works_over_many_iterations(door: Door) -> None:
    """Ten iterations, ten calls of it, and it may stop at any of them."""
    for stop_at in (0, 4, 9):
        watch, here = Watch(stop_at=stop_at), world([*[LOOK] * 10, DONE])
        outcome = await door.ask(here, iteration_completed=watch)
        assert [one["iteration"] for one in watch.seen] == list(range(stop_at + 1))
        assert outcome.status == "stopped"
        assert here.requests == stop_at + 1
        assert len(here.ran) == stop_at + 1


@one_door
async def test_it_may_be_async_or_not(door: Door) -> None:
    """A coroutine is awaited before the run continues; a plain function is called."""
    order: list[str] = []

    async def later(context: Context) -> None:
        order.append("begun")
        await world([DONE]).service.get_chat_message_content(
            _history(context), _settings()
        )
        order.append("done")

    def now(context: Context) -> None:
        order.append("called")

    here = world([LOOK, lambda request: order.append("asked") or DONE])
    await door.ask(here, iteration_completed=later)
    await door.ask(world([LOOK, DONE]), iteration_completed=now)
    assert order == ["begun", "done", "asked", "called"]


def _history(context: Context) -> Any:
    return ChatHistory(messages=context.messages)


def _settings() -> Any:
    return PromptExecutionSettings()


@one_door
async def test_it_is_not_called_for_a_paused_batch(door: Door) -> None:
    """A batch that waits is not complete."""
    watch = Watch()
    await door.ask(world([calls(LOOK, WIPE)]), iteration_completed=watch)
    assert watch.seen == []


@three_doors
async def test_terminate_and_continue(door: Door) -> None:
    """Stopped by the callback, the run continues from its checkpoint where it was, the usage with it."""
    first = world(SCRIPT[:1])
    stopped = await door.ask(first, iteration_completed=Watch(stop_at=0))
    here = world(SCRIPT[1:])
    done = await door.resume(here, stopped.checkpoint, {})
    assert done.status == "answered"
    assert done.text == "Done."
    assert done.iterations == 4
    assert done.tool_calls == 4
    check_sendable(done.history)


@one_door
async def test_the_fact_is_recorded_either_way(door: Door) -> None:
    """The journal has an ``IterationCompleted`` for each batch, and says where a callback was due and what it asked."""
    facts: list[Any] = []
    watch = Watch(stop_at=1)
    await door.ask(
        world([REFUND, LOOK, DONE]),
        interceptors=[only("refund", Deny())],
        iteration_completed=watch,
        observers=[facts.append],
    )
    completed = [fact for fact in facts if isinstance(fact, IterationCompleted)]
    assert [(fact.iteration, fact.called, fact.terminate) for fact in completed] == [
        (0, False, False),
        (1, True, True),
    ]


# Ready-made callbacks


@one_door
async def test_at_token_fraction_ends_or_compacts(door: Door) -> None:
    """At half of the context window, measured on the newest reply, the run ends, or something is done instead."""
    here = world(SCRIPT)
    outcome = await door.ask(here, iteration_completed=at_token_fraction(80, 0.5))
    assert (outcome.status, here.requests) == ("stopped", 3)
    seen: list[int] = []
    callback = at_token_fraction(
        80, 0.25, then=lambda context: seen.append(context.iteration)
    )
    outcome = await door.ask(world(SCRIPT), iteration_completed=callback)
    assert (outcome.status, seen) == ("answered", [1, 2])


@each_of(("window", "fraction"), [(0, 0.5), (100, 0), (100, 1.1), (-1, 0.5)])
def test_at_token_fraction_refuses_what_means_nothing(
    window: int, fraction: float
) -> None:
    """A window below 1, or a share outside of 0 to 1, is refused by name."""
    with pytest.raises(
        PlannerInvalidConfigurationError, match=r"context_window.*fraction"
    ):
        at_token_fraction(window, fraction)


@planner_doors
async def test_after_seconds_ends_the_run(door: Door) -> None:
    """Active time is measured on the run's clock; a function that takes it ends the run after its batch."""
    clock = Clock()

    class Slow:
        @kernel_function
        async def work(self) -> str:
            clock.seconds += 30
            return "done"

    here = world([call("s-work")] * 5, s=Slow())
    outcome = await door.ask(here, iteration_completed=after_seconds(60), clock=clock)
    assert (outcome.status, here.requests) == ("stopped", 3)


@one_door
async def test_at_cost_needs_a_price(door: Door) -> None:
    """Where the price is unknown the cost is, too, and the callback has no effect."""
    assert (
        await door.ask(world(SCRIPT), iteration_completed=at_cost(0.01))
    ).status == "answered"


@one_door
async def test_when_flagged_reads_the_newest_only(door: Door) -> None:
    """A moderation, async or not, is asked for the reply's text and each result of this iteration."""
    seen: list[str] = []

    async def flag(text: str) -> bool:
        seen.append(text)
        return text == "Second."

    here = world(SCRIPT)
    outcome = await door.ask(here, iteration_completed=when_flagged(flag))
    assert (outcome.status, here.requests) == ("stopped", 2)
    assert sorted(seen[:2]) == ["First.", "sent"]
    assert set(seen[2:]) == {"sent", "Second."}


@one_door
async def test_all_of_stops_at_the_first_that_ends(door: Door) -> None:
    """Several callbacks are called in order, until one of them ends the run."""
    first, second, third = Watch(), Watch(stop_at=1), Watch()
    outcome = await door.ask(
        world(SCRIPT), iteration_completed=all_of(first, second, third)
    )
    assert outcome.status == "stopped"
    assert [len(watch.seen) for watch in (first, second, third)] == [2, 2, 1]


@service_or_handler
async def test_sequential_and_concurrent_batches_complete_alike(door: Door) -> None:
    """However the functions of a batch are run, the callback sees all their results, in call order."""
    for execution in (ToolExecution(max_concurrency=1), ToolExecution()):
        watch = Watch()
        outcome = await door.ask(
            world(SCRIPT), iteration_completed=watch, execution=execution
        )
        assert (watch.seen[1]["roles"][-3:], outcome.tool_calls) == (
            ["assistant", "tool", "tool"],
            4,
        )
