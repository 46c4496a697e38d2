"""Who may say what of a call, as plain data: rules, marks and interceptors, judged by the contract alone.

This is the oracle's reading of the contract. It shares no code with the package: what it judges is written as a policy,
a mark or a function for the package by ``entitlement.world``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

__all__ = [
    "STAFF",
    "Arguments",
    "Asked",
    "Chain",
    "Guards",
    "Opinion",
    "Policy",
    "Question",
    "Rule",
    "may_decide",
]

Arguments: TypeAlias = Mapping[str, Any]
"""What the model or a person wrote, as the function's types have it: ``to``, and mostly ``amount``."""

STAFF: Mapping[str, frozenset[str]] = {
    "carl": frozenset({"clerk"}),
    "cleo": frozenset({"clerk"}),
    "bea": frozenset({"boss"}),
    "max": frozenset({"boss", "clerk"}),
    "ina": frozenset({"intern"}),
}
"""The people by name, with their roles. Whoever gives no name is nobody."""

Hook: TypeAlias = Literal["by roles", "none", "forgets"]
"""What lets people decide: a hook that compares roles, no hook, or one that forgets to return anything."""


def may_decide(person: str | None, roles: Sequence[str], hook: Hook) -> bool:
    """Say whether a person may decide a question."""
    if hook == "forgets":
        return False
    if not roles:
        return True
    return hook == "by roles" and not STAFF.get(person or "", frozenset()).isdisjoint(
        roles
    )


@dataclass(frozen=True)
class Question:
    """What a person is asked: who or what asks, and who may decide. Two equal ones are the same question."""

    source: tuple[Any, ...]
    roles: tuple[str, ...] = ()


Asked: TypeAlias = tuple[Question, ...] | Literal["never"]
"""What has to be answered before a call with these arguments may run, which may be nothing; or it never may."""


_Said: TypeAlias = Question | Literal["run", "never"]


@dataclass(frozen=True)
class Rule:
    """One rule of a policy."""

    action: Literal["allow", "deny", "ask"]
    function: str = "*"
    amount: tuple[Literal["gt", "ge", "lt", "le"], int] | None = None
    to: str | None = None
    roles: tuple[str, ...] = ()
    after: bool = False

    def written(self) -> dict[str, Any]:
        """Write the rule as a policy has it."""
        arguments: dict[str, Any] = {}
        if self.amount is not None:
            arguments["amount"] = {self.amount[0]: self.amount[1]}
        if self.to is not None:
            arguments["to"] = {"equals": self.to}
        given = {
            "function": self.function,
            "arguments": arguments,
            "roles": list(self.roles),
        }
        after = {"after": ["look"]} if self.after else {}
        return {
            "action": self.action,
            **{name: value for name, value in given.items() if value},
            **after,
        }

    def is_for(self, function: str, arguments: Arguments, *, after: bool) -> bool:
        """Say whether the rule is for a call; what cannot be evaluated matches a rule that asks or denies."""
        if not fnmatchcase(function, self.function) or (self.after and not after):
            return False
        held: list[bool] = []
        if self.amount is not None:
            operator, than = self.amount
            given: int | None = arguments.get("amount")
            signs = {"gt": 1, "ge": 1, "lt": -1, "le": -1}
            reached = given is not None and (given - than) * signs[operator] >= (
                operator in ("gt", "lt")
            )
            held.append(self.action != "allow" if given is None else reached)
        if self.to is not None:
            given_to = arguments.get("to")
            held.append(
                self.action != "allow" if given_to is None else given_to == self.to
            )
        return all(held)


@dataclass(frozen=True)
class Policy:
    """An approval policy."""

    default: Literal["allow", "deny", "ask"]
    rules: tuple[Rule, ...] = ()

    def written(self) -> dict[str, Any]:
        """Write the policy as the package reads it."""
        return {
            "default": self.default,
            "rules": [rule.written() for rule in self.rules],
        }


@dataclass(frozen=True)
class Opinion:
    """An interceptor: it says one thing about the calls of a function with more than an amount, and else nothing.

    Attributes:
        name: Its qualified name.
        becomes: The amount that it edits a call to.
        roles: Who may decide what it asks; with a prompt, more than 500 is the boss's.
        junk: What it says in place of a decision.
    """

    name: str
    says: Literal["approve", "deny", "supply", "defer", "edit", "raise", "junk"]
    function: str = "*"
    above: int = 0
    becomes: int = 0
    roles: tuple[str, ...] = ()
    prompt: str = ""
    junk: Any = None

    def asks(self, arguments: Arguments) -> tuple[str, ...]:
        """Say who may decide a call that it asks about."""
        return (
            ("boss",)
            if self.prompt and arguments.get("amount", 0) > 500
            else self.roles
        )

    def is_for(self, function: str, arguments: Arguments) -> bool:
        """Say whether it has an opinion on a call."""
        return (
            "to" in arguments
            and fnmatchcase(function, self.function)
            and arguments.get("amount", 0) > self.above
        )


@dataclass(frozen=True)
class Chain:
    """The guards of one run, in their order; the first that decides wins.

    Attributes:
        marks: The roles of the marked functions, where marks count here.
        refuses_above: ``pre_invoke`` refuses higher amounts.
        checks_above: ``check_for_intervention`` has a person decide higher amounts.
    """

    guards: tuple[Policy | Opinion, ...] = ()
    marks: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict[str, tuple[str, ...]]
    )
    refuses_above: int | None = None
    checks_above: int | None = None
    unmatched: Literal["approve", "defer", "deny"] = "approve"

    def judge(
        self, function: str, arguments: Arguments, *, after: bool
    ) -> _Said | Arguments:
        """Judge a call; the arguments that it is edited to, where it is."""
        for guard in self.guards:
            if (said := self._said(guard, function, arguments, after)) is not None:
                return said
        if function in self.marks:
            return Question(("mark", function), self.marks[function])
        amount = arguments.get("amount", 0)
        if self.refuses_above is not None and amount > self.refuses_above:
            return "never"
        if self.checks_above is not None and amount > self.checks_above:
            return self._question(function, ("check",), ())
        default = next(
            (guard.default for guard in self.guards if isinstance(guard, Policy)), None
        )
        match default or self.unmatched:
            case "allow" | "approve":
                return "run"
            case "deny":
                return "never"
            case _:
                return self._question(
                    function, ("default" if default else "unmatched",), ()
                )

    def _said(
        self, guard: Policy | Opinion, function: str, arguments: Arguments, after: bool
    ) -> _Said | Arguments | None:
        if isinstance(guard, Policy):
            rule = next(
                (
                    one
                    for one in guard.rules
                    if one.is_for(function, arguments, after=after)
                ),
                None,
            )
            if rule is None:
                return None
            if rule.action == "ask":
                return self._question(function, ("rule", rule), rule.roles)
            return "run" if rule.action == "allow" else "never"
        if not guard.is_for(function, arguments):
            return None
        match guard.says:
            case "approve":
                return "run"
            case "defer":
                return self._question(
                    function,
                    ("interceptor", guard.name, guard.prompt),
                    guard.asks(arguments),
                )
            case "edit":
                edited = {**arguments, "amount": guard.becomes}
                return "run" if edited == dict(arguments) else edited
            case _:
                return "never"

    def _question(
        self, function: str, source: tuple[Any, ...], roles: tuple[str, ...]
    ) -> Question:
        """Make a question; without roles of its own it has those of the function's mark."""
        return Question(source, roles or self.marks.get(function, ()))


@dataclass(frozen=True)
class Guards:
    """All that have a say about a call: the runs around it, from the outermost, and a filter of the kernel.

    Each run puts its own question; the filter puts one where no run asks the same people. People are those who answer
    there and the roles: with an approver of its own the filter asks again for roles that a run has asked.
    """

    chains: tuple[Chain, ...]
    filter: Chain | None = None

    @property
    def all(self) -> tuple[Chain, ...]:
        """The runs and the filter."""
        return self.chains if self.filter is None else (*self.chains, self.filter)

    def judge(self, function: str, arguments: Arguments, *, after: bool) -> Asked:
        """Judge a call with exactly these arguments: what anybody denies, or would edit again, never runs."""
        said = [chain.judge(function, arguments, after=after) for chain in self.all]
        if any(not isinstance(one, Question) and one != "run" for one in said):
            return "never"
        asked = tuple(
            one for one in said[: len(self.chains)] if isinstance(one, Question)
        )
        people = [{*one.roles} for one in asked]
        others = (one for one in said[len(self.chains) :] if isinstance(one, Question))
        return (*asked, *(one for one in others if {*one.roles} not in people))

    def may_ask(
        self, function: str, arguments: Arguments, *, after: bool
    ) -> Iterator[Question]:
        """List all that may be asked: the filter's question, too, where that of a run is answered already."""
        if self.judge(function, arguments, after=after) != "never":
            for chain in self.all:
                said = chain.judge(function, arguments, after=after)
                if isinstance(said, Question):
                    yield said

    def edits(
        self, function: str, arguments: Arguments, *, after: bool
    ) -> Iterator[Arguments]:
        """List what interceptors make of a call."""
        for chain in self.all:
            said = chain.judge(function, arguments, after=after)
            if isinstance(said, dict):
                yield said
