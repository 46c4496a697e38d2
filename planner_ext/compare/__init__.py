"""Ways to limit a tool-calling loop side by side: as Semantic Kernel's ADR writes them, and as corrected here.

    comparison = await run_comparison(max_iterations=5)

It takes seconds and no network: the model is a script behind real HTTP, and what each
way spends is counted outside of it.
"""

from planner_ext.compare.backend import Live
from planner_ext.compare.report import (
    Cell,
    Comparison,
    Cost,
    Finding,
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
    "Cell",
    "Comparison",
    "Cost",
    "Finding",
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
