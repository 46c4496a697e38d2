"""The legal transitions: in which phase which fact may happen, and which phases it may lead to.

The table is the law: `planner_ext.core.fold.apply` refuses everything else, and the diagram in the ADR is printed
from it (`as_mermaid`).
"""

from planner_ext.core.state import Phase

__all__ = ["TRANSITIONS", "as_mermaid"]

_P = Phase

TRANSITIONS: dict[tuple[Phase, str], tuple[Phase, ...]] = {
    (_P.NEW, "RunStarted"): (_P.PLANNING, _P.ASKING),
    (_P.PLANNING, "Planned"): (_P.ASKING,),
    (_P.PLANNING, "ModelReplied"): (_P.REVIEWING, _P.ANSWERING),
    (_P.PLANNING, "StopRequested"): (_P.PLANNING,),
    (_P.PLANNING, "Ended"): (_P.ENDED,),
    (_P.ASKING, "ModelReplied"): (_P.REVIEWING, _P.ANSWERING),
    (_P.ASKING, "AnswerChecked"): (_P.ASKING,),
    (_P.ASKING, "MessageAdded"): (_P.ASKING,),
    (_P.ASKING, "StopRequested"): (_P.ASKING,),
    (_P.ASKING, "Ended"): (_P.ENDED,),
    (_P.ANSWERING, "MessageAdded"): (_P.ASKING,),
    (_P.ANSWERING, "AnswerChecked"): (_P.ANSWERING,),
    (_P.ANSWERING, "Clarified"): (_P.ANSWERING, _P.ASKING),
    (_P.ANSWERING, "Paused"): (_P.PAUSED,),
    (_P.ANSWERING, "StopRequested"): (_P.ANSWERING,),
    (_P.ANSWERING, "Ended"): (_P.ENDED,),
    (_P.REVIEWING, "CallDecided"): (_P.REVIEWING, _P.CALLING, _P.COMPLETING),
    (_P.REVIEWING, "CallsWithheld"): (_P.COMPLETING,),
    (_P.REVIEWING, "StopRequested"): (_P.REVIEWING,),
    (_P.CALLING, "CallDecided"): (_P.CALLING, _P.COMPLETING),
    (_P.CALLING, "CallsWithheld"): (_P.CALLING, _P.COMPLETING),
    (_P.CALLING, "CallStarted"): (_P.CALLING,),
    (_P.CALLING, "CallFinished"): (_P.CALLING, _P.COMPLETING),
    (_P.CALLING, "Clarified"): (_P.CALLING, _P.COMPLETING),
    (_P.CALLING, "StopRequested"): (_P.CALLING,),
    (_P.CALLING, "Paused"): (_P.PAUSED,),
    (_P.CALLING, "Ended"): (_P.ENDED,),
    (_P.COMPLETING, "IterationCompleted"): (_P.ASKING,),
    (_P.COMPLETING, "StopRequested"): (_P.COMPLETING,),
    (_P.PAUSED, "StopRequested"): (_P.CALLING, _P.ANSWERING),
    (_P.PAUSED, "Resumed"): (_P.CALLING, _P.ANSWERING),
    (_P.PLANNING, "Resumed"): (_P.PLANNING,),
    (_P.ASKING, "Resumed"): (_P.ASKING,),
    (_P.ANSWERING, "Resumed"): (_P.ANSWERING,),
    (_P.COMPLETING, "Resumed"): (_P.COMPLETING,),
    (_P.ENDED, "Resumed"): (_P.PLANNING, _P.ASKING, _P.REVIEWING),
}


def as_mermaid() -> str:
    """Draw the table as a Mermaid state diagram, one arrow for each pair of phases."""
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for (phase, fact), targets in TRANSITIONS.items():
        for target in targets:
            if fact != "StopRequested" or target is not phase:
                arrows.setdefault((phase, target), []).append(fact)
    lines = [f"    {source} --> {target}: {', '.join(facts)}" for (source, target), facts in arrows.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> new", *lines, "    ended --> [*]"])
