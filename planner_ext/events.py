"""What a streamed run tells: text as it comes, the facts of the run as they happen, and the result at the end."""

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
from planner_ext.engine.ports import RunInfo, TextDelta
from planner_ext.planner.result import PlannerEvent, ResultReady

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
