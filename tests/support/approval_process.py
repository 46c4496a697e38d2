"""A program that continues a run and prints its outcome: the other process of the pause tests.

Run as ``approval_process.py plain|streamed FILE``, FILE being a checkpoint signed with `KEY` whose ``call_2`` waits.
"""

import asyncio
import json
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

from planner_ext import Approve
from planner_ext.events import ResultReady
from planner_ext.hitl_manager import Checkpoint
from support.approval import ASKING_REFUND, DONE, arguments_in, planner_with, world

KEY = b"shared secret"


async def resume(streamed: bool, text: str) -> dict[str, Any]:
    here = world([DONE])
    planner = planner_with(interceptors=[ASKING_REFUND])
    checkpoint = Checkpoint.from_json(text, key=KEY)
    decisions = {"call_2": Approve(arguments={"order": "7", "amount": 20}, by="ann")}
    if streamed:
        async with aclosing(
            planner.resume_stream(here.kernel, checkpoint, decisions)
        ) as events:
            last = [event async for event in events][-1]
        assert isinstance(last, ResultReady)
        result = last.result
    else:
        result = await planner.resume(here.kernel, checkpoint, decisions)
    assert result.chat_history is not None
    assert result.checkpoint is not None
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
    way, path = sys.argv[1:]
    print(json.dumps(asyncio.run(resume(way == "streamed", Path(path).read_text()))))
