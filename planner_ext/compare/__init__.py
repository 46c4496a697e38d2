"""The options of the ADR "Automatic tool calling controls" side by side: as written, and as corrected here.

    comparison = await run_comparison(max_iterations=5)

Offline, in seconds: a scripted model behind real HTTP, and everything counted independently of the options.
"""

from planner_ext.compare.report import (
    Comparison,
    OptionInfo,
    Run,
    ScriptInfo,
    ShownCall,
    ShownMessage,
    ShownResult,
    Violation,
    find_violations,
)
from planner_ext.compare.trial import Live, Progress, run_comparison

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
