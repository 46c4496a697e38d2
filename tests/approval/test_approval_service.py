"""Service and handler: the caller's history over a pause, and the application's arguments."""

import json
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import pytest
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments

from planner_ext import Approve, FunctionInvokingChatCompletion
from planner_ext.errors import DecisionRefusedError
from planner_ext.events import CallDecided
from planner_ext.hitl_manager import Checkpoint, Defer
from planner_ext.testing import ScriptedReply, call, calls
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    Door,
    asked,
    check_sendable,
    handler_doors,
    only,
    results,
    service_and_handler,
    service_doors,
    service_or_handler,
    settings_with,
    three_doors,
    world,
)
from support.narrow import as_type, present
from support.values import each_of

ASK: dict[str, Any] = {"interceptors": [ASKING_REFUND]}
SCRIPT = [LOOK, ScriptedReply(text="Two at once.", calls=calls(LOOK, REFUND).calls)]


def reloaded(history: ChatHistory, _: str) -> ChatHistory:
    return ChatHistory.model_validate_json(history.model_dump_json())


def with_paused_text(history: ChatHistory, text: str) -> ChatHistory:
    history.add_assistant_message(text)
    return history


HISTORIES: dict[str, Callable[[ChatHistory, str], ChatHistory]] = {
    "empty": lambda *_: ChatHistory(),
    "updated": lambda history, _: history,
    "with-paused-text": with_paused_text,
    "from-json": reloaded,
    "from-json-with-paused-text": lambda history, text: reloaded(
        with_paused_text(history, text), text
    ),
    "as-it-was-asked": lambda *_: asked(),
}


@each_of("kind", HISTORIES)
@service_and_handler
async def test_any_history_is_brought_up_to_date(door: Door, kind: str) -> None:
    """Resumed with an empty history, the updated one, or one that has the pause's text: it ends as it would have."""
    whole = asked()
    await door.ask(world([*SCRIPT, DONE]), history=whole)
    paused = await door.ask(world(SCRIPT), **ASK)
    history = HISTORIES[kind](paused.history, paused.closing)
    here = world([DONE])
    done = await door.resume(
        here, paused.checkpoint, {"call_3": Approve()}, history=history, **ASK
    )
    assert (done.status, done.text) == ("answered", "Done.")
    assert [m.to_dict() for m in history.messages] == [
        m.to_dict() for m in whole.messages
    ]
    check_sendable(history)


@service_and_handler
async def test_a_paused_message_is_fixed_text_without_calls(door: Door) -> None:
    """The message of a paused run is an assistant's, has no calls and can be added; a handler does not store it."""
    paused = await door.ask(world(SCRIPT), **ASK)
    again = await door.ask(world([REFUND]), **ASK)
    assert paused.closing == again.closing != ""
    assert [message.role.value for message in paused.history.messages] == [
        "user",
        "assistant",
        "tool",
    ]
    check_sendable(with_paused_text(paused.history, paused.closing))


@service_or_handler
async def test_the_model_never_reads_the_paused_text(door: Door) -> None:
    """Added to the history or not, no request after the resume has it."""
    paused = await door.ask(world([REFUND]), **ASK)
    history = with_paused_text(paused.history, paused.closing)
    here = world([LOOK, DONE])
    await door.resume(
        here, paused.checkpoint, {"call_1": Approve()}, history=history, **ASK
    )
    assert paused.closing not in json.dumps(
        [request.messages for request in here.service.requests]
    )


@pytest.mark.parametrize(
    "paused_reply", [SCRIPT[1], REFUND], ids=["with-text", "without-text"]
)
async def test_the_sum_of_a_paused_stream_is_dropped_too(paused_reply: Any) -> None:
    """A caller that adds up the chunks of a paused trip, as Semantic Kernel's do, and stores that, loses nothing."""
    history, here = asked(), world([LOOK, paused_reply])
    service = FunctionInvokingChatCompletion(here.service, **ASK)
    stream = service.get_streaming_chat_message_content(
        history, settings_with(), kernel=here.kernel
    )
    chunks = [chunk async for chunk in stream if chunk is not None]
    checkpoint = chunks[-1].metadata["checkpoint"]
    trip = [
        chunk
        for chunk in chunks
        if chunk.function_invoke_attempt == 1 and chunk.role == "assistant"
    ]
    history.add_message(reduce(add, trip))
    call_id = as_type(CallDecided, Checkpoint.from_json(checkpoint).facts[-2]).call_id
    resumed = FunctionInvokingChatCompletion(world([DONE]).service, **ASK)
    await resumed.resume(
        history, checkpoint, {call_id: Approve()}, settings_with(), kernel=here.kernel
    )
    check_sendable(history)
    assert "This run waits" not in history.model_dump_json()
    assert [message.role.value for message in history.messages].count("assistant") == 2


@service_or_handler
async def test_a_refused_decision_leaves_the_history_as_it_was(door: Door) -> None:
    """After every refusal the caller's history is as it was."""
    paused = await door.ask(world(SCRIPT), **ASK)
    history = with_paused_text(paused.history, paused.closing)
    before = [message.to_dict() for message in history.messages]
    with pytest.raises(DecisionRefusedError):
        await door.resume(
            world([]), paused.checkpoint, {"call_9": Approve()}, history=history, **ASK
        )
    assert [message.to_dict() for message in history.messages] == before


@service_doors
async def test_metadata_survives_json(door: Door) -> None:
    """``pending`` is a list of mappings and ``checkpoint`` a text: the message can be written and read as JSON."""
    here = world([REFUND])
    service = FunctionInvokingChatCompletion(here.service, **ASK)
    chunks = service.get_streaming_chat_message_content(
        asked(), settings_with(), kernel=here.kernel
    )
    if door.streamed:
        metadata = present([chunk async for chunk in chunks][-1]).metadata
    else:
        await chunks.aclose()
        message = await service.get_chat_message_content(
            asked(), settings_with(), kernel=here.kernel
        )
        metadata = present(message).metadata
    kept = json.loads(
        json.dumps(
            {
                key: metadata[key]
                for key in ("pending", "checkpoint", "status", "iterations")
            }
        )
    )
    assert kept["status"] == "paused"
    assert kept["iterations"] == 1
    assert kept["pending"][0]["id"] == "call_1"
    assert Checkpoint.from_json(kept["checkpoint"]).facts[-1].type == "Paused"


@service_or_handler
async def test_a_checkpoint_value_is_taken_like_its_text(door: Door) -> None:
    """``resume`` takes a `Checkpoint`, read with a key for instance, as well as its JSON text."""
    paused = await door.ask(world([REFUND]), **ASK)
    signed = Checkpoint.from_json(paused.checkpoint).to_json(key=b"k")
    here = world([DONE])
    given: Any = Checkpoint.from_json(signed, key=b"k")
    done = await door.resume(here, given, {"call_1": Approve()}, **ASK)
    assert (done.status, here.ran) == ("answered", [REFUNDED])


@service_and_handler
async def test_paused_again_the_history_stays_in_step(door: Door) -> None:
    """Over three pauses with one history: no message twice, none lost, nothing of the pauses left."""
    history = asked()
    outcome = await door.ask(world([REFUND]), history=history, **ASK)
    for _ in range(3):
        history.add_assistant_message(outcome.closing)
        outcome = await door.resume(
            world([REFUND]),
            outcome.checkpoint,
            {"call_1": Approve()},
            history=history,
            **ASK,
        )
    history.add_assistant_message(outcome.closing)
    done = await door.resume(
        world([DONE]), outcome.checkpoint, {"call_1": Approve()}, history=history, **ASK
    )
    roles = [message.role.value for message in history.messages]
    stored = ["assistant"] if door.kind == "handler" else []
    assert roles == ["user", *["assistant", "tool"] * 4, *stored]
    assert (done.tool_calls, results(history)) == (4, ["refunded 50"] * 4)


@handler_doors
async def test_the_handler_stores_the_final_message(door: Door) -> None:
    """Once, at the end, also of a run that was paused in between."""
    paused = await door.ask(world([REFUND]), **ASK)
    done = await door.resume(
        world([DONE]),
        paused.checkpoint,
        {"call_1": Approve()},
        history=paused.history,
        **ASK,
    )
    assert [
        str(m) for m in done.history.messages if m.role == "assistant" and str(m)
    ] == ["Done."]


SECRET = "hunter2-secret"


@three_doors
async def test_application_arguments_are_in_no_checkpoint(door: Door) -> None:
    """What the application gives is neither stored nor shown; a hidden parameter gets it when the call runs."""
    options: dict[str, Any] = {"interceptors": [only("charge", Defer())]}
    arguments = KernelArguments(tenant=SECRET, order=SECRET, token=SECRET)
    paused = await door.ask(
        world([LOOK, call("shop-charge", {"amount": 5})]),
        arguments=arguments,
        **options,
    )
    assert SECRET not in paused.checkpoint
    assert SECRET not in json.dumps(paused.pending)
    here = world([DONE])
    await door.resume(
        here, paused.checkpoint, {"call_2": Approve()}, arguments=arguments, **options
    )
    assert here.ran == [("charge", 5.0, SECRET)]


@three_doors
async def test_application_arguments_are_needed_again(door: Door) -> None:
    """Resumed without them, the function gets its own default; nothing of the first life's arguments is kept."""
    options: dict[str, Any] = {"interceptors": [only("charge", Defer())]}
    arguments = KernelArguments(tenant=SECRET)
    paused = await door.ask(
        world([call("shop-charge", {"amount": 5})]), arguments=arguments, **options
    )
    here = world([DONE])
    await door.resume(here, paused.checkpoint, {"call_1": Approve()}, **options)
    assert (here.ran, dict(arguments)) == (
        [("charge", 5.0, "nobody")],
        {"tenant": SECRET},
    )


@three_doors
async def test_the_callers_decisions_are_not_changed(door: Door) -> None:
    """The mapping of decisions, and the arguments in an approval, are afterwards what they were."""
    paused = await door.ask(world([calls(REFUND, REFUND)]), **ASK)
    edit = {"order": "7", "amount": 20}
    decisions = {"call_2": Approve(arguments=edit)}
    await door.resume(world([]), paused.checkpoint, decisions, **ASK)
    assert (decisions, edit) == (
        {"call_2": Approve(arguments=edit)},
        {"order": "7", "amount": 20},
    )
