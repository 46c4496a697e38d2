"""The events of a streamed run: text as it arrives, the facts of the run, and the result at the end.

Facts are in the past tense and never change. Fields that they share:

    at            when it happened, in seconds since the epoch
    seconds       active time since the last fact that has this field
    iteration     the 0-based round trip of the loop; -1 is the plan request
    index         the call's index in its batch, from 0
    call_id       the call's id, unique in its batch
    function      fully qualified name
    type          the class's name, which tells facts apart in JSON
"""

from planner_ext.core.facts import (
    AnswerChecked,
    BudgetChanged,
    CallDecided,
    CallFinished,
    CallLeft,
    CallStarted,
    CallsWithheld,
    Clarified,
    Ended,
    Fact,
    FurtherQuestion,
    Guards,
    HappenedInside,
    IterationCompleted,
    MessageAdded,
    ModelAsked,
    ModelReplied,
    NestedCallStarted,
    Panel,
    Paused,
    Planned,
    RequestFailed,
    Resumed,
    Rules,
    RunStarted,
    SharedBudgetsChecked,
    StopRequested,
)
from planner_ext.core.limits import Budget as Limits
from planner_ext.core.values import Cut, RequestedCall, Status
from planner_ext.engine.ports import Observer, ResultReady, RunInfo, TextDelta
from planner_ext.planner.run import PlannerEvent

__all__ = [
    "AnswerChecked",
    "BudgetChanged",
    "CallDecided",
    "CallFinished",
    "CallLeft",
    "CallStarted",
    "CallsWithheld",
    "Clarified",
    "Cut",
    "Ended",
    "Fact",
    "FurtherQuestion",
    "Guards",
    "HappenedInside",
    "IterationCompleted",
    "Limits",
    "MessageAdded",
    "ModelAsked",
    "ModelReplied",
    "NestedCallStarted",
    "Observer",
    "Panel",
    "Paused",
    "Planned",
    "PlannerEvent",
    "RequestFailed",
    "RequestedCall",
    "ResultReady",
    "Resumed",
    "Rules",
    "RunInfo",
    "RunStarted",
    "SharedBudgetsChecked",
    "Status",
    "StopRequested",
    "TextDelta",
]
