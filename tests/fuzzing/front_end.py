"""The body that a front end posts, with the promises that hold for every one."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ag_ui.core import BaseEvent, RunAgentInput
from pydantic import ValidationError

from fuzzing.mutation import Fuzzed
from fuzzing.texts import ASK, refused
from planner_ext.ag_ui import ag_ui_events
from planner_ext.core.errors import PlannerExtError
from planner_ext.testing import calls
from support.ag_ui import FrontEnd, find_disorder
from support.approval import DONE, LOOK, REFUND, planner_with, world

THREAD = "thread"
TOOL = {
    "name": "set-colour",
    "description": "Set it.",
    "parameters": {"type": "object", "properties": {"to": {"type": "string"}}},
}


@asynccontextmanager
async def front_end(_: Path) -> AsyncGenerator[Fuzzed]:
    """A body is refused by name, or its events are in order; what waits runs only by an approval of what was shown."""
    paused = await planner_with(**ASK).invoke(
        world([calls(REFUND)]).kernel, "Refund order 7."
    )
    shown = paused.pending[0].fingerprint

    async def check(text: str) -> str:
        try:
            body = RunAgentInput.model_validate_json(
                text.encode("utf-8", "surrogatepass")
            )
        except ValidationError:
            return "refused by the protocol"
        here = world(lambda _: DONE)
        waiting = {THREAD: paused.checkpoint}
        try:
            events: list[BaseEvent] = [
                event
                async for event in ag_ui_events(
                    planner_with(**ASK), here.kernel, body, waiting=waiting
                )
            ]
        except PlannerExtError as error:
            return refused(error)
        assert (problem := find_disorder(events)) is None, problem
        assert not here.ran or shown in approved(body), f"{here.ran} ran unapproved"
        return f"read {events[-1].type.value} {len(here.ran)}"

    yield Fuzzed([*map(json.dumps, bodies(shown))], check)


def approved(body: RunAgentInput) -> set[str]:
    """List the interrupts that a body approves."""
    answers: list[tuple[str, Any]] = [
        (entry.interrupt_id, entry.payload) for entry in body.resume or ()
    ]
    return {
        name
        for name, payload in answers
        if isinstance(payload, dict) and payload.get("approved") is True
    }


def bodies(shown: str) -> list[dict[str, Any]]:
    """Begin a run, with and without what went before, and answer what waits in each way."""
    begun = FrontEnd("another").ask("Look order 7 up.").model_dump_json(by_alias=True)
    first: dict[str, Any] = json.loads(begun)
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": LOOK.calls[0].name, "arguments": '{"order": "7"}'},
    }
    before = [
        {"id": "s", "role": "system", "content": "Be brief."},
        {"id": "a", "role": "assistant", "content": None, "toolCalls": [call]},
        {"id": "t", "role": "tool", "toolCallId": "c", "content": "It is red."},
    ]
    payloads = (
        {"approved": True},
        {"approved": True, "editedArgs": {"order": "8", "amount": 1}},
        {"approved": False, "reason": "No."},
        {"answer": "42"},
        None,
    )
    answers = [
        {
            "interruptId": shown,
            "status": "cancelled" if payload is None else "resolved",
            "payload": payload,
        }
        for payload in payloads
    ]
    return [
        first,
        {**first, "tools": [TOOL], "context": [{"description": "d", "value": "v"}]},
        {**first, "messages": [*before, *first["messages"]]},
        {**first, "threadId": THREAD, "messages": []},
        *({**first, "threadId": THREAD, "resume": [answer]} for answer in answers),
    ]
