"""The timeline of a run: its facts as values to draw, and as an HTML page.

    timeline = timeline_of(result.facts)
    Path("run.html").write_text(page_of([timeline]), "utf-8")

Two timelines on one page are a run and its fork.
"""

from planner_ext.engine.timeline import (
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
    timeline_of,
)
from planner_ext.timeline.page import fragment_of, page_of

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
    "fragment_of",
    "page_of",
    "timeline_of",
]
