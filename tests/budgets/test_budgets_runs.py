"""Runs that share a budget: what happens at its limits, at every door."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import (
    Budget,
    FunctionInvokingChatCompletion,
    PlannerPlugin,
    StopHandle,
    ToolCallHandler,
    ToolExecution,
    ToolUseSession,
)
from planner_ext.budgets import BudgetStore, BudgetUsage
from planner_ext.core.facts import SharedBudgetsChecked
from planner_ext.durable import effect
from planner_ext.errors import InvalidLimitError, LimitReachedError, StoreError
from planner_ext.hitl_manager import Checkpoint, ModelClarifier
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from planner_ext.timeline import timeline_of
from support.budgets import NOON, noon, opened, shared, used
from support.inside import auto, first_cause, greedy, world
from support.planner import (
    ADD,
    both_ways,
    invoke,
    kernel_of,
    never_stops,
    openai_kernel,
    planner_with,
    scripted,
)
from support.stock import add_filter
from support.values import each_of


@both_ways
async def test_runs_share_the_round_trips_and_each_ends_with_an_answer(
    store: BudgetStore, *, streamed: bool
) -> None:
    """Two runs of three trips and one of one leave nothing; the next run makes no request and names the budget."""
    planner = planner_with(
        plan=False, max_iterations=3, shared_budgets=[shared(store, max_iterations=7)]
    )
    async with openai_kernel(never_stops) as (kernel, server):
        results = [await invoke(planner, kernel, streamed=streamed) for _ in range(4)]
        assert [
            (one.status, one.limit, one.iterations, one.final_answer) for one in results
        ] == [
            ("limit_reached", "max_iterations", 3, "Enough."),
            ("limit_reached", "max_iterations", 3, "Enough."),
            ("limit_reached", "app: max_iterations", 1, "Enough."),
            ("limit_reached", "app: max_iterations", 0, ""),
        ]
        assert len(server.requests) == 7
    assert (
        results[-1].reason
        == "The limit max_iterations=7 per day of the shared budget 'app' was reached."
    )
    assert await used(store) == [7]
    assert await used(store, "reached") == ["max_iterations"]


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_total_tokens": 1}, "max_total_tokens"),
        ({"max_cost": 0.001}, "max_cost"),
        ({"max_tool_calls": 1}, None),
    ],
)
async def test_what_is_used_up_under_way_leaves_the_answer(
    memory: BudgetStore, limits: Any, name: str | None
) -> None:
    """Tokens, cost and calls: the calls of the reply do not run, and the request that was kept asks for the answer."""
    batch = calls(ADD, ADD)

    def asks(request: ScriptedRequest) -> ScriptedReply:
        return batch if request.tools else say("Enough.")

    kernel, service = scripted(asks)
    planner = planner_with(
        plan=False,
        price=lambda model, usage: 0.01,
        shared_budgets=[shared(memory, **limits)],
    )
    result = await planner.invoke(kernel, "Add.")
    assert (
        result.status,
        result.iterations,
        result.tool_calls,
        result.final_answer,
    ) == (
        "limit_reached",
        2,
        0,
        "Enough.",
    )
    assert result.limit == f"app: {name or 'max_tool_calls'}"
    again = await planner.invoke(kernel, "Add.")
    assert again.iterations == (2 if name is None else 0)
    assert len(service.requests) == 2 + again.iterations


@pytest.mark.parametrize("on_limit", ["stop", "raise", "return_calls"])
async def test_without_an_answer_nothing_is_kept_nor_sent(
    memory: BudgetStore, on_limit: Any
) -> None:
    """Both trips go to functions, and the run ends as it does at a limit of its own."""
    kernel, service = scripted(never_stops)
    budget = Budget(on_limit=on_limit)
    planner = planner_with(
        plan=False, budget=budget, shared_budgets=[shared(memory, max_iterations=2)]
    )
    if on_limit == "raise":
        with pytest.raises(LimitReachedError) as caught:
            await planner.invoke(kernel, "Add.")
        assert caught.value.limit == "app: max_iterations"
    else:
        result = await planner.invoke(kernel, "Add.")
        assert (result.status, result.limit, result.tool_calls) == (
            "limit_reached",
            "app: max_iterations",
            2,
        )
    assert [bool(request.tools) for request in service.requests] == [True, True]
    assert await used(memory) == [2]


async def test_calls_are_returned_at_a_shared_limit_of_calls(
    memory: BudgetStore,
) -> None:
    """``return_calls`` hands the batch back that does not fit, and none of it was charged."""
    kernel, _ = scripted([calls(ADD, ADD)])
    budget = Budget(on_limit="return_calls")
    planner = planner_with(
        plan=False, budget=budget, shared_budgets=[shared(memory, max_tool_calls=1)]
    )
    result = await planner.invoke(kernel, "Add.")
    assert (result.status, result.limit, result.tool_calls) == (
        "limit_reached",
        "app: max_tool_calls",
        0,
    )
    assert await used(memory, "tool_calls") == [0]


async def test_a_plan_is_a_request(memory: BudgetStore) -> None:
    """One trip left: no plan is made, and the only request asks for the answer."""
    kernel, service = scripted(never_stops)
    result = await planner_with(
        shared_budgets=[shared(memory, max_iterations=1)]
    ).invoke(kernel, "Add.")
    assert (result.status, result.iterations, result.final_answer) == (
        "limit_reached",
        1,
        "Enough.",
    )
    assert not service.requests[0].tools


async def test_of_several_budgets_all_are_charged_or_none(memory: BudgetStore) -> None:
    """The user's budget refuses the second request; the app's, which has room, is not charged for it."""
    alice = shared(
        memory, "user", key=lambda given: str(given["user"]), max_iterations=2
    )
    planner = planner_with(
        plan=False, shared_budgets=[shared(memory, "app", max_iterations=50), alice]
    )
    kernel, _ = scripted(never_stops)
    for user in ("alice", "alice", "bob"):
        result = await planner.invoke(kernel, "Add.", KernelArguments(user=user))
        assert result.limit == "user: max_iterations"
    assert await used(memory, budget="app") == [4]
    assert {row.key: row.iterations for row in await memory.usage("user")} == {
        "alice": 2,
        "bob": 2,
    }


@each_of("per", ["hour", "day", "month"])
def test_a_period_ends_where_the_next_one_begins(per: Any) -> None:
    """In the budget's time zone, also in the weeks in which its clocks change."""
    budget = shared(
        BudgetStore.memory(),
        per=per,
        max_iterations=1,
        time_zone=ZoneInfo("Europe/Berlin"),
    )
    first = datetime(2026, 1, 31, 12, 30, tzinfo=UTC).timestamp()
    for hours in range(0, 366 * 24, 7):
        at = first + 3600.0 * hours
        end = budget.period_end(at)
        assert end is not None
        assert end > at
        assert budget.period(end - 1.0) == budget.period(at)
        assert budget.period(end) != budget.period(at)


async def test_a_new_period_is_another_budget(store: BudgetStore) -> None:
    """What is refused at noon runs after midnight; at the end of a month also that of the month, in its time zone."""
    clock = noon()
    budgets = [
        shared(store, max_iterations=2),
        shared(store, "month", per="month", max_iterations=4),
    ]
    planner = planner_with(plan=False, clock=clock, shared_budgets=budgets)
    kernel, service = scripted(never_stops)
    assert (await planner.invoke(kernel, "Add.")).iterations == 2
    refused = await planner.invoke(kernel, "Add.")
    assert (refused.status, refused.iterations) == ("limit_reached", 0)
    clock.seconds += timedelta(hours=13).total_seconds()
    resumed = await planner.resume(
        kernel, refused.checkpoint, budget=Budget(max_iterations=9)
    )
    assert (resumed.iterations, resumed.final_answer) == (2, "Enough.")
    rows = {(row.budget, row.period): row.iterations for row in await store.usage()}
    days = {("app", "2026-01-31"): 2, ("app", "2026-02-01"): 2}
    assert rows == days | {("month", "2026-01"): 2, ("month", "2026-02"): 2}
    assert len(service.requests) == 4


async def test_a_run_over_midnight_is_charged_to_both_days(memory: BudgetStore) -> None:
    """Each request counts in the day in which it is reserved, and what was kept for the answer moves to the new day."""
    clock = noon()

    def late(request: ScriptedRequest) -> ScriptedReply:
        clock.seconds += timedelta(hours=7).total_seconds()
        return never_stops(request)

    kernel, service = scripted(late)
    planner = planner_with(
        plan=False,
        max_iterations=5,
        clock=clock,
        shared_budgets=[shared(memory, max_iterations=3)],
    )
    result = await planner.invoke(kernel, "Add.")
    assert (result.iterations, result.final_answer) == (5, "Enough.")
    assert await used(memory) == [3, 2]
    assert sum(await used(memory, "tokens")) == result.usage.total_tokens
    assert len(service.requests) == 5


async def test_the_callback_learns_once_who_reached_which_limit(
    memory: BudgetStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The callback gets the usage once for a key and a period, a failing one is logged; observers get every refusal."""
    told: list[BudgetUsage] = []
    facts: list[Any] = []

    async def tell(usage: BudgetUsage) -> None:
        told.append(usage)
        raise RuntimeError("no mail today")

    budget = shared(
        memory,
        "user",
        key=lambda given: str(given["user"]),
        max_iterations=1,
        on_limit_reached=tell,
    )
    planner = planner_with(
        plan=False, clock=noon(), shared_budgets=[budget], observers=[facts.append]
    )
    kernel, _ = scripted(never_stops)
    for user in ("alice", "alice", "bob"):
        await planner.invoke(kernel, "Add.", KernelArguments(user=user))
    assert [(one.key, one.period, one.reached) for one in told] == [
        ("alice", "2026-01-31", "max_iterations"),
        ("bob", "2026-01-31", "max_iterations"),
    ]
    refusals = [fact for fact in facts if isinstance(fact, SharedBudgetsChecked)]
    assert [(fact.limit, fact.answer) for fact in refusals] == [
        ("user: max_iterations", True),
        ("user: max_iterations", False),
        ("user: max_iterations", True),
    ]
    assert "no mail today" in caplog.text
    assert "alice" not in "".join(fact.reason for fact in refusals)


async def test_without_a_callback_a_warning_is_logged_once(
    memory: BudgetStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the budget, the limit and the period, and no key."""
    keyed = shared(memory, "user", key=lambda _: "alice", max_iterations=1)
    planner = planner_with(plan=False, clock=noon(), shared_budgets=[keyed])
    for _ in range(2):
        await planner.invoke(scripted(never_stops)[0], "Add.")
    (record,) = [
        record
        for record in caplog.records
        if record.name.startswith("planner_ext.budgets")
    ]
    assert (
        record.getMessage()
        == "The shared budget 'user' has reached its max_iterations in the period 2026-01-31."
    )


@pytest.mark.parametrize("door", ["service", "handler", "session"])
async def test_every_door_charges_its_shared_budgets(
    memory: BudgetStore, door: str
) -> None:
    """One list of options: the service around a connector, the handler and the session end at the same limit."""
    options: dict[str, Any] = {"shared_budgets": [shared(memory, max_iterations=2)]}
    connector = ScriptedChatCompletion(never_stops)
    service = FunctionInvokingChatCompletion(connector, **options)
    history = ChatHistory()
    history.add_user_message("Add.")
    if door == "service":
        kernel = kernel_of(service)
        message = await service.get_chat_message_content(history, auto(), kernel=kernel)
        assert message is not None
        assert message.metadata["limit"] == "app: max_iterations"
    elif door == "handler":
        messages = [
            message
            async for message in ToolCallHandler(
                kernel_of(connector), **options
            ).invoke(history)
        ]
        assert messages[-1].metadata["limit"] == "app: max_iterations"
    else:
        session = ToolUseSession(kernel_of(connector), **options)
        with pytest.raises(LimitReachedError, match="shared budget 'app'"):
            await session.prompt("Add.")
    assert len(connector.requests) == 2
    assert await used(memory) == [2]


async def test_a_request_that_passes_through_a_service_is_charged(
    memory: BudgetStore,
) -> None:
    """Without functions, and so without a run, the budget still holds: the second request is refused, not sent."""
    connector = ScriptedChatCompletion([say("One."), say("Two.")])
    keyed = shared(memory, key=lambda given: str(given["user"]), max_iterations=1)
    service = FunctionInvokingChatCompletion(connector, shared_budgets=[keyed])
    kernel = Kernel(services=service)
    assert (
        str(
            await kernel.invoke_prompt(
                "Say something.", arguments=KernelArguments(user="alice")
            )
        )
        == "One."
    )
    with pytest.raises(Exception, match="invoking function") as caught:
        await kernel.invoke_prompt(
            "Say something.", arguments=KernelArguments(user="alice")
        )
    refusal = first_cause(caught.value)
    assert isinstance(refusal, LimitReachedError)
    assert refusal.limit == "app: max_iterations"
    assert "shared budget 'app' was reached. The request was not sent." in str(refusal)
    assert len(connector.requests) == 1
    (row,) = await memory.usage()
    assert (row.key, row.iterations, row.tokens > 0) == ("alice", 1, True)


async def test_a_nested_planner_with_the_same_budget_is_charged_once(
    memory: BudgetStore,
) -> None:
    """The outer run's shared budget counts each request of both runs once; what only the inner one shares, too."""

    def works(request: ScriptedRequest) -> ScriptedReply:
        if not request.tools:
            return say("Enough.")
        return (
            call("desk-reach_goal", {"goal": "work"})
            if "desk-reach_goal" in str(request.tools)
            else ADD
        )

    kernel, service = scripted(works)
    budget = shared(memory, max_iterations=40, max_tool_calls=30)
    own = shared(memory, "inner", max_iterations=40)
    inner = planner_with(
        plan=False,
        max_iterations=3,
        excluded_plugins={"desk"},
        shared_budgets=[budget, own],
    )
    kernel.add_plugin(PlannerPlugin(inner), "desk")
    result = await planner_with(
        plan=False, max_iterations=8, shared_budgets=[budget]
    ).invoke(kernel, "Work.")
    assert len(service.requests) == result.iterations
    (app,) = await memory.usage("app")
    assert (app.iterations, app.tool_calls, app.tokens) == (
        result.iterations,
        result.tool_calls,
        result.usage.total_tokens,
    )
    inside = sum(
        "desk-reach_goal" not in str(request.tools) for request in service.requests
    )
    assert (await used(memory, budget="inner"))[0] in (
        inside,
        inside - 1,
    )  # the outer run's answer has no tools either


@pytest.mark.parametrize(
    "way",
    ["inside-prompt_auto", "inside-prompt_plain", "inside-planner", "inside-agent"],
)
async def test_what_runs_inside_functions_of_a_stock_kernel_is_charged(
    memory: BudgetStore, way: str
) -> None:
    """Prompts, agents and planners inside functions: the store counts what the server and the functions count."""
    async with world(greedy(way, 2)) as inside:
        budget = shared(memory, max_iterations=9, max_tool_calls=12)
        planner = planner_with(
            "chat", plan=False, max_iterations=30, shared_budgets=[budget]
        )
        result = await planner.invoke(inside.kernel, "Work.")
        (row,) = await memory.usage()
        assert len(inside.server.requests) == row.iterations == result.iterations <= 9
        assert inside.functions <= row.tool_calls <= 12
        assert row.tokens == result.usage.total_tokens


async def test_a_prompt_in_an_event_loop_of_its_own_is_charged(
    memory: BudgetStore,
) -> None:
    """A function in a thread that runs its own loop reserves its requests, too, without a deadlock."""
    async with world(greedy("inside-thread", 1)) as inside:
        planner = planner_with(
            "chat", plan=False, shared_budgets=[shared(memory, max_iterations=4)]
        )
        result = await planner.invoke(inside.kernel, "Work.")
        assert (
            len(inside.server.requests)
            == (await used(memory))[0]
            == result.iterations
            <= 4
        )


async def test_concurrent_streams_stay_within_the_budget(store: BudgetStore) -> None:
    """Twenty runs at once make 25 requests of 60, and each that began has its answer or none was sent."""
    planner = planner_with(
        plan=False, max_iterations=3, shared_budgets=[shared(store, max_iterations=25)]
    )
    async with openai_kernel(never_stops) as (kernel, server):
        results = await asyncio.gather(
            *[invoke(planner, kernel, streamed=True) for _ in range(20)]
        )
        assert (
            len(server.requests) == 25 == sum(result.iterations for result in results)
        )
    assert all(
        bool(result.final_answer) == bool(result.iterations) for result in results
    )
    assert await used(store) == [25]


async def test_a_request_that_was_not_sent_is_given_back(memory: BudgetStore) -> None:
    """A refused connection costs nothing; an error of the server is a request."""
    down = ScriptedChatCompletion([ConnectionRefusedError("down")])
    planner = planner_with(
        plan=False, shared_budgets=[shared(memory, max_iterations=5)]
    )
    with pytest.raises(Exception, match="down"):
        await planner.invoke(kernel_of(down), "Add.")
    assert await used(memory) in ([0], [1])


async def test_calls_that_do_not_start_are_given_back(memory: BudgetStore) -> None:
    """A stop between the calls of a batch releases what was reserved for the others."""
    stop = StopHandle()

    kernel, _ = scripted([calls(ADD, ADD, ADD)])
    execution = ToolExecution(max_concurrency=1)

    def watch(fact: Any) -> None:
        if fact.type == "CallFinished":
            stop.stop("enough")

    planner = planner_with(
        plan=False,
        execution=execution,
        observers=[watch],
        shared_budgets=[shared(memory, max_tool_calls=5)],
    )
    result = await planner.invoke(kernel, "Add.", stop=stop)
    assert result.tool_calls == 1
    assert await used(memory, "tool_calls") == [1]


class Line:
    """Connects at the third try, which may be made."""

    def __init__(self) -> None:
        self.tries = 0

    @effect("idempotent")
    @kernel_function
    async def connect(self) -> str:
        self.tries += 1
        if self.tries < 3:
            raise ConnectionError("busy")
        return "connected"


@pytest.mark.parametrize(
    ("limits", "tries", "reached", "read"),
    [
        ({"max_tool_calls": 3}, 3, None, "connected"),
        (
            {"max_tool_calls": 2},
            2,
            "max_tool_calls",
            "The function line-connect failed.",
        ),
        ({"max_iterations": 9}, 3, None, "connected"),
    ],
)
async def test_each_start_of_a_call_is_charged(
    memory: BudgetStore, limits: Any, tries: int, reached: str | None, read: str
) -> None:
    """A filter that tries a function again takes one more call of the budget; where none is left, nothing starts."""

    async def retry(context: Any, next: Any) -> None:
        for _ in range(5):
            with suppress(Exception):
                return await next(context)
        raise ConnectionError("busy")

    line, service = Line(), ScriptedChatCompletion([call("line-connect"), say("Done.")])
    kernel = kernel_of(service, line=line)
    add_filter(kernel, "function_invocation", retry)
    result = await planner_with(
        plan=False, shared_budgets=[shared(memory, **limits)]
    ).invoke(kernel, "Connect.")
    assert (result.status, line.tries, result.tool_calls) == ("answered", tries, tries)
    assert (await used(memory, "tool_calls"), await used(memory, "reached")) == (
        [tries],
        [reached],
    )
    assert str(service.requests[-1].messages[-1]["content"]) == read


async def test_a_model_that_answers_questions_is_charged(store: BudgetStore) -> None:
    """Its requests are the run's: the store counts those of both servers, and all their tokens."""
    asks = [
        call("UserInteraction-AskUser", {"question": "Which numbers?"}),
        ADD,
        say("It is 3."),
    ]
    async with (
        openai_kernel([say("1 and 2.")]) as (other, second),
        openai_kernel(asks) as (kernel, first),
    ):
        budgets = [shared(store, max_iterations=5)]
        planner = planner_with(
            plan=False, clarifier=ModelClarifier(other), shared_budgets=budgets
        )
        result = await planner.invoke(kernel, "Add.")
        assert (result.status, result.final_answer) == ("answered", "It is 3.")
        assert (len(first.requests), len(second.requests), await used(store)) == (
            3,
            1,
            [4],
        )
        assert await used(store, "tokens") == [first.total_tokens + second.total_tokens]


async def test_a_question_is_not_put_to_a_model_beyond_the_budget(
    memory: BudgetStore,
) -> None:
    """Of the two requests that are left, the second is kept for the answer: the clarifier's model is not asked."""
    asks = call("UserInteraction-AskUser", {"question": "Which numbers?"})
    other = ScriptedChatCompletion([say("1 and 2.")])
    kernel, service = scripted(
        lambda request: asks if request.tools else say("Enough.")
    )
    budgets = [shared(memory, max_iterations=2)]
    planner = planner_with(
        plan=False, clarifier=ModelClarifier(kernel_of(other)), shared_budgets=budgets
    )
    result = await planner.invoke(kernel, "Add.")
    assert (result.status, result.limit, result.final_answer) == (
        "limit_reached",
        "app: max_iterations",
        "Enough.",
    )
    assert (len(service.requests), len(other.requests), await used(memory)) == (
        2,
        0,
        [2],
    )


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        (lambda given: given["user"], "raised KeyError"),
        (lambda given: 7, "got 7"),
        (lambda given: "", "got ''"),
        (lambda given: "x" * 201, "1 to 200 characters"),
        (lambda given: "a\0b", "1 to 200 characters"),
        (lambda given: "\ud800", "1 to 200 characters"),
    ],
)
async def test_an_invalid_key_is_refused_before_the_first_request(
    memory: BudgetStore, key: Any, problem: str
) -> None:
    """The error names the budget and what its key did."""
    kernel, service = scripted(never_stops)
    planner = planner_with(
        plan=False, shared_budgets=[shared(memory, "user", key=key, max_iterations=1)]
    )
    with pytest.raises(InvalidLimitError, match=problem) as caught:
        await planner.invoke(kernel, "Add.")
    assert "'user'" in str(caught.value)
    assert service.requests == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "must have one of max_iterations"),
        ({"max_iterations": 0}, "max_iterations must be a whole number, 1 or more"),
        ({"max_cost": float("nan")}, "max_cost must be a number above 0"),
        ({"max_cost": 1.0, "per": "week"}, "per must be hour, day, month, or None"),
        ({"max_cost": 1.0, "per": []}, "per must be hour, day, month, or None"),
        ({"max_cost": 1.0, "key": "alice"}, "key must be a function, or None"),
        ({"max_cost": 1.0, "time_zone": "UTC"}, "time_zone must be a tzinfo"),
        ({"max_cost": 1.0, "store": "runs.db"}, "store must be a BudgetStore"),
        ({"max_cost": 1.0, "name": ""}, "name must be text of 1 to 200 characters"),
        (
            {"max_cost": 1.0, "on_limit_reached": 1},
            "on_limit_reached must be a function, or None",
        ),
    ],
)
async def test_an_invalid_budget_is_refused_by_name(
    memory: BudgetStore, given: dict[str, Any], problem: str
) -> None:
    """Each field says what it takes and what it got."""
    with pytest.raises(InvalidLimitError, match=problem):
        shared(**{"store": memory, **given})


async def test_two_budgets_of_one_name_are_refused(memory: BudgetStore) -> None:
    """They would be charged to the same row with different limits."""
    twice = [shared(memory, max_iterations=1), shared(memory, max_iterations=2)]
    with pytest.raises(InvalidLimitError, match="different names"):
        planner_with(shared_budgets=twice)._checked_options()


async def test_a_store_that_cannot_be_used_fails_the_run(tmp_path: Any) -> None:
    """Nothing is sent, and the error says what to do; a budget is never without limit."""
    kernel, service = scripted(never_stops)
    async with opened(tmp_path / "missing" / "runs.db") as store:
        with pytest.raises(StoreError, match="folder does not exist"):
            await planner_with(
                plan=False, shared_budgets=[shared(store, max_iterations=1)]
            ).invoke(kernel, "Add.")
    assert service.requests == []


async def test_a_reset_lets_the_limits_begin_again(store: BudgetStore) -> None:
    """Of one key, in the newest period or in the one that is named; old periods are pruned, unless without end."""
    clock = noon()
    budgets = [
        shared(store, max_iterations=1),
        shared(store, "ever", per=None, max_iterations=50),
    ]
    planner = planner_with(plan=False, clock=clock, shared_budgets=budgets)
    kernel, _ = scripted(never_stops)
    assert [(await planner.invoke(kernel, "Add.")).iterations for _ in range(2)] == [
        1,
        0,
    ]
    assert await store.reset("app")
    assert await used(store, "reached", budget="app") == [None]
    assert [(await planner.invoke(kernel, "Add.")).iterations for _ in range(2)] == [
        1,
        0,
    ]
    assert not await store.reset("app", key="nobody")
    assert not await store.reset("app", period="2026-01-30")
    assert (
        await store.prune(before=datetime.fromtimestamp(NOON, UTC) + timedelta(days=3))
        == 1
    )
    assert [row.budget for row in await store.usage()] == ["ever"]


async def test_a_cancelled_run_gives_back_what_it_kept(store: BudgetStore) -> None:
    """Wherever it is cancelled, only the request that may have been sent stays charged, and nothing stays reserved."""
    for turns in (0, 1, 2, 3, 5, 8, 13, 21, 55):
        kernel, service = scripted(never_stops)
        budget = shared(store, f"app {turns}", max_iterations=999)
        planner = planner_with(plan=False, max_iterations=500, shared_budgets=[budget])
        run = asyncio.ensure_future(planner.invoke(kernel, "Add."))
        for _ in range(turns):
            await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert sum(await used(store, budget=budget.name)) <= len(service.requests) + 1


async def test_a_refusal_is_in_the_timeline_and_in_json(memory: BudgetStore) -> None:
    """The checkpoint of a refused run is read again, and its timeline says which limit it was."""
    planner = planner_with(
        plan=False, shared_budgets=[shared(memory, max_iterations=2)]
    )
    result = await planner.invoke(scripted(never_stops)[0], "Add.")
    facts = Checkpoint.from_json(result.checkpoint.to_json()).facts
    assert [fact for fact in facts if isinstance(fact, SharedBudgetsChecked)] == [
        fact for fact in result.facts if isinstance(fact, SharedBudgetsChecked)
    ]
    events = [event for event in timeline_of(facts).events if event.kind == "refused"]
    assert [event.text for event in events] == [
        "The limit max_iterations=2 per day of the shared budget 'app' was reached."
    ]
    without = await planner_with(plan=False).invoke(scripted([say("Done.")])[0], "Add.")
    assert "shared" not in without.checkpoint.to_json()


async def test_a_store_that_is_closed_under_runs_ends_them(store: BudgetStore) -> None:
    """What is under way is finished, what comes after gets `StoreError`, nothing waits for ever; it can open again."""
    planner = planner_with(
        plan=False,
        max_iterations=50,
        shared_budgets=[shared(store, max_iterations=9999)],
    )
    asked = asyncio.Event()

    def asks(request: ScriptedRequest) -> ScriptedReply:
        asked.set()
        return never_stops(request)

    running = [
        asyncio.create_task(planner.invoke(scripted(asks)[0], "Add.")) for _ in range(5)
    ]
    async with asyncio.timeout(120):
        await asked.wait()
        await asyncio.gather(store.aclose(), store.aclose())
        ends = await asyncio.gather(*running, return_exceptions=True)
    assert [str(end) for end in ends] == [
        f"{store!r} was closed. Close it after the last run that uses it."
    ] * 5
    assert {type(end) for end in ends} == {StoreError}
    async with store:
        assert (await used(store) == []) is ("in memory" in repr(store))
