"""Random situations in which calls meet people: a seed gives the same one each time, and each can be printed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, TypeAlias

from entitlement.rules import Arguments, Chain, Guards, Hook, Opinion, Policy, Rule

__all__ = [
    "AMOUNTS",
    "DOORS",
    "PAYEES",
    "Call",
    "Door",
    "Inner",
    "Prompted",
    "Scenario",
    "Stock",
    "scenario_of",
    "smaller",
]

AMOUNTS = (1, 5, 50, 500, 5000, 1_000_000)
PAYEES = ("ann", "mal", "zoe")
FUNCTIONS = ("pay", "move", "look")
ROLES = ((), ("clerk",), ("boss",), ("boss",), ("clerk", "boss"))

Door: TypeAlias = Literal[
    "planner",
    "service",
    "handler",
    "session",
    "kept",
    "inbox",
    "agent",
    "ag-ui",
    "filter",
    "filter-in-run",
]
DOORS: tuple[Door, ...] = (
    "planner",
    "service",
    "handler",
    "session",
    "kept",
    "inbox",
    "agent",
    "ag-ui",
    "filter",
    "filter-in-run",
)

Inner: TypeAlias = Literal["invoke", "prompt", "agent", "planner", "colleague"]
"""How a function of the run has another one called: itself, by a prompt, by an agent, or is a planner or an agent."""
INNER: tuple[Inner, ...] = ("invoke", "prompt", "agent", "planner", "colleague")

Stock: TypeAlias = Literal["auto", "function", "both"]
"""Under which types a filter of a stock kernel is registered."""


@dataclass(frozen=True, repr=False)
class Call:
    """A call that a model makes, or a function; with the calls that happen inside it, by turns."""

    id: str
    function: str
    arguments: Arguments = field(default_factory=dict[str, Any])
    inner: Inner | None = None
    turns: tuple[tuple["Call", ...], ...] = ()

    def __repr__(self) -> str:
        inside = "".join(f" [{', '.join(map(repr, turn))}]" for turn in self.turns)
        return f"{self.id}:{self.function}({', '.join(map(str, self.arguments.values()))}{inside})"

    def written(self) -> dict[str, Any]:
        """Write the arguments as the model sends them: now and then as a text, or a float, in place of a number."""
        given = dict(self.arguments)
        if "amount" in given and len(self.id) % 3 == 0:
            given["amount"] = str(given["amount"])
        return given


@dataclass(frozen=True)
class Prompted:
    """One run of the door: what the user asks for, and the calls of each reply."""

    name: str
    turns: tuple[tuple[Call, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One situation.

    Attributes:
        guards: Of the run; and of a filter of its kernel.
        inside: Of a planner that is called as a function, beside those around it.
        anew: Whether each resume is by a new object, from JSON.
        honest: Whether every question is answered by an approval of a person who may decide it.
        late: Whether the user says something else before the first pause is decided.
        bare: Whether the process that decides lacks the hook.
        inner_approver: Whether the planner that is called as a function has an approver of its own.
        stock: See `Stock`.
    """

    seed: int
    door: Door
    streamed: bool
    anew: bool
    honest: bool
    late: bool
    bare: bool
    hook: Hook
    approver: bool
    inner_approver: bool
    safe_first: bool
    on_denial: Literal["refuse", "reask", "return_calls"]
    stock: Stock
    guards: Guards
    inside: Chain
    prompts: tuple[Prompted, ...]

    def calls(self) -> Iterator[tuple[str, int, Call]]:
        """List every call with the run and the turn that it is made in; a call names the run inside it."""
        for prompt in self.prompts:
            yield from _calls(prompt.name, prompt.turns)


def _calls(
    run: str, turns: tuple[tuple[Call, ...], ...]
) -> Iterator[tuple[str, int, Call]]:
    for number, turn in enumerate(turns):
        for call in turn:
            yield run, number, call
            yield from _calls(call.id, call.turns)


def scenario_of(seed: int, doors: tuple[Door, ...] = DOORS) -> Scenario:
    """Make the situation of a seed."""
    return _Maker(seed).scenario(doors)


class _Maker:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = Random(seed)
        self._made = 0

    def scenario(self, doors: tuple[Door, ...]) -> Scenario:
        random = self._random
        door = random.choices(doors, [0.3 if door == "inbox" else 1 for door in doors])[
            0
        ]  # a server takes its time
        hook: Hook = random.choices(("by roles", "none", "forgets"), (8, 2, 1))[0]
        if door == "ag-ui" and hook == "none":
            hook = "by roles"  # the request has the roles of its user
        honest = self._happens(0.3)
        marks = self._marks()
        own = self._chain(marks=marks)
        guards = Guards((own,))
        if door == "filter":
            guards = Guards((Chain((self._policy(),), marks),))
        elif door == "filter-in-run":
            first = self._chain(marks={}) if self._happens(0.6) else Chain()
            guards = Guards((first,), Chain((self._policy(),), marks))
        nests = door != "filter"
        prompts = (
            1
            if door in ("planner", "kept", "inbox", "ag-ui", "filter-in-run")
            else random.choice((1, 1, 2))
        )
        return Scenario(
            seed=self._seed,
            door=door,
            streamed=self._happens(0.5),
            anew=self._happens(0.5) or door in ("kept", "inbox", "ag-ui"),
            honest=honest,
            late=not honest
            and door in ("service", "handler", "session", "agent")
            and self._happens(0.15),
            bare=not honest
            and door in ("planner", "service", "handler", "kept", "inbox")
            and self._happens(0.1),
            hook=hook,
            approver=self._happens(0.3),
            inner_approver=self._happens(0.2),
            safe_first=self._happens(0.3),
            on_denial="refuse"
            if honest
            else random.choices(("refuse", "reask", "return_calls"), (8, 1, 1))[0],
            stock=random.choice(("auto", "function", "both")),
            guards=guards,
            inside=self._chain(marks={}) if self._happens(0.5) else Chain(),
            prompts=tuple(
                Prompted(f"R{number}", self._outermost(2 if nests else 0))
                for number in range(prompts)
            ),
        )

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def _marks(self) -> Mapping[str, tuple[str, ...]]:
        return {
            name: self._random.choice(ROLES) for name in FUNCTIONS if self._happens(0.2)
        }

    def _chain(self, *, marks: Mapping[str, tuple[str, ...]]) -> Chain:
        random = self._random
        guards: list[Policy | Opinion] = []
        if self._happens(0.85):
            guards.append(self._policy())
        for number in range(random.choice((0, 0, 0, 1, 1, 2))):
            guards.insert(random.randint(0, len(guards)), self._opinion(number))
        if self._happens(0.05):
            guards.append(self._policy())
        return Chain(
            tuple(guards),
            marks,
            refuses_above=random.choice(AMOUNTS) if self._happens(0.05) else None,
            checks_above=random.choice(AMOUNTS) if self._happens(0.1) else None,
            unmatched=random.choice(("approve", "approve", "approve", "defer", "deny")),
        )

    def _policy(self) -> Policy:
        random = self._random
        if self._happens(0.4):  # by steps: the more, the higher
            function, step = (
                random.choice(("pay", "move", "*")),
                random.choice(AMOUNTS[1:5]),
            )
            first, second = (
                Rule("ask", function, ("gt", step), roles=("boss",)),
                Rule("ask", function, roles=("clerk",)),
            )
            if self._happens(0.3):
                second = Rule("allow", function)
            denied = (Rule("deny", "*", to="mal"),) if self._happens(0.5) else ()
            return Policy(
                random.choice(("allow", "ask", "deny")), (*denied, first, second)
            )
        rules = tuple(self._rule() for _ in range(random.randint(0, 4)))
        return Policy(random.choices(("allow", "ask", "deny"), (4, 4, 1))[0], rules)

    def _rule(self) -> Rule:
        random = self._random
        action: Any = random.choices(("ask", "allow", "deny"), (6, 2, 2))[0]
        operator: Any = random.choice(("gt", "ge", "lt", "le"))
        return Rule(
            action,
            random.choice(("pay", "pay", "move", "look", "*")),
            (operator, random.choice(AMOUNTS)) if self._happens(0.6) else None,
            random.choice(PAYEES) if self._happens(0.3) else None,
            random.choice(ROLES) if action == "ask" else (),
            after=action != "allow" and self._happens(0.1),
        )

    def _opinion(self, number: int) -> Opinion:
        random = self._random
        says: Any = random.choices(
            ("approve", "deny", "supply", "defer", "edit", "raise", "junk"),
            (2, 2, 1, 4, 6, 0.5, 0.5),
        )[0]
        return Opinion(
            f"opinion_{number}",
            says,
            random.choice(("pay", "move", "*")),
            random.choice((-1, *AMOUNTS[:4])),
            random.choice(AMOUNTS),
            random.choice(ROLES) if says == "defer" else (),
            random.choice(("", "Really?")),
            random.choice((True, False, "yes", 1, {"approve": True})),
        )

    def _turns(
        self, depth: int, *, sizes: tuple[int, ...] = (1, 1, 2)
    ) -> tuple[tuple[Call, ...], ...]:
        choose = self._random.choice
        return tuple(
            tuple(self._call(depth) for _ in range(choose(sizes)))
            for _ in range(choose(sizes))
        )

    def _outermost(self, depth: int) -> tuple[tuple[Call, ...], ...]:
        """Make the turns of a run; now and then its model gives each turn's calls the ids of the first, as some do."""
        turns = self._turns(depth, sizes=(1, 2, 2, 3))
        if not self._happens(0.15):
            return turns
        ids = [call.id for call in turns[0] if call.inner is None]
        return (turns[0], *(tuple(_renamed(turn, ids)) for turn in turns[1:]))

    def _call(self, depth: int) -> Call:
        self._made += 1
        name = f"c{self._made}"
        if depth and self._happens(0.2):
            inner = self._random.choice(INNER)
            turns = self._turns(depth - 1) if inner != "colleague" else self._turns(0)
            return Call(name, f"inner-{inner}", inner=inner, turns=turns)
        random = self._random
        arguments: dict[str, Any] = {
            "to": random.choice(PAYEES),
            "amount": random.choice(AMOUNTS),
        }
        if self._happens(0.1):
            del arguments["amount"]
        return Call(name, random.choices(FUNCTIONS, (6, 3, 2))[0], arguments)


def _renamed(turn: tuple[Call, ...], ids: list[str]) -> Iterator[Call]:
    left = iter(ids)
    for call in turn:
        yield call if call.inner else replace(call, id=next(left, call.id))


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """List the same situation with one thing less, to find the smallest that breaks a promise."""
    for number in range(len(scenario.prompts)):
        if len(scenario.prompts) > 1:
            yield replace(scenario, prompts=_without(scenario.prompts, number))
        prompt = scenario.prompts[number]
        for turns in _fewer_turns(prompt.turns):
            changed = replace(prompt, turns=turns)
            yield replace(
                scenario,
                prompts=(
                    *scenario.prompts[:number],
                    changed,
                    *scenario.prompts[number + 1 :],
                ),
            )
    for fewer in _fewer_guards(scenario.guards.chains[0]):
        yield replace(scenario, guards=replace(scenario.guards, chains=(fewer,)))
    if scenario.guards.filter is not None:
        for fewer in _fewer_guards(scenario.guards.filter):
            yield replace(scenario, guards=replace(scenario.guards, filter=fewer))
    for fewer in _fewer_guards(scenario.inside):
        yield replace(scenario, inside=fewer)
    for name in (
        "streamed",
        "anew",
        "late",
        "bare",
        "approver",
        "inner_approver",
        "safe_first",
    ):
        if getattr(scenario, name) and not (
            name == "anew" and scenario.door in ("kept", "inbox", "ag-ui")
        ):
            yield replace(scenario, **{name: False})


def _without(parts: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    return (*parts[:number], *parts[number + 1 :])


def _fewer_turns(
    turns: tuple[tuple[Call, ...], ...],
) -> Iterator[tuple[tuple[Call, ...], ...]]:
    for number, turn in enumerate(turns):
        if len(turns) > 1:
            yield _without(turns, number)
        before, after = turns[:number], turns[number + 1 :]
        for place, call in enumerate(turn):
            if len(turn) > 1:
                yield (*before, _without(turn, place), *after)
            for inner in _fewer_turns(call.turns):
                changed = replace(call, turns=inner)
                yield (*before, (*turn[:place], changed, *turn[place + 1 :]), *after)


def _fewer_guards(chain: Chain) -> Iterator[Chain]:
    for number, guard in enumerate(chain.guards):
        if len(chain.guards) > 1:
            yield replace(chain, guards=_without(chain.guards, number))
        if isinstance(guard, Policy):
            for rule in range(len(guard.rules)):
                fewer = replace(guard, rules=_without(guard.rules, rule))
                yield replace(
                    chain,
                    guards=(*chain.guards[:number], fewer, *chain.guards[number + 1 :]),
                )
    for name in chain.marks:
        yield replace(
            chain,
            marks={
                other: roles for other, roles in chain.marks.items() if other != name
            },
        )
    for name in ("refuses_above", "checks_above"):
        if getattr(chain, name) is not None:
            yield replace(chain, **{name: None})
