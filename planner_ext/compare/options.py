"""The options compared, in the order in which they are shown: as written, what there was before, and corrected."""

from planner_ext.compare.before import removed_planner, stock_loop
from planner_ext.compare.comparison import OptionInfo
from planner_ext.compare.corrected import corrected
from planner_ext.compare.literal import option_1_as_written, option_2_as_written, option_3_as_written
from planner_ext.compare.stage import Option, Play

__all__ = ["CONTRACT", "OPTIONS"]

CONTRACT = "iterations_metadata"
"""The option that our decision makes the budget contract."""


def _option(key: str, name: str, short: str, play: Play, about: str, *, corrected: bool = False) -> Option:
    info = OptionInfo(key=key, name=name, short=short, about=about, corrected=corrected)
    return Option(info=info, play=play)


_ALL = (
    _option(
        "option-1",
        "option 1, as written",
        "1 as written",
        option_1_as_written,
        "One tool round for each chat request, and a closing reply. A step is one such request, and charged as one.",
    ),
    _option(
        "option-2",
        "option 2, as written",
        "2 as written",
        option_2_as_written,
        "As many tool rounds for a chat request as iterations remain; the response's metadata tell how many were made.",
    ),
    _option(
        "option-3",
        "option 3, as written",
        "3 as written",
        option_3_as_written,
        "A callback lets calls proceed while iterations remain. When it says no, the calls are returned as they are.",
    ),
    _option(
        "stock-loop",
        "stock loop",
        "stock loop",
        stock_loop,
        "Semantic Kernel's own loop with its default of 5 tool rounds, under a planner that cannot count inside it.",
    ),
    _option(
        "removed-planner",
        "removed planner",
        "removed planner",
        removed_planner,
        "The planner that Semantic Kernel removed: one request for each iteration, answers by a function call only.",
    ),
    _option(
        "use_attempts",
        "option 1, corrected",
        "1 corrected",
        corrected("use_attempts"),
        "This package, control use_attempts: one tool round for each step. Every request is charged, and the last one "
        "reserved for the answer.",
        corrected=True,
    ),
    _option(
        CONTRACT,
        "option 2, corrected",
        "2 corrected",
        corrected("iterations_metadata"),
        "This package's default, control iterations_metadata: tool rounds follow each other freely. Every request is "
        "charged, and the last one reserved for the answer.",
        corrected=True,
    ),
    _option(
        "pre_invoke",
        "option 3, corrected",
        "3 corrected",
        corrected("pre_invoke"),
        "This package, control pre_invoke: the same budget, and the callback on top of it. A refused call is answered.",
        corrected=True,
    ),
)

OPTIONS: dict[str, Option] = {option.info.key: option for option in _ALL}
"""By key."""
