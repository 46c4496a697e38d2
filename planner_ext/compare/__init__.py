"""The options of the ADR "Automatic tool calling controls" side by side: as written, and as corrected here.

    comparison = await run_comparison(max_iterations=5)

Offline, in seconds: a scripted model behind real HTTP, and everything counted
independently of the options.
"""

from planner_ext.compare.backend import Live
from planner_ext.compare.report import (
    Comparison,
    OptionInfo,
    Run,
    ScriptInfo,
    ShownCall,
    ShownMessage,
    ShownResult,
    Violation,
    find_violation,
)
from planner_ext.compare.runner import Progress, run_comparison
from planner_ext.compare.scenarios import Scenario, scenario
from planner_ext.compare.trial import Ability, Option, Strategy, Trial, option

__all__ = [
    "Ability",
    "Comparison",
    "Live",
    "Option",
    "OptionInfo",
    "Progress",
    "Run",
    "Scenario",
    "ScriptInfo",
    "ShownCall",
    "ShownMessage",
    "ShownResult",
    "Strategy",
    "Trial",
    "Violation",
    "find_violation",
    "option",
    "run_comparison",
    "scenario",
]
