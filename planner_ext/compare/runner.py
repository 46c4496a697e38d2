"""``run_comparison``: runs every option in every situation, and judges from outside."""

import asyncio
import json
import os
import platform
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeAlias, TypeVar

from httpx import AsyncClient
from openai import AsyncOpenAI
from semantic_kernel.contents import AuthorRole, ChatHistory
from semantic_kernel.functions import KernelArguments, KernelPlugin, kernel_function

from planner_ext.compare.backend import Backend, Live, Place
from planner_ext.compare.desk import Desk, Event, HiddenKernel, Observed
from planner_ext.compare.process import Given, Outcome, run_program
from planner_ext.compare.report import (
    Comparison,
    Run,
    ScriptInfo,
    Violation,
    find_violation,
    shown_messages,
)
from planner_ext.compare.scenarios import SCRIPTS, Scenario
from planner_ext.compare.strategies import OPTIONS
from planner_ext.compare.trial import Option, Strategy, Trial
from planner_ext.core.errors import counted
from planner_ext.core.limits import Budget
from planner_ext.sk.chat.transport import select_service
from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.sk.messages import read_usage
from planner_ext.testing import say

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called before each run with the runs done, all runs, and the next one's name."""


async def run_comparison(
    *,
    max_iterations: int = 5,
    options: Sequence[str | Option] = (),
    scripts: Sequence[str | Scenario] = (),
    live: Live | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the options.

    Args:
        max_iterations: Round trips allowed per run, 1 or more.
        options: Keys; without a key, all. Options of your own run beside them.
        scripts: Keys of situations; without a key, all. Your own come after them. With
            a real model, only those that need no more than a budget of round trips.
        live: A real model; None uses a scripted one, behind real HTTP on this machine.
        progress: Called before each run.

    Raises:
        PlannerInvalidConfigurationError: If an option or script is unknown,
            ``max_iterations`` is less than 1, the kernel has no service, or a real
            model does not answer the first request.
    """
    Budget(max_iterations=max_iterations)
    chosen = _chosen("option", options, OPTIONS, Option)
    scenarios = _scenarios(scripts, live)
    began = time.perf_counter()
    client = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)
    with Desk() as desk:
        async with client, AsyncClient() as http:
            backend = Backend(live, client, desk, http)
            runs = await _all_runs(
                backend,
                scenarios,
                chosen,
                max_iterations,
                progress or (lambda _done, _total, _name: None),
            )
    packages = [(name, version(name)) for name in ("semantic-kernel", "openai")]
    return Comparison(
        max_iterations=max_iterations,
        endpoint=backend.name,
        live=live is not None,
        versions=(*packages, ("python", platform.python_version())),
        options=tuple(option.info for option in chosen),
        scripts=tuple(scenario.info for scenario in scenarios),
        runs=tuple(runs),
        wall_seconds=time.perf_counter() - began,
    )


def _scenarios(
    scripts: Sequence[str | Scenario], live: Live | None
) -> Sequence[Scenario]:
    if live is None:
        return _chosen("script", scripts, SCRIPTS, Scenario)
    if live.goal is None:
        simple = {
            key: each
            for key, each in SCRIPTS.items()
            if each.needs is None and not each.stops_at
        }
        return _chosen("script", scripts, simple, Scenario)
    if scripts:
        raise PlannerInvalidConfigurationError(
            f"A goal takes the place of the scripts; got both, {scripts[0]!r}."
        )
    about = "A real model, and functions that are really run."
    info = ScriptInfo(
        key="goal", name="your goal", short="your\ngoal", about=about, goal=live.goal
    )
    return (Scenario(info=info, model=lambda _: say("")),)


_Known = TypeVar("_Known", Option, Scenario)


def _chosen(
    kind: str,
    wanted: Sequence[str | _Known],
    known: Mapping[str, _Known],
    own: type[_Known],
) -> Sequence[_Known]:
    keys = [each for each in wanted if isinstance(each, str)]
    for key in keys:
        if key not in known:
            raise PlannerInvalidConfigurationError(
                f"There is no {kind} {key!r}; there are {', '.join(known)}."
            )
    built_in = tuple(item for key, item in known.items() if not keys or key in keys)
    added = [each for each in wanted if isinstance(each, own)]
    for key, times in Counter(each.info.key for each in added).items():
        if key in known or times > 1:
            raise PlannerInvalidConfigurationError(
                f"There is another {kind} {key!r}; give your own another name."
            )
    return (*built_in, *added)


async def _all_runs(
    backend: Backend,
    scenarios: Sequence[Scenario],
    options: Sequence[Option],
    budget: int,
    progress: Progress,
) -> list[Run]:
    """Make all runs, in order; two of those in other processes run beside the others."""
    slots = asyncio.Semaphore(2)

    async def run_beside(scenario: Scenario, option: Option) -> Run:
        async with slots:
            return await _run(backend, scenario, option, budget)

    pairs = list(product(scenarios, options))
    beside = {
        place: asyncio.ensure_future(run_beside(scenario, option))
        for place, (scenario, option) in enumerate(pairs)
        if scenario.lives > 1 or option.strategy is None
    }
    runs: list[Run] = []
    try:
        for place, (scenario, option) in enumerate(pairs):
            progress(place, len(pairs), f"{scenario.info.name}: {option.info.name}")
            runs.append(
                await (beside.get(place) or _run(backend, scenario, option, budget))
            )
            if (
                backend.live
                and (first := runs[0]).status == "failed"
                and first.trips == 0
            ):
                # Every later run would meet the same fault.
                problem = (
                    f"{backend.name} did not answer the first request: {first.error}"
                )
                raise PlannerInvalidConfigurationError(problem)
    finally:
        for task in beside.values():
            task.cancel()
        await asyncio.gather(*beside.values(), return_exceptions=True)
    return runs


async def _run(
    backend: Backend, scenario: Scenario, option: Option, budget: int
) -> Run:
    if scenario.needs is not None and scenario.needs not in option.info.offers:
        nothing = Outcome(status="not offered")
        return _judged(
            option, scenario, budget=budget, observed=Observed(), outcome=nothing
        )
    observed = Observed(
        stops_at=scenario.stops_at,
        kills_at=scenario.kills_at,
        kills_before=scenario.kills_before,
    )
    with backend.place_for(scenario, observed) as place:
        began = time.monotonic()
        if option.strategy is None or scenario.lives > 1:
            outcome = await _elsewhere(option, scenario, place, observed, budget)
            if observed.events:  # the start of a process is not the loop's time
                began = observed.events[0].at
        else:
            outcome = await _here(option.strategy, scenario, place, observed, budget)
        seconds = (observed.ended_at or time.monotonic()) - began
        if not backend.live and not _was_said(outcome.answer, observed):
            outcome = replace(outcome, answer="")
    return _judged(
        option,
        scenario,
        budget=budget,
        observed=observed,
        outcome=outcome,
        seconds=seconds,
    )


def _judged(
    option: Option,
    scenario: Scenario,
    *,
    budget: int,
    observed: Observed,
    outcome: Outcome,
    seconds: float = 0.0,
) -> Run:
    violation = (
        find_violation(outcome.messages)
        if option.strategy
        else _not_continued(observed, outcome)
    )
    tokens = [event.tokens for event in observed.events if event.tokens is not None]
    before = list(_requests_before(observed.events))
    return Run(
        option=option.info.key,
        script=scenario.info.key,
        budget=budget,
        trips=len(tokens),
        charged=outcome.charged,
        tools_run=len(before),
        tools_past_budget=sum(requests >= budget for requests in before),
        tokens_summed=sum(tokens),
        tokens_past_budget=sum(tokens[budget:]),
        tokens_told=outcome.tokens,
        status=outcome.status,
        answer=outcome.answer,
        error=outcome.error,
        refused=tuple(observed.refused),
        violation=violation,
        breaches=()
        if outcome.status == "not offered"
        else tuple(_breaches(scenario, observed, outcome, seconds)),
        wall_seconds=seconds,
        messages=outcome.messages,
    )


def _was_said(answer: str, observed: Observed) -> bool:
    """Whether an answer is the model's, and not a text of the loop."""
    said = [text for text in observed.said if text]
    return any(
        text in answer or json.dumps(answer)[1:-1] in text or answer in text
        for text in said
    )


def _not_continued(observed: Observed, outcome: Outcome) -> Violation | None:
    """Return a violation if another framework's history cannot be continued."""
    if not observed.ended_at or observed.continued:
        return None
    place = max(len(outcome.messages) - 1, 0)
    return Violation(
        place=place,
        text=f"messages[{place}]: the history that is left cannot be continued",
    )


def _requests_before(events: Sequence[Event]) -> Iterator[int]:
    """Yield, for each function started, how many requests had been answered before."""
    requests = 0
    for event in events:
        if event.tokens is None:
            yield requests
        else:
            requests += 1


async def _here(
    strategy: Strategy,
    scenario: Scenario,
    place: Place,
    observed: Observed,
    budget: int,
) -> Outcome:
    trial = _trial(place, scenario, budget)
    if scenario.delegates:
        trial.kernel.add_plugin(
            KernelPlugin.from_object("helper", _Helper(trial, strategy))
        )
    return await run_trial(trial, strategy, observed)


async def run_trial(
    trial: Trial, strategy: Strategy, observed: Observed | None = None
) -> Outcome:
    """Run a strategy to its end; any fault is its outcome."""
    task = asyncio.ensure_future(strategy(trial))
    error = ""
    if observed is not None:
        loop = asyncio.get_running_loop()
        observed.stop = lambda: loop.call_soon_threadsafe(task.cancel)
    try:
        await asyncio.wait((task,))
    finally:  # when the comparison is interrupted
        task.cancel()
        await asyncio.wait((task,))
    if task.cancelled():
        trial.status = "cancelled"
        trial.answer = ""
    elif (raised := task.exception()) is not None:
        trial.status = "failed"
        trial.answer = ""
        error = _cause(raised)
    replies = [
        message
        for message in trial.history.messages
        if message.role == AuthorRole.ASSISTANT
    ]
    usage = trial.usage or read_usage(
        replies[-1].metadata.get("usage") if replies else None
    )
    return Outcome(
        status=trial.status,
        answer=trial.answer,
        charged=trial.charged,
        tokens=usage.total_tokens or None,
        messages=shown_messages(trial.history.messages),
        error=error,
    )


def _cause(error: BaseException) -> str:
    """Describe the client's own error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _trial(place: Place, scenario: Scenario, budget: int) -> Trial:
    service = place.service
    selected, settings = select_service(
        place.kernel, service.service_id, KernelArguments()
    )
    if selected is not service:
        raise PlannerInvalidConfigurationError(
            f"The kernel's own service selector takes {selected.service_id!r} whatever it is asked for; expected "
            f"{service.service_id!r}. Compare with a kernel whose selector takes the service that it is asked for."
        )
    return Trial(
        kernel=place.kernel,
        service=service,
        settings=service.get_prompt_execution_settings_from_settings(settings),
        goal=scenario.info.goal,
        budget=Budget(max_iterations=budget, **scenario.limits),
        streaming=scenario.streaming,
        reports=scenario.reports,
        vetoed=scenario.vetoed,
        gated=scenario.gated,
    )


class _Helper:
    """Runs a goal inside a run, with the same strategy and kernel."""

    def __init__(self, trial: Trial, strategy: Strategy) -> None:
        self._trial = trial
        self._strategy = strategy

    @kernel_function(description="Hand a goal to a helper, who reaches it and reports.")
    async def reach_goal(
        self, goal: Annotated[str, "The goal"], kernel: HiddenKernel
    ) -> str:
        inner = replace(self._trial, kernel=kernel, goal=goal, history=ChatHistory())
        await self._strategy(inner)
        return inner.answer


async def _elsewhere(
    option: Option, scenario: Scenario, place: Place, observed: Observed, budget: int
) -> Outcome:
    outcome = Outcome(status="failed", error="it did not start")

    def may_be_killed(pid: int) -> None:
        observed.kill = lambda: os.kill(pid, signal.SIGKILL)

    with TemporaryDirectory() as folder:
        given = Given(
            goal=scenario.info.goal,
            model_url=place.model_url,
            desk_url=place.desk_url,
            functions=scenario.functions,
            limits={"max_iterations": budget, **scenario.limits},
            streaming=scenario.streaming,
            vetoed=scenario.vetoed,
            gated=scenario.gated,
            stops_at=scenario.stops_at,
            delegates=scenario.delegates,
            is_made=not scenario.kills_before,
            folder=folder if scenario.lives > 1 else None,
        )
        for observed.life in range(1, scenario.lives + 1):
            outcome = await run_program(
                option, replace(given, life=observed.life), began=may_be_killed
            )
            observed.is_over.set()
            if outcome.status in ("failed", "not offered") and not (
                scenario.kills_at and observed.life == 1
            ):
                break
    return outcome


def _breaches(
    scenario: Scenario, observed: Observed, outcome: Outcome, seconds: float
) -> Iterator[str]:
    """Describe what a situation entitles a user to and the run did not keep."""
    starts = [event for event in observed.events if event.tokens is None]
    # Where tokens are not reported they are estimated, and an estimate may be off by a request.
    yield from _exceeded(
        scenario.limits,
        observed.events,
        starts,
        seconds,
        most_late=1 if scenario.reports else 2,
    )
    if scenario.vetoed and any(event.function == scenario.vetoed for event in starts):
        yield f"{scenario.vetoed} started"
    if scenario.gated and any(
        event.function == scenario.gated and event.life == 1 for event in starts
    ):
        yield f"{scenario.gated} started before a person agreed"
    if scenario.lives > 1:
        times_of = Counter(event.function for event in starts)
        awaited = scenario.gated or scenario.kills_at
        for function in sorted({*times_of, awaited} - {"request"}):
            times = times_of[function]
            if times != 1:
                yield f"{function} started {counted(times, 'time')}"
    if scenario.stops_at:
        yield from _left_over(scenario.stops_at, observed, outcome)
    if scenario.cut and outcome.status == "answered":
        yield "a cut reply is given as the answer"


def _left_over(stopped_at: str, observed: Observed, outcome: Outcome) -> Iterator[str]:
    first = next(
        (
            place
            for place, event in enumerate(observed.events)
            if event.function == stopped_at
        ),
        0,
    )
    later = observed.events[first + 1 :]
    if later:
        yield f"{counted(len(later), 'step')} after the cancellation"
    if not any(message.role == "assistant" for message in outcome.messages):
        yield "nothing is left of the run"


def _exceeded(
    limits: Mapping[str, Any],
    events: Sequence[Event],
    starts: Sequence[Event],
    seconds: float,
    *,
    most_late: int,
) -> Iterator[str]:
    calls = limits.get("max_tool_calls")
    tokens = limits.get("max_total_tokens")
    allowed = limits.get("max_active_seconds")
    repeats = limits.get("max_repeated_calls")
    if calls is not None and len(starts) > calls:
        yield f"{len(starts)} functions started where {calls} were allowed"
    if tokens is not None:
        spent = 0
        late = 0
        answered = [event.tokens for event in events if event.tokens is not None]
        for used in answered:
            late += spent >= tokens
            spent += used
        if late > most_late:
            yield f"{late} requests after the {tokens} tokens were used up"
    if allowed is not None and seconds > allowed + 1:
        yield f"{seconds:.1f} seconds where {allowed} were allowed"
    if repeats is not None:
        times = Counter((event.function, event.arguments) for event in starts)
        most = max(times.values(), default=0)
        if most > repeats:
            yield f"the same call started {most} times where {repeats} were allowed"
