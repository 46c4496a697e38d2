"""What the protocol's JavaScript clients make of the events: that of CopilotKit and assistant-ui, and the newest."""

import asyncio
import json
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from support.front_end import PACKAGES, desk, needs_npm

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_npm]

CLIENT = Path(__file__).with_name("client.mjs")
CLIENTS = ("@ag-ui/client", "newest")


async def driven(client: str, agent: str, steps: list[dict[str, Any]]) -> Any:
    """Let a client go some steps."""
    command = ("node", str(CLIENT), str(PACKAGES), client, agent)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    out, wrong = await process.communicate(json.dumps(steps).encode())
    assert process.returncode == 0, wrong.decode()
    return json.loads(out)


APPROVE = {"approved": True}
STEPS: list[dict[str, Any]] = [
    {},
    {"say": "Hello."},
    {"say": "Price?"},
    {"say": "Pay."},
    {"answers": [APPROVE]},
    {"say": "Pay."},
    {"answers": [{"approved": True, "editedArgs": {"amount": 3}}]},
    {"say": "Pay."},
    {"answers": [{"approved": False, "reason": "no"}]},
    {"say": "Pay both."},
    {"answers": [APPROVE, APPROVE]},
    {"say": "Ask me."},
    {"answers": [{"answer": "The lamp."}]},
    {"say": "Colour."},
    {"result": "It is red."},
    {"say": "Loop."},
    {"say": "Fail."},
]
ENDS = [
    *["success"] * 3,
    *["interrupt", "success"] * 5,
    *["success"] * 2,
]


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_understands_every_event(client: str, tmp_path: Path) -> None:
    """Chat, tools, decisions, two interrupts, question, limit and fault: no event is refused, dropped or stripped."""
    async with desk(tmp_path / "runs.db") as service:
        told = await driven(client, service.agent, STEPS)
        (look,) = (await driven(client, service.agent, [{}]))["done"]
    assert told["warnings"] == []
    *done, loop, fault = told["done"]
    assert [one["outcome"] for one in done] == ENDS
    assert [one["error"] for one in (*done, loop)] == [None] * (len(STEPS) - 1)
    assert fault["error"] == "The run failed on the server."
    assert service.shop.paid == [5.0, 3.0, 5.0, 7.0]
    assert len(done[9]["interrupts"]) == 2
    assert done[-1]["messages"][-1]["content"] == "Done: It is red."
    sent = {kind for one in told["done"] for kind in one["types"]}
    assert sent == {
        *("RUN_STARTED", "MESSAGES_SNAPSHOT", "STEP_STARTED", "STEP_FINISHED"),
        *("TEXT_MESSAGE_START", "TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END"),
        *("TOOL_CALL_START", "TOOL_CALL_ARGS", "TOOL_CALL_END", "TOOL_CALL_RESULT"),
        *("RUN_FINISHED", "RUN_ERROR"),
    }
    assert look["messages"][: len(done[-1]["messages"])] == done[-1]["messages"]


async def test_each_client_reads_why_a_run_was_ended(tmp_path: Path) -> None:
    """The newest by the outcome, the other one, which does not know that outcome, by a text."""
    told = []
    for client in CLIENTS:
        async with desk(tmp_path / f"{len(told)}.db") as service:
            told += (await driven(client, service.agent, [{"say": "Loop."}]))["done"]
    older, newest = told
    limit = "The limit max_tool_calls=2 was reached."
    assert older["outcome"] == "success"
    assert older["messages"][-1]["content"] == f"The run was ended: {limit}"
    assert newest["outcome"] == "cancelled"
    assert newest["messages"][-1]["content"] == f"Not executed: {limit}"
