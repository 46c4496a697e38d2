"""A paused run is a value: what waits, what may be sent, and how it continues in another process."""

import asyncio
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

from openai import AsyncOpenAI
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)

from planner_ext import Approve, Budget, Deny
from planner_ext.hitl_manager import Checkpoint, Defer, Supply
from planner_ext.iteration import StopHandle
from planner_ext.testing import ScriptedOpenAIServer, calls, say
from support import TESTS, approval_process
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    Clock,
    Door,
    arguments_in,
    asked,
    both_ways,
    check_sendable,
    every_door,
    only,
    planner_with,
    results,
    three_doors,
    world,
)
from support.approval_process import KEY
from support.processes import Lives
from support.values import each_of

ASK: dict[str, Any] = {"interceptors": [ASKING_REFUND]}


@every_door
async def test_the_history_of_a_paused_run_can_be_sent(door: Door) -> None:
    """The undecided batch lives in the checkpoint: a server as strict as OpenAI takes the history as it is."""
    here = world([LOOK, calls(LOOK, REFUND), DONE])
    outcome = await door.ask(here, **ASK)
    assert (outcome.status, len(outcome.history.messages)) == ("paused", 3)
    with ScriptedOpenAIServer([say("Understood.")]) as server:
        async with AsyncOpenAI(
            base_url=server.url, api_key="any", max_retries=0
        ) as client:
            connector = OpenAIChatCompletion("scripted", async_client=client)
            message = await connector.get_chat_message_content(
                outcome.history, PromptExecutionSettings()
            )
        assert (str(message), server.refused) == ("Understood.", [])


@every_door
async def test_what_waits_is_shown_exactly_and_as_json(door: Door) -> None:
    """Each pending call tells id, function, arguments, fingerprint, prompt and expiry, in JSON values."""
    clock = Clock(seconds=0.0)
    here = world([calls(LOOK, REFUND), DONE])
    outcome = await door.ask(
        here, interceptors=[only("refund", Defer("Sure?", expires_in=60))], clock=clock
    )
    fingerprint = outcome.pending[0]["fingerprint"]
    assert json.loads(json.dumps(outcome.pending)) == [
        {
            "id": "call_2",
            "path": "call_2",
            "kind": "function",
            "goal": outcome.pending[0]["goal"],
            "fully_qualified_name": "shop-refund",
            "arguments": {"order": "7", "amount": 50},
            "fingerprint": fingerprint,
            "expires_at": "1970-01-01T00:01:00+00:00",
            "prompt": "Sure?",
            "summary": "",
            "asked_by": "only.<locals>.interceptor",
            "in_doubt": False,
            "roles": [],
            "decision": None,
            "parameters": {
                "type": "object",
                "properties": {
                    "order": {"type": "string"},
                    "amount": {"type": "number"},
                    "note": {"type": "string", "default": ""},
                },
                "required": ["order", "amount"],
                "description": "Pays money back.",
            },
        }
    ]
    assert (len(fingerprint), here.ran) == (64, [])


@three_doors
async def test_the_usage_continues(door: Door) -> None:
    """Iterations and calls of a run in two lives are those of the same run in one."""
    script = [LOOK, calls(LOOK, REFUND), LOOK, DONE]
    whole = await door.ask(world(script))
    first, second = world(script[:2]), world(script[2:])
    paused = await door.ask(first, **ASK)
    assert (paused.iterations, paused.tool_calls) == (2, 1)
    resumed = await door.resume(second, paused.checkpoint, {"call_3": Approve()}, **ASK)
    assert (
        (resumed.iterations, resumed.tool_calls)
        == (whole.iterations, whole.tool_calls)
        == (4, 4)
    )
    assert (first.requests, second.requests) == (2, 2)
    assert first.ran + second.ran == [
        ("look", "7"),
        ("look", "7"),
        REFUNDED,
        ("look", "7"),
    ]


@both_ways
async def test_tokens_and_time_add_up_and_waiting_is_free(streamed: bool) -> None:
    """Tokens are summed over both lives; the time in which a run is paused is not active time."""
    clock, door = Clock(), Door("planner", streamed)
    first, second = world([REFUND]), world([DONE])
    paused = await door.ask(first, clock=clock, **ASK)
    clock.seconds += 86_400
    planner = planner_with(clock=clock, **ASK)
    result = await planner.resume(
        second.kernel, Checkpoint.from_json(paused.checkpoint), {"call_1": Approve()}
    )
    before = Checkpoint.from_json(paused.checkpoint).state().usage
    assert result.usage.active_seconds == 0
    assert result.usage.total_tokens > before.total_tokens > 0


@both_ways
async def test_a_run_continues_in_another_process(
    streamed: bool, lives: Lives, tmp_path: Path
) -> None:
    """Paused here, resumed there: signed JSON text, edited arguments and a fresh planner are all that it needs."""
    here, saved = world([calls(LOOK, REFUND)]), tmp_path / "run.json"
    paused = Checkpoint.from_json(
        (await Door("planner", streamed).ask(here, **ASK)).checkpoint
    )
    saved.write_text(paused.to_json(key=KEY))
    way = "streamed" if streamed else "plain"
    other = await asyncio.to_thread(
        lives.run, "-m", approval_process.__name__, way, str(saved), cwd=TESTS
    )
    assert (other.returncode, here.ran) == (0, []), other.stderr
    assert json.loads(other.stdout) == {
        "status": "answered",
        "ran": [["look", "7"], ["refund", "7", 20.0, ""]],
        "answer": "Done.",
        "iterations": 2,
        "tool_calls": 2,
        "arguments": [{"order": "7"}, {"order": "7", "amount": 20}],
        "run_id": paused.run_id,
    }


@three_doors
async def test_partial_decisions_leave_the_rest_pending(door: Door) -> None:
    """Decided one by one, the run stays paused, without a request and with nothing run, until the last is decided."""
    here = world([calls(REFUND, REFUND, REFUND)])
    paused = await door.ask(here, **ASK)
    second = await door.resume(
        world([]), paused.checkpoint, {"call_2": Deny("No.")}, **ASK
    )
    third = await door.resume(
        world([]), second.checkpoint, {"call_1": Supply("later")}, **ASK
    )
    assert [(o.status, o.waiting) for o in (paused, second, third)] == [
        ("paused", ["call_1", "call_2", "call_3"]),
        ("paused", ["call_1", "call_3"]),
        ("paused", ["call_3"]),
    ]
    last = world([DONE])
    done = await door.resume(last, third.checkpoint, {"call_3": Approve()}, **ASK)
    assert done.status == "answered"
    assert here.ran == []
    assert last.ran == [REFUNDED]
    assert results(done.history) == [
        "later",
        "The call was refused and did not run: No.",
        "refunded 50",
    ]


@three_doors
async def test_an_approved_call_waits_for_its_siblings(door: Door) -> None:
    """Under ``hold_all`` an approved call does not run while another one of its batch still waits."""
    paused = await door.ask(world([calls(REFUND, REFUND)]), **ASK)
    here = world([])
    second = await door.resume(here, paused.checkpoint, {"call_1": Approve()}, **ASK)
    assert second.status == "paused"
    assert second.waiting == ["call_2"]
    assert here.ran == []
    assert here.requests == 0


@every_door
async def test_no_decision_keeps_a_run_paused(door: Door) -> None:
    """Resumed with {} a run stays paused, without a request, as often as one likes."""
    outcome = await door.ask(world([calls(LOOK, REFUND)]), **ASK)
    pending = outcome.pending
    for _ in range(3):
        here = world([])
        outcome = await door.resume(here, outcome.checkpoint, {}, **ASK)
        assert outcome.status == "paused"
        assert outcome.pending == pending
        assert here.ran == []
        assert here.requests == 0
        check_sendable(outcome.history)


@three_doors
async def test_a_person_may_edit(door: Door) -> None:
    """Edited arguments run; the transcript's call shows them, and the model reads them beside the result."""
    paused = await door.ask(world([calls(LOOK, REFUND)]), **ASK)
    here = world([DONE])
    edited: dict[str, Any] = {"order": "7", "amount": 20, "note": "half"}
    edit = Approve(arguments=MappingProxyType(edited), by="ann")
    edited.clear()  # the decision has its own
    done = await door.resume(here, paused.checkpoint, {"call_2": edit}, **ASK)
    assert here.ran == [("look", "7"), ("refund", "7", 20.0, "half")]
    assert arguments_in(done.history)[1] == {"order": "7", "amount": 20, "note": "half"}
    check_sendable(done.history)


@every_door
async def test_several_pauses_in_one_run(door: Door) -> None:
    """A run may pause in every trip; each life continues from the last one's checkpoint."""
    outcome = await door.ask(world([REFUND]), **ASK)
    for trip in (2, 3, 4):
        assert outcome.status == "paused"
        assert outcome.waiting == ["call_1"]
        assert outcome.iterations == trip - 1
        here = world([REFUND])
        outcome = await door.resume(
            here, outcome.checkpoint, {"call_1": Approve()}, **ASK
        )
        assert here.ran == [REFUNDED]
    last = world([DONE])
    done = await door.resume(last, outcome.checkpoint, {"call_1": Approve()}, **ASK)
    assert done.status == "answered"
    assert done.iterations == 5
    assert done.tool_calls == 4
    assert last.ran == [REFUNDED]
    assert results(done.history) == ["refunded 50"] * 4
    check_sendable(done.history)


@each_of("trip", [1, 2, 3])
@three_doors
async def test_a_pause_in_any_trip_keeps_the_budget_exact(
    door: Door, trip: int
) -> None:
    """Whichever trip pauses, a run of N trips makes N requests in all, the last one without functions."""
    budget = Budget(max_iterations=5)
    first = world([*[LOOK] * (trip - 1), REFUND])
    paused = await door.ask(first, budget=budget, **ASK)
    second = world(lambda request: LOOK if request.tools else DONE)
    done = await door.resume(
        second, paused.checkpoint, {f"call_{trip}": Approve()}, budget=None, **ASK
    )
    assert (paused.iterations, done.iterations) == (trip, 5)
    assert first.requests + second.requests == 5
    assert done.status == "limit_reached"
    assert done.text == "Done."


@three_doors
async def test_a_larger_budget_takes_effect_at_resume(door: Door) -> None:
    """``resume(budget=)`` replaces the limits, also tighter ones; what was spent stays spent."""
    paused = await door.ask(world([REFUND]), budget=Budget(max_iterations=9), **ASK)
    here = world(lambda request: LOOK if request.tools else DONE)
    done = await door.resume(
        here,
        paused.checkpoint,
        {"call_1": Approve()},
        budget=Budget(max_iterations=3),
        **ASK,
    )
    assert done.iterations == 3
    assert here.requests == 2
    assert done.status == "limit_reached"


@three_doors
async def test_a_stop_handle_ends_a_resumed_run(door: Door) -> None:
    """Asked to stop before it continues: nothing runs, not even what was just approved; every call is answered."""
    paused = await door.ask(world([calls(LOOK, REFUND)]), **ASK)
    stop, here = StopHandle(), world([])
    stop.stop("Closing time.")
    done = await door.resume(
        here, paused.checkpoint, {"call_2": Approve()}, stop=stop, **ASK
    )
    assert done.status == "stopped"
    assert here.ran == []
    assert here.requests == 0
    assert ["Closing time." in text for text in results(done.history)] == [True, True]
    check_sendable(done.history)


@three_doors
async def test_a_stop_while_interceptors_are_asked_runs_nothing(door: Door) -> None:
    """A handle pulled during the review of a batch: none of its calls starts, and none is left pending."""
    stop, here = StopHandle(), world([calls(LOOK, REFUND)])
    outcome = await door.ask(
        here,
        interceptors=[lambda call: stop.stop("Enough."), *ASK["interceptors"]],
        stop=stop,
    )
    assert outcome.status == "stopped"
    assert here.ran == []
    assert outcome.waiting == []
    assert here.requests == 1
    check_sendable(outcome.history)


@every_door
async def test_an_early_history_is_kept(door: Door) -> None:
    """What was said before the run is still there after pause and resume, once, and in order."""
    history = asked()
    paused = await door.ask(
        world([LOOK, REFUND]),
        history=None if door.kind == "planner" else history,
        **ASK,
    )
    here = world([DONE])
    done = await door.resume(here, paused.checkpoint, {"call_2": Approve()}, **ASK)
    roles = [message.role.value for message in done.history.messages]
    assert roles[:5] == ["user", "assistant", "tool", "assistant", "tool"]
    assert here.service.requests[0].messages[0]["content"] == "Refund order 7."
