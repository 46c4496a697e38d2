"""What a streamed run tells: text as it comes, the facts of the run as they happen, and the result at the end."""

from dataclasses import dataclass
from typing import TypeAlias

from planner_ext.core.facts import (
    AnswerChecked,
    CallDecided,
    CallFinished,
    CallStarted,
    CallsWithheld,
    Clarified,
    Ended,
    Fact,
    IterationCompleted,
    MessageAdded,
    ModelReplied,
    Paused,
    Planned,
    Resumed,
    RunStarted,
    StopRequested,
)
from planner_ext.planner_result import FunctionCallingStepwisePlannerResult
from planner_ext.ports import RunInfo, TextDelta

__all__ = [
    "AnswerChecked",
    "CallDecided",
    "CallFinished",
    "CallStarted",
    "CallsWithheld",
    "Clarified",
    "Ended",
    "Fact",
    "IterationCompleted",
    "MessageAdded",
    "ModelReplied",
    "Paused",
    "Planned",
    "PlannerEvent",
    "ResultReady",
    "Resumed",
    "RunInfo",
    "RunStarted",
    "StopRequested",
    "TextDelta",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReady:
    """The last event of a stream: what ``invoke`` would have returned."""

    result: FunctionCallingStepwisePlannerResult


PlannerEvent: TypeAlias = TextDelta | Fact | ResultReady
"""Whatever ``invoke_stream`` yields."""
