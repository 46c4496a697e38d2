"""The endpoint of the offline comparison: scripted, counted, and so forgiving that an option shows all it would do."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from planner_ext.compare.meter import TripMeter
from planner_ext.testing import Script, ScriptedOpenAIServer
from planner_ext.testing.rules import find_violation
from planner_ext.testing.server import HttpResponse

__all__ = ["ForgivingServer"]

_MISSING = "(no result)"
"""What the model reads where a call was left without a result."""


class ForgivingServer(ScriptedOpenAIServer):
    """A scripted OpenAI server that notes in ``refused`` what OpenAI would refuse, and answers it all the same.

    Several OpenAI-compatible endpoints answer a history whose calls have no results. Behind one of them an option goes
    on and spends, where OpenAI would have ended it with an error: the comparison is to show both. Only that fault is
    forgiven; what else breaks a rule is refused as ever.

    Args:
        script: The answers.
        trips: Counts the requests that were answered, and their tokens.
    """

    def __init__(self, script: Script, *, trips: TripMeter) -> None:
        super().__init__(script)
        self._trips = trips

    def _complete(self, raw: bytes) -> HttpResponse:
        before = (len(self.requests), self.total_tokens)
        body = cast("dict[str, Any]", json.loads(raw))
        if (violation := find_violation(body)) is not None:
            body = {**body, "messages": list(_mended(body["messages"]))}
            if find_violation(body) is None:
                self._refused.append(violation.message)
        response = super()._complete(json.dumps(body).encode())
        if len(self.requests) > before[0]:
            self._trips.count(self.total_tokens - before[1])
        return response


def _mended(messages: list[dict[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Put a result where a call has none."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            waiting = [call for call in waiting if call != message["tool_call_id"]]
        else:
            yield from ({"role": "tool", "tool_call_id": call, "content": _MISSING} for call in waiting)
            waiting = [call["id"] for call in message.get("tool_calls") or ()]
        yield message
    yield from ({"role": "tool", "tool_call_id": call, "content": _MISSING} for call in waiting)
