"""What happened in a run, as values that any window can draw, and as a page.

timeline = timeline_of(result.facts)
Path("run.html").write_text(page_of([timeline]), "utf-8")
"""

from planner_ext.timeline.model import (
    CallAttempt,
    CallOutcome,
    EventKind,
    FailedRequest,
    Gap,
    ModelRequest,
    Spending,
    Timeline,
    TimelineCall,
    TimelineEvent,
    TimelineIteration,
    TimelineMessage,
)
from planner_ext.timeline.reader import timeline_of

__all__ = [
    "CallAttempt",
    "CallOutcome",
    "EventKind",
    "FailedRequest",
    "Gap",
    "ModelRequest",
    "Spending",
    "Timeline",
    "TimelineCall",
    "TimelineEvent",
    "TimelineIteration",
    "TimelineMessage",
    "timeline_of",
]
