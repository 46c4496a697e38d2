"""One situation from its seed to what the oracle says of it."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from entitlement.doors import Way, way_into
from entitlement.oracle import Violation, not_run, violations
from entitlement.record import Answer, Record, Spoiled, Started
from entitlement.scenarios import Scenario, smaller
from entitlement.world import World
from planner_ext.errors import DecisionRefusedError, PlannerExtError

__all__ = ["Trial", "shrunk", "tried"]


@dataclass
class Trial:
    """The outcome of a situation."""

    scenario: Scenario
    record: Record
    statuses: list[str] = field(default_factory=list[str])
    refused: int = 0
    found: list[Violation] = field(default_factory=list[Violation])

    @property
    def starts(self) -> int:
        return sum(isinstance(event, Started) for event in self.record.events)

    @property
    def answers(self) -> int:
        return sum(isinstance(event, Answer) for event in self.record.events)


async def tried(scenario: Scenario) -> Trial:
    """Let a situation happen, and judge it."""
    world = World(scenario)
    trial = Trial(scenario, world.record)
    failed: PlannerExtError | None = None
    try:
        async with way_into(world) as way:
            for prompt in scenario.prompts:
                trial.statuses.append(
                    await _seen_through(way, world, prompt.name, trial)
                )
                if trial.statuses[-1] != "answered" or _left_behind(
                    scenario, world.record
                ):
                    break
    except PlannerExtError as error:
        failed = error
        trial.statuses.append(type(error).__name__)
    except Exception as error:
        error.add_note(
            f"In the situation of seed {scenario.seed}, door {scenario.door}."
        )
        raise
    spoiled = any(isinstance(event, Spoiled) for event in world.record.events)
    trial.found = violations(world.record)
    if failed is not None and not spoiled:
        trial.found.append(
            Violation(
                "ended in an error", scenario.door, f"{type(failed).__name__}: {failed}"
            )
        )
    refuses = (
        scenario.door == "filter"
        and scenario.stock == "function"
        and not scenario.approver
    )  # nothing waits there
    if (
        scenario.honest
        and scenario.hook == "by roles"
        and not trial.found
        and not spoiled
        and not refuses
    ):
        trial.found += _not_alive(trial)
    return trial


def _left_behind(scenario: Scenario, record: Record) -> bool:
    """Say whether a session does not know the outcome of its prompt, as a handler resumed it."""
    resumed = any(
        isinstance(event, Answer) and not event.inline for event in record.events
    )
    return scenario.door == "session" and resumed


async def _seen_through(way: Way, world: World, run: str, trial: Trial) -> str:
    """Ask, and have people decide until nothing waits, or a question stays open."""
    scenario = world.scenario
    outcome = await way.ask(run)
    late = world.scenario.late and outcome.status == "paused" and await way.say_more()
    in_vain, rounds = 0, 0
    while outcome.status == "paused" and in_vain < 4 and rounds < 40:
        rounds += 1  # in a store a decision may be refused later, by the worker
        decided = {
            one.key: world.people.decide(
                world.record.call_of(one.call_id),
                one.arguments,
                one.roles,
                hook="none"
                if scenario.bare and scenario.door not in ("kept", "inbox")
                else scenario.hook,
                void="late" if late else "",
                others=[
                    other.fingerprint for other in outcome.waiting if other is not one
                ],
            )
            for one in world.people.chosen(list(outcome.waiting))
        }
        decisions = {key: decision for key, (_, decision) in decided.items()}
        for answer, _ in decided.values():
            world.record.add(answer)
        try:
            outcome = await way.decide(decisions)
            refused = outcome.refused
            if world.people.insist():
                with suppress(DecisionRefusedError):
                    await way.decide_again(decisions)
        except DecisionRefusedError:
            refused = decided.keys()
        in_vain = in_vain + 1 if refused else 0
        trial.refused += len(refused)
        for key in refused:
            world.record.take_back(decided[key][0])
        if late:
            return "late"
    return outcome.status


def _not_alive(trial: Trial) -> Iterator[Violation]:
    """Find what should have ended, or have run: where each person who may decide approves all that is asked."""
    if trial.statuses[-1] != "answered":
        yield Violation("does not end", trial.scenario.door, trial.statuses[-1])
        return
    if len(trial.statuses) == len(trial.scenario.prompts):
        yield from not_run(trial.record)


async def shrunk(trial: Trial, *, most: int = 400) -> Trial:
    """Look for the smallest situation that breaks the same promise."""
    promise, left = trial.found[0].promise, most
    found = True
    while found and left > 0:
        found = False
        for scenario in smaller(trial.scenario):
            left -= 1
            less = await tried(scenario)
            if any(one.promise == promise for one in less.found):
                trial, found = less, True
                break
    return trial
