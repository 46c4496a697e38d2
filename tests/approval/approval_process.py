"""A program that begins a run, or goes on with one, and prints what came of it: the other process of the pause tests.

Run as ``approval_process.py pause|resume plain|streamed FILE``.
"""

import asyncio
import json
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

from approval_builders import ASKING_REFUND, DONE, LOOK, REFUND, arguments_in, planner_with, world

from planner_ext import Approve
from planner_ext.hitl_manager import Checkpoint
from planner_ext.testing import calls

KEY = b"shared secret"


async def last(events: Any) -> Any:
    async with aclosing(events):
        return [event async for event in events][-1].result


async def pause(streamed: bool, file: Path) -> dict[str, Any]:
    here = world([calls(LOOK, REFUND)])
    planner = planner_with(interceptors=[ASKING_REFUND])
    if streamed:
        result = await last(planner.invoke_stream(here.kernel, "Refund order 7."))
    else:
        result = await planner.invoke(here.kernel, "Refund order 7.")
    file.write_text(result.checkpoint.to_json(key=KEY))
    pending = [call.id for call in result.pending]
    return {"status": result.status, "ran": here.ran, "pending": pending, "iterations": result.iterations}


async def resume(streamed: bool, file: Path) -> dict[str, Any]:
    here = world([DONE])
    planner = planner_with(interceptors=[ASKING_REFUND])
    checkpoint = Checkpoint.from_json(file.read_text(), key=KEY)
    decisions = {"call_2": Approve(arguments={"order": "7", "amount": 20}, by="ann")}
    if streamed:
        result = await last(planner.resume_stream(here.kernel, checkpoint, decisions))
    else:
        result = await planner.resume(here.kernel, checkpoint, decisions)
    return {
        "status": result.status,
        "ran": here.ran,
        "answer": result.final_answer,
        "iterations": result.iterations,
        "tool_calls": result.tool_calls,
        "arguments": arguments_in(result.chat_history),
        "run_id": result.checkpoint.run_id,
    }


if __name__ == "__main__":
    act, way, path = sys.argv[1:]
    print(json.dumps(asyncio.run((pause if act == "pause" else resume)(way == "streamed", Path(path)))))
