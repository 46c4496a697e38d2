"""The events of a streamed run: text as it arrives, the facts of the run, and the result at the end."""

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
