"""The options of the ADR "Automatic tool calling controls" side by side: as written, and as corrected here.

    comparison = await run_comparison(max_iterations=5)

Offline, in seconds: a scripted model behind real HTTP, and everything counted by somebody other than the option.
"""

from planner_ext.compare.comparison import (
    Comparison,
    OptionInfo,
    Run,
    ScriptInfo,
    ShownCall,
    ShownMessage,
    ShownResult,
    Violation,
)
from planner_ext.compare.judge import find_violations
from planner_ext.compare.run import Progress, run_comparison
from planner_ext.compare.venue import Live

__all__ = [
    "Comparison",
    "Live",
    "OptionInfo",
    "Progress",
    "Run",
    "ScriptInfo",
    "ShownCall",
    "ShownMessage",
    "ShownResult",
    "Violation",
    "find_violations",
    "run_comparison",
]
