"""The table of legal transitions: nothing dead in it, and the diagram shows it whole."""

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

from planner_ext.core.facts import (
    CallLeft,
    Fact,
    HappenedInside,
    NestedCallStarted,
    Resumed,
)
from planner_ext.core.limits import Budget
from planner_ext.core.state import TRANSITIONS, Phase, name_inside
from support.core import (
    RESUMED,
    Play,
    began,
    budget_changed,
    calls,
    clarified,
    decided,
    model_asked,
    request_failed,
    run_started,
    says,
    shared_budgets_checked,
    stop,
)

LISTED = {
    (phase, fact, target)
    for (phase, fact), targets in TRANSITIONS.items()
    for target in targets
}

ANYWHERE = (
    "StopRequested",
    "BudgetChanged",
    "SharedBudgetsChecked",
    "ModelAsked",
    "RequestFailed",
)
"""The facts that change no phase while a run is driven; the diagram does without their arrows."""


def as_mermaid() -> str:
    """Draw the table as a Mermaid state diagram, one arrow for each pair of phases."""
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for (phase, fact), targets in TRANSITIONS.items():
        for target in targets:
            if fact not in ANYWHERE or target is not phase:
                arrows.setdefault((phase, target), []).append(fact)
    lines = [
        f"    {source} --> {target}: {', '.join(facts)}"
        for (source, target), facts in arrows.items()
    ]
    return "\n".join(
        ["stateDiagram-v2", "    [*] --> new", *lines, "    ended --> [*]"]
    )


def played() -> set[tuple[Phase, str, Phase]]:
    """Play runs that together go everywhere; collect the transitions they took."""
    fill = Budget(max_tool_calls=1, batch_over_limit="fill_remaining")
    back = Budget(max_tool_calls=0, on_limit="return_calls")
    defers = {"f": "defer", "g": "defer"}
    plays = [
        Play(
            calls("f", "g"), says("closed"), says("done"), plan=True, rounds_per_step=1
        ).go(),
        Play(calls("f", "g"), says("sorry"), limits=fill).go(),
        Play(calls("f"), limits=Budget(max_iterations=1, on_limit="stop"))
        .go()
        .add(RESUMED),
        Play(calls("f"), limits=back).go().add(RESUMED),
        Play(calls("unknown", "bad")).go(),
        Play(calls("f", "g"), verdicts=defers)
        .go()
        .add(RESUMED, decided(0), decided(1, "g"))
        .go(),
        Play(calls("f", "g"), verdicts=defers)
        .go()
        .add(RESUMED, decided(0, verdict="deny"), decided(1, "g", "deny")),
        Play(calls("f"), verdicts=defers).go().add(stop()).go(),
        Play(plan=True).add(Resumed(limits=Budget(max_iterations=1), at=0.0)),
        Play(says("done"), plan=True, limits=Budget(max_iterations=1)).go(),
        Play(
            calls("f"), plan=True, limits=Budget(max_iterations=1, on_limit="stop")
        ).go(),
        Play(plan=True).add(stop()).go().add(RESUMED),
        Play(says("prose"), says("{}"), structured=True, formed={"{}"}).go(),
        Play(calls("final"), says("{}"), structured=True, formed={"{}"}).go(),
        Play(
            calls("ask", "ask"), says("done"), clarifier=True, answers=["Oslo", "Rome"]
        ).go(),
        Play(says("where?"), says("done"), clarifier=True, answers=["Oslo", None]).go(),
        Play(says("where?"), require_final_answer=True)
        .go()
        .add(RESUMED, clarified(index=None)),
        Play(says("where?"), require_final_answer=True).go().add(stop()).go(),
        Play(calls("f"))
        .go(steps=2)
        .add(began(0), NestedCallStarted(iteration=0, index=0, function="g", at=0.0)),
        _with_a_run_inside(),
    ]
    for steps in range(12):
        stopped = Play(
            calls("f"), says("closed"), says("done"), plan=True, rounds_per_step=1
        )
        resumed = Play(
            calls("f"), says("closed"), says("done"), plan=True, rounds_per_step=1
        )
        plays += [stopped.go(steps=steps), resumed.go(steps=steps)]
        if (stopped.state.phase, "StopRequested") in TRANSITIONS:
            stopped.add(stop()).go()
        changed = Play(
            calls("f"), says("closed"), says("done"), plan=True, rounds_per_step=1
        ).go(steps=steps)
        plays.append(changed)
        if (changed.state.phase, "BudgetChanged") in TRANSITIONS:
            changed.add(budget_changed()).go()
        lost = Play(
            calls("f"), says("closed"), says("done"), plan=True, rounds_per_step=1
        ).go(steps=steps)
        for fact in (
            request_failed(),
            model_asked(),
            shared_budgets_checked(limit=None),
        ):
            if (lost.state.phase, fact.type) in TRANSITIONS:
                lost.add(fact)
        plays.append(lost.go())
        if (resumed.state.phase, "Resumed") in TRANSITIONS:
            resumed.add(RESUMED).go()
    return set().union(*(play.visited for play in plays))


def _with_a_run_inside() -> Play:
    """Play a call that is left, since a run in it waits, and that is called again."""
    play = Play(calls("f")).go(steps=1).add(decided(0, nested=True), began(0))
    begun = replace(run_started(), run_id=name_inside(play.state, 0, 0))
    left = CallLeft(iteration=0, index=0, call_id="c0", function="f", at=0.0)
    return play.add(HappenedInside(iteration=0, index=0, fact=begun), left)


def test_the_machine_takes_every_transition_of_the_table() -> None:
    """The table has no dead entry: each phase, fact and next phase in it happens in some run."""
    dead = LISTED - played()
    assert {f"{source} --{fact}--> {target}" for source, fact, target in dead} == set()


def test_the_machine_takes_no_other_transition() -> None:
    """Every action that the machine asks for is legal by the table."""
    assert played() <= LISTED


def test_the_table_speaks_of_facts_that_exist() -> None:
    """Each fact type stands in the table, and the table names no other."""
    assert {fact for _, fact in TRANSITIONS} == {
        fact.__name__ for fact in get_args(Fact)
    }


def test_the_end_is_left_by_resuming_alone() -> None:
    """An ended run stays ended unless it is resumed."""
    assert {fact for phase, fact in TRANSITIONS if phase is Phase.ENDED} == {"Resumed"}


def test_the_diagram_shows_every_phase_and_every_arrow() -> None:
    """The Mermaid text has one arrow for each pair of phases, named with the facts that take it."""
    lines = as_mermaid().splitlines()
    assert lines[0] == "stateDiagram-v2"
    drawn = {
        (source, target): set(facts.split(", "))
        for source, target, facts in re.findall(
            r"^    (\w+) --> (\w+): (.+)$", as_mermaid(), re.MULTILINE
        )
    }
    for phase in Phase:
        assert any(phase in pair for pair in drawn)
    for source, fact, target in LISTED:
        loop = fact in ANYWHERE and source is target
        assert (fact in drawn.get((source, target), set())) is not loop
    assert "    [*] --> new" in lines
    assert "    ended --> [*]" in lines


def test_the_decision_shows_this_diagram() -> None:
    """The diagram in the ADR is printed from the table, and is current."""
    adr = Path(__file__).parents[2] / "adr" / "0001-a-run-is-its-journal.md"
    assert f"```mermaid\n{as_mermaid()}\n```" in adr.read_text("utf-8")
