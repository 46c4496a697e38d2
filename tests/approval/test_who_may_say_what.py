"""Random situations in which calls meet people, judged by an oracle: a call runs only if a person entitled was asked.

``python tests/benchmarks/who_may_say_what.py`` tries thousands.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from entitlement.oracle import violations
from entitlement.record import Answer, Event, Record, Replied, Spoiled, Started
from entitlement.rules import Chain, Guards, Hook, Opinion, Policy, Rule, may_decide
from entitlement.scenarios import DOORS, Call, Door, Prompted, Scenario, scenario_of
from entitlement.trial import tried
from support.examples import some_of
from support.values import each_of

SITUATIONS = 8
"""Of each door; some seconds in all."""


@pytest.mark.examples
@pytest.mark.parametrize("door", DOORS)
async def test_a_call_runs_only_if_an_entitled_person_was_asked(door: Door) -> None:
    """Over roles, sticky answers, edits, nesting and people: what starts was let start, and what is approved runs."""
    for seed in some_of(range(SITUATIONS)):
        trial = await tried(scenario_of(seed, (door,)))
        assert not trial.found, (
            f"--seed {seed} --runs 1 --doors {door} --show: {trial.found}"
        )


async def test_situations_that_broke_a_promise_keep_it() -> None:
    """An agent inside a run is not looked for with the arguments of the run; what waits is decided by its path."""
    for seed in (20019, 20113, 20169):
        trial = await tried(scenario_of(seed, DOORS))
        assert not trial.found, f"--seed {seed} --runs 1 --show: {trial.found}"


async def test_the_situations_are_not_idle() -> None:
    """Functions start, people decide, some of them in vain, and most runs are answered."""
    trials = [
        await tried(scenario_of(seed, ("planner", "service"))) for seed in range(40)
    ]
    assert sum(trial.starts for trial in trials) > 60
    assert sum(trial.answers for trial in trials) > 30
    assert sum(trial.refused for trial in trials) > 3
    assert sum(trial.statuses[-1] == "answered" for trial in trials) > 20


def test_a_seed_gives_the_same_situation() -> None:
    """What was found can be tried again."""
    assert [repr(scenario_of(seed)) for seed in range(20)] == [
        repr(scenario_of(seed)) for seed in range(20)
    ]


# The oracle finds what it is for.


def pay(name: str, amount: int, to: str = "ann") -> Call:
    return Call(name, "pay", {"to": to, "amount": amount})


SMALL, LARGE, INNER = pay("small", 5), pay("large", 5000), pay("inner", 5)
NESTING = Call("nesting", "inner-prompt", inner="prompt", turns=((INNER,),))
BOSS, CLERK = (
    Rule("ask", "pay", ("gt", 500), roles=("boss",)),
    Rule("ask", "pay", roles=("clerk",)),
)
BY_STEPS = Policy("allow", (Rule("deny", to="mal"), BOSS, CLERK))


def situation(
    *guards: Policy | Opinion,
    hook: Hook = "by roles",
    marks: Mapping[str, Any] | None = None,
) -> Scenario:
    """A run that calls the small and the large payment, and a prompt that pays."""
    return Scenario(
        seed=0,
        door="planner",
        streamed=False,
        anew=False,
        honest=False,
        late=False,
        bare=False,
        hook=hook,
        approver=False,
        inner_approver=False,
        safe_first=False,
        on_denial="refuse",
        stock="auto",
        guards=Guards((Chain(guards, marks or {}),)),
        inside=Chain(),
        prompts=(Prompted("R0", ((SMALL, LARGE), (NESTING,))),),
    )


def started(call: Call, **changed: Any) -> Started:
    return Started(call, "pay", {**call.arguments, **changed})


def approved(call: Call, person: str | None, **given: Any) -> Answer:
    roles = ("boss",) if call is LARGE else ("clerk",)
    return Answer(call, person, "approve", call.arguments, roles, **given)


def broken(scenario: Scenario, *events: Event) -> list[str]:
    """List what the oracle finds, as promise and call."""
    record = Record(scenario)
    record.events.extend([Replied("R0", 0), *events])
    return [
        f"{one.promise.partition(':')[0]}: {one.call}" for one in violations(record)
    ]


EDITED = {"to": "ann", "amount": 5000}
REFUSED = {"to": "mal", "amount": 5}
NOBODY_ASKED = "ran though nobody entitled was asked"


@each_of(
    ("events", "found"),
    [
        ([started(SMALL)], f"{NOBODY_ASKED}: small"),
        ([approved(SMALL, "ina"), started(SMALL)], f"{NOBODY_ASKED}: small"),
        ([approved(SMALL, None), started(SMALL)], f"{NOBODY_ASKED}: small"),
        (
            [approved(SMALL, "carl", void="late"), started(SMALL)],
            f"{NOBODY_ASKED}: small",
        ),
        ([approved(LARGE, "carl"), started(LARGE)], f"{NOBODY_ASKED}: large"),
        (
            [approved(LARGE, "carl", edited=SMALL.arguments), started(LARGE, amount=5)],
            "ran with arguments that nobody gave: large",
        ),
        (
            [approved(SMALL, "carl", edited=EDITED), started(SMALL, amount=5000)],
            f"{NOBODY_ASKED}: small",
        ),
        (
            [approved(SMALL, "carl", edited=REFUSED), started(SMALL, to="mal")],
            "ran though a rule is against it: small",
        ),
        (
            [approved(SMALL, "carl"), started(SMALL, amount=50)],
            "ran with arguments that nobody gave: small",
        ),
        (
            [
                Answer(SMALL, "carl", "deny", SMALL.arguments, ("clerk",)),
                started(SMALL),
            ],
            "ran though it was refused: small",
        ),
        (
            [Spoiled(LARGE), approved(SMALL, "carl"), started(SMALL)],
            "ran beside a call that could not be decided: small",
        ),
        (
            [approved(SMALL, "carl"), Started(SMALL, "move", SMALL.arguments)],
            "another function ran: small",
        ),
    ],
    ids=[
        "nobody",
        "intern",
        "no name",
        "late",
        "clerk for boss",
        "edit by clerk for boss",
        "edit past the boss",
        "edit past a deny",
        "other arguments",
        "denied",
        "no decision",
        "another function",
    ],
)
def test_the_oracle_finds_a_call_without_a_yes(events: list[Event], found: str) -> None:
    """Who may not decide, what was edited past a rule, what was denied: each start of it is named."""
    assert broken(situation(BY_STEPS), *events) == [found]


ALWAYS = approved(SMALL, "carl", always="function")


@each_of(
    ("events", "found"),
    [
        ([started(LARGE)], [f"{NOBODY_ASKED}: large"]),
        ([started(INNER)], [f"{NOBODY_ASKED}: inner"]),
        ([started(SMALL)], ["ran twice: small"]),
    ],
    ids=["another question", "another run", "twice"],
)
def test_the_oracle_finds_a_sticky_answer_that_is_too_wide(
    events: list[Event], found: list[str]
) -> None:
    """The clerk's "always" answers neither the boss's question nor a nested run's, and runs no call twice."""
    assert broken(situation(BY_STEPS), ALWAYS, started(SMALL), *events) == found


def test_the_oracle_knows_what_interceptors_make_of_a_call() -> None:
    """An edit by an interceptor is judged by the rules behind it; what it does not edit runs as it was called."""
    halved = Opinion("halved", "edit", "pay", 500, 50)
    assert (
        broken(
            situation(halved, Policy("allow")),
            started(LARGE, amount=50),
            started(SMALL),
        )
        == []
    )
    assert broken(situation(halved, Policy("deny")), started(LARGE, amount=50)) == [
        "ran though a rule is against it: large"
    ]
    assert broken(situation(halved, Policy("allow")), started(LARGE)) == [
        "ran though a rule is against it: large"
    ]


@each_of(
    "events",
    [
        [approved(SMALL, "carl"), started(SMALL)],
        [approved(LARGE, "bea", edited=EDITED), started(LARGE)],
        [
            approved(SMALL, "max", edited=EDITED),
            Answer(SMALL, "bea", "approve", EDITED, ("boss",)),
            started(SMALL, amount=5000),
        ],
        [
            approved(LARGE, "bea", always="function"),
            approved(SMALL, "cleo"),
            started(LARGE),
            started(SMALL),
        ],
    ],
    ids=["plain", "the same", "edited, asked anew", "always"],
)
def test_the_oracle_leaves_alone_what_is_allowed(events: list[Event]) -> None:
    """A call that an entitled person approved, as it was approved, is not reported."""
    assert broken(situation(BY_STEPS), *events) == []


@each_of(
    ("person", "roles", "hook", "may"),
    [
        ("carl", ("clerk",), "by roles", True),
        ("carl", ("boss",), "by roles", False),
        (None, ("boss",), "by roles", False),
        (None, (), "by roles", True),
        ("bea", ("boss",), "none", False),
        (None, (), "none", True),
        ("bea", (), "forgets", False),
    ],
)
def test_the_oracle_knows_who_may_decide(
    person: str | None, roles: tuple[str, ...], hook: Hook, may: bool
) -> None:
    """A hook goes by roles; without a hook a call with roles cannot be decided; a hook that returns nothing refuses."""
    assert may_decide(person, roles, hook) is may
