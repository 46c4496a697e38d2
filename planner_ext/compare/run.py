"""``run_comparison``: every option in every situation, one run after the other, counted by others than the option."""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from itertools import product
from typing import Any, TypeAlias

from openai import AsyncOpenAI

from planner_ext.compare.comparison import Comparison, Run, ScriptInfo
from planner_ext.compare.judge import find_violations
from planner_ext.compare.options import OPTIONS
from planner_ext.compare.scripts import SCRIPTS, Script
from planner_ext.compare.stage import Option
from planner_ext.compare.timeline import shown
from planner_ext.compare.venue import Live, LiveVenue, ScriptedVenue, Venue
from planner_ext.sk.budget import Budget
from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.testing import say

__all__ = ["Progress", "run_comparison"]

Progress: TypeAlias = Callable[[int, int, str], None]
"""Told before each run how many are done, how many there are, and which one it is."""


async def run_comparison(
    *,
    max_iterations: int = 5,
    options: Sequence[str] = (),
    scripts: Sequence[str] = (),
    live: Live | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the options.

    Args:
        max_iterations: Round trips that each run is allowed, 1 or more.
        options: Keys of the options to compare; none are all.
        scripts: Keys of the situations; none are all.
        live: A real model to ask; None scripts one, behind real HTTP on this machine.
        progress: Told of each run before it begins.

    Raises:
        PlannerInvalidConfigurationError: If there is no such option or script, the limit means nothing, the kernel has
            no service, or a real model does not answer the first request.
    """
    Budget(max_iterations=max_iterations)
    chosen, situations = _chosen("option", options, OPTIONS), _situations(scripts, live)
    runs: list[Run] = []
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        venue = await _venue(live, stack)
        for script, option in product(situations, chosen):
            if progress is not None:
                progress(len(runs), len(situations) * len(chosen), f"{script.info.name}: {option.info.name}")
            runs.append(await _run(venue, option, script, max_iterations))
            if live is not None:
                _check_that_somebody_answers(venue, runs[0])
    return Comparison(
        max_iterations=max_iterations,
        endpoint=venue.name,
        live=live is not None,
        versions=tuple(_versions().items()),
        options=tuple(option.info for option in chosen),
        scripts=tuple(script.info for script in situations),
        runs=tuple(runs),
        wall_seconds=time.perf_counter() - began,
    )


async def _venue(live: Live | None, stack: AsyncExitStack) -> Venue:
    if live is not None:
        return LiveVenue(live)
    client = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)
    return ScriptedVenue(await stack.enter_async_context(client))


async def _run(venue: Venue, option: Option, script: Script, max_iterations: int) -> Run:
    async with venue.open(script, max_iterations) as scene:
        began = time.perf_counter()
        outcome = await option.play(scene.stage)
        seconds = time.perf_counter() - began
        messages = shown(outcome.history.messages)
        return Run(
            option=option.info.key,
            script=script.info.key,
            budget=max_iterations,
            trips=scene.trips.trips,
            charged=outcome.charged,
            tools_run=scene.tools.run,
            tools_past_budget=scene.tools.past_budget,
            tokens_summed=scene.trips.tokens(),
            tokens_past_budget=scene.trips.tokens(after=max_iterations),
            tokens_told=outcome.tokens,
            status=outcome.status,
            answer=outcome.answer,
            error=outcome.error,
            refused=tuple(scene.refused()),
            violations=find_violations(messages),
            wall_seconds=seconds,
            messages=messages,
        )


def _check_that_somebody_answers(venue: Venue, first: Run) -> None:
    """End a comparison that would only find the same fault in every run."""
    if first.status == "failed" and first.trips == 0:
        raise PlannerInvalidConfigurationError(f"{venue.name} did not answer the first request: {first.error}")


def _situations(scripts: Sequence[str], live: Live | None) -> tuple[Script, ...]:
    if live is None or live.goal is None:
        return _chosen("script", scripts, SCRIPTS)
    if scripts:
        raise PlannerInvalidConfigurationError(f"A goal takes the place of the scripts; got both, {scripts[0]!r}.")
    return (_own_goal(live.goal),)


def _chosen(kind: str, keys: Sequence[str], known: Mapping[str, Any]) -> tuple[Any, ...]:
    for key in keys:
        if key not in known:
            raise PlannerInvalidConfigurationError(f"There is no {kind} {key!r}; there are {', '.join(known)}.")
    return tuple(item for key, item in known.items() if not keys or key in keys)


def _own_goal(goal: str) -> Script:
    """Make a situation of a goal that a real model is asked; nothing of it is scripted."""
    about = "A real model, and functions that are really run."
    info = ScriptInfo(key="goal", name="your goal", short="your\ngoal", about=about, goal=goal)
    return Script(info=info, model=lambda _: say(""))


def _versions() -> dict[str, str]:
    measured = {name: version(name) for name in ("semantic-kernel", "openai")}
    return {**measured, "python": platform.python_version()}
