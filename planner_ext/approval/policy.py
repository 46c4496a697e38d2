"""Policies as data: which calls are allowed, denied, or asked about. A policy is an interceptor."""

import json
import operator
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, cast

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from planner_ext.approval.decisions import (
    LONGEST_WAIT,
    Approve,
    Decision,
    Defer,
    Deny,
    ToolCall,
    source_of,
    with_plain_numbers,
)
from planner_ext.approval.guards import Policy
from planner_ext.core.errors import PlannerExtError, nearest, shown
from planner_ext.core.facts import Panel

_Number = int | Annotated[float, Field(allow_inf_nan=False)]
_Seconds = Annotated[float, Field(gt=0, le=LONGEST_WAIT)]
_NonEmpty = Annotated[str, Field(min_length=1)]
_Names = Annotated[
    list[_NonEmpty],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]


class InvalidPolicyError(PlannerExtError):
    """A policy has an unknown or duplicate key, or an invalid value; names place and expectation."""


class _Data(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, defer_build=True
    )


class ArgumentPredicate(_Data):
    """Conditions on one argument; all that are set must hold.

    A condition sees the model's value, converted to the parameter's type. It cannot be
    evaluated on a value of another type, at any level: a number compares to numbers
    only (7 is 7.0). Whether a value is null can always be evaluated.

    Attributes:
        equals: It is this JSON value.
        one_of: It is one of these; cannot be evaluated where none has its type.
        gt, ge, lt, le: It is a number above, at or above, below, at or below this.
        glob: It is a text of this pattern: ``*`` any text, ``?`` one character,
            ``[ab]`` one of these.
    """

    equals: Any = None
    one_of: list[Any] | None = None
    gt: _Number | None = None
    ge: _Number | None = None
    lt: _Number | None = None
    le: _Number | None = None
    glob: str | None = None

    @model_validator(mode="after")
    def _has_condition(self) -> Self:
        if not self.model_fields_set:
            raise ValueError(
                "a predicate needs one of equals, one_of, gt, ge, lt, le, glob"
            )
        for name in sorted(self.model_fields_set - {"equals"}):
            if getattr(self, name) is None:
                raise ValueError(f"{name} must have a value")
        _check_json([getattr(self, name) for name in self.model_fields_set])
        return self

    def holds(self, value: object) -> bool | None:
        """@private Return whether a value fulfils every condition; None if one cannot be evaluated."""
        results = {self._condition(name, value) for name in self.model_fields_set}
        return None if None in results else all(results)

    def _condition(self, name: str, value: object) -> bool | None:
        wanted: Any = getattr(self, name)
        match name:
            case "equals":
                return _same(value, wanted)
            case "one_of":
                return _is_one_of(value, wanted)
            case "glob":
                if isinstance(value, str):
                    return fnmatchcase(value, wanted)
                return None
            case _:
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if number:
                    return getattr(operator, name)(value, wanted)
                return None


class ApprovalRule(_Data):
    """One rule: the calls that it is for, and what to do with them.

    Attributes:
        plugin, function: Case-sensitive patterns of the names. Default: any.
        arguments: What the validated arguments must be, by name.
        after: Patterns of functions, one or a list, for ``ask`` and ``deny``: the rule
            is only for calls that come after a call of one of them, so that what came
            from outside can make what follows ask. A pattern is for the fully qualified
            name, such as ``web-*``, or for the function's name in any plugin; case and
            separators do not matter. A call comes after the functions that were started
            in earlier batches of its run, failed and nested ones included; after all
            that were called in the history that the run began with; and, in a nested
            run, after those before it in the runs around. A call that did not start
            (denied, or with a supplied result) does not count. Removing messages
            changes nothing. Where the calls before are not known, every call matches:
            see `planner_ext.ApprovalFilter`.
        action: ``allow`` runs the call, ``deny`` refuses it, ``ask`` asks a person.
        reason: What the model reads of a denial, and a person of a question.
        expires_in: Seconds after which a question expires; None uses the run's setting.
        roles: Who may decide a question, see `ApprovalSettings`.
        quorum: How many persons have to approve the call before it runs, for ``ask``.
            One is enough to deny it, to supply its result, or to edit it, after which
            the vote starts anew.
        escalates_in: Seconds after which a question that is still open asks
            ``escalates_to`` in place of ``roles``. A vote from before counts only if
            ``authorize`` lets its author decide now, too.
        escalates_to: The roles from then on.

    A quorum, and an escalation, need a kept run: see `planner_ext.durable.Approvals`.
    """

    plugin: str = "*"
    function: str = "*"
    arguments: dict[str, ArgumentPredicate] = Field(
        default_factory=dict[str, ArgumentPredicate]
    )
    after: _Names = Field(default_factory=list[str])
    action: Literal["allow", "deny", "ask"]
    reason: str = ""
    expires_in: _Seconds | None = None
    roles: list[_NonEmpty] = Field(default_factory=list[str])
    quorum: Annotated[int, Field(ge=1)] = 1
    escalates_in: _Seconds | None = None
    escalates_to: list[_NonEmpty] = Field(default_factory=list[str])

    @model_validator(mode="after")
    def _has_roles_for_a_question(self) -> Self:
        if self.roles and self.action != "ask":
            raise ValueError(f"roles are for the action ask; this one is {self.action}")
        return self

    @model_validator(mode="after")
    def _has_a_panel_for_a_question(self) -> Self:
        if self.panel != Panel() and self.action != "ask":
            raise ValueError(
                f"quorum and escalation are for the action ask; this one is {self.action}"
            )
        if (self.escalates_in is None) != (not self.escalates_to):
            raise ValueError(
                "escalates_in and escalates_to go together, such as escalates_in: 14400 and escalates_to: [lead]"
            )
        if (self.escalates_in or 0) >= (self.expires_in or LONGEST_WAIT):
            raise ValueError(
                f"escalates_in must be below expires_in, {self.expires_in:g}: nobody is asked after that"
            )
        return self

    @model_validator(mode="after")
    def _is_stricter_after(self) -> Self:
        if "after" in self.model_fields_set and not self.after:
            raise ValueError(
                "after must name a function, such as web-fetch or web-*; leave it out for calls after any"
            )
        if self.after and self.action == "allow":
            raise ValueError(
                "after is for the actions ask and deny; this one is allow: put such a rule before the allow rule"
            )
        return self

    @property
    def panel(self) -> Panel:
        """@private How many decide its question, and who later."""
        return Panel(
            quorum=self.quorum,
            escalates_in=self.escalates_in,
            escalates_to=tuple(self.escalates_to),
        )

    def names(self, plugin: str, function: str) -> bool:
        """@private Return whether the rule is for a function, with any arguments."""
        return fnmatchcase(plugin, self.plugin) and fnmatchcase(function, self.function)

    def matches(self, call: ToolCall) -> bool:
        """@private Return whether the rule is for a call.

        A predicate that cannot be evaluated matches for a deny or ask rule, and not for
        an allow rule: the argument is of another type, or the model did not give it. In
        the latter case the function gets the application's value or its own default,
        which no rule sees.
        """
        if not self.names(call.plugin_name, call.function_name) or (
            self.after and not self._comes_after(call)
        ):
            return False
        return _all_hold(self.arguments, call.arguments, unknown=self.action != "allow")

    def _comes_after(self, call: ToolCall) -> bool:
        return call.after is None or any(
            _is_named(name, self.after) for name in call.after
        )

    def reason_for(self, call: ToolCall) -> str:
        """@private Return the rule's reason, or else which calls made it match."""
        if self.reason or not self.after:
            return self.reason
        if call.after is None:
            return f"It may come after a call of {' or '.join(self.after)}: the calls before it are not known here."
        earlier = sorted(call.after)
        named = [name for name in earlier if _is_named(name, self.after)]
        return f"It comes after a call of {', '.join(named)}."


class Grant(_Data):
    """How long, and for which calls, a decision on one call answers the same question again.

    The same question is of the same function, with the parameters that it had, and has
    the same roles and source, as with ``Approve(always="function")``. Calls in doubt
    and questions of the model are never answered.

    Attributes:
        expires_in: Seconds from when it is given.
        uses: How many questions it answers; None for any number.
        arguments: What the validated arguments of a call must be, by name.
        run_arguments: What the application's arguments of its run must be, by name,
            such as the person or tenant that it works for, or the key of a shared
            budget. Without these conditions any run of the store.
    """

    expires_in: _Seconds
    uses: Annotated[int, Field(gt=0, lt=2**63)] | None = None
    arguments: dict[str, ArgumentPredicate] = Field(
        default_factory=dict[str, ArgumentPredicate]
    )
    run_arguments: dict[str, ArgumentPredicate] = Field(
        default_factory=dict[str, ArgumentPredicate]
    )

    def covers(
        self,
        arguments: Mapping[str, Any],
        run_arguments: Mapping[str, Any],
        *,
        unknown: bool,
    ) -> bool:
        """@private Return whether it is for a call; ``unknown`` as in a rule: True for a standing no."""
        return _all_hold(self.arguments, arguments, unknown=unknown) and _all_hold(
            self.run_arguments, run_arguments, unknown=unknown
        )


class ApprovalPolicy(_Data, Policy):
    """Decides calls by rules; the first one that matches wins.

    Attributes:
        default: For calls that no rule matches. Mandatory; ``ask`` or ``deny`` is
            recommended. Only a rule, and no default, frees a function marked with
            ``@requires_approval``.
    """

    default: Literal["ask", "deny", "allow"]
    rules: list[ApprovalRule] = Field(default_factory=list[ApprovalRule])

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a policy from data.

        Raises:
            InvalidPolicyError: Naming the place, what was expected and what was seen.
        """
        if not isinstance(data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (or a file's text)
            raise InvalidPolicyError(
                f"Expected a policy with the keys default and rules; got {shown(data)}."
            )
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise InvalidPolicyError(_explain(error)) from error

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a policy from a YAML file.

        Raises:
            InvalidPolicyError: If it is not a policy, or has a key twice; names the
                file.
            OSError: If the file cannot be read.
        """
        if not isinstance(path, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidPolicyError(
                f"from_yaml takes the path of a file; got {shown(path)}. Use from_dict for data."
            )
        if "\n" in str(path):
            raise InvalidPolicyError(
                "from_yaml takes the path of a file; got YAML text. Use from_yaml_text."
            )
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InvalidPolicyError(
                f"Expected a policy as YAML in UTF-8; {path} is not: {error}."
            ) from error
        except FileNotFoundError as error:
            raise FileNotFoundError(
                error.errno,
                f"No such policy file, looked for in {Path.cwd()}; give the path of one",
                str(path),
            ) from None
        try:
            return cls.from_yaml_text(text)
        except InvalidPolicyError as error:
            raise InvalidPolicyError(f"{error} It is in {path}.") from error

    @classmethod
    def from_yaml_text(cls, text: str) -> Self:
        """Read a policy from YAML text; see `from_yaml`."""
        try:
            data: Any = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506  (a SafeLoader)
        except RecursionError:
            raise InvalidPolicyError(
                "Expected a policy as YAML; it is nested too deeply to be read."
            ) from None
        except (
            yaml.YAMLError,
            ValueError,
            OverflowError,
        ) as error:
            # The last two: of a date, or a number.
            raise InvalidPolicyError(
                f"Expected a policy as YAML; it cannot be read: {error}"
            ) from error
        return cls.from_dict(data)

    def __call__(self, call: ToolCall) -> Decision:
        """Decide a call, by the rules or else by the default."""
        return self.by_rule(call) or self.by_default()

    def by_rule(self, call: ToolCall) -> Decision | None:
        """@private Decide a call by the rules alone."""
        for number, rule in enumerate(self.rules, start=1):
            if rule.matches(call):
                if rule.action == "ask":
                    prompt = rule.reason_for(call) or None
                    source = source_of("rule", _normal_rule(rule))
                    return Defer(
                        prompt=prompt,
                        expires_in=rule.expires_in,
                        roles=tuple(rule.roles),
                        source=source,
                        asked_by=f"policy rule {number}",
                        panel=rule.panel,
                    )
                return _decision(
                    rule.action, rule.reason_for(call), f"policy rule {number}"
                )
        return None

    def by_default(self) -> Decision:
        """@private Decide a call that no rule is for."""
        if self.default == "ask":
            source = source_of("default", self.normal_form())
            return Defer(source=source, asked_by="policy default")
        return _decision(self.default, "", "policy default")

    @property
    def is_plain(self) -> bool:
        """@private Whether no class of the application decides in its own way."""
        return type(self) is ApprovalPolicy

    @property
    def needs_store(self) -> bool:
        """@private Whether a rule has a quorum or an escalation."""
        return any(rule.panel != Panel() for rule in self.rules)

    def normal_form(self) -> dict[str, Any]:
        """@private Convert what the policy decides to JSON values: equal policies give equal values.

        Order of keys, explicit defaults, and ``60`` or ``60.0`` make no difference;
        ``reason`` is omitted.
        """
        return {
            "default": self.default,
            "rules": [_normal_rule(rule) for rule in self.rules],
        }

    def unused_rules(self, functions: Iterable[tuple[str, str]]) -> list[int]:
        """@private List the rules, from 1, that are for none of these functions."""
        known = list(functions)
        return [
            n
            for n, rule in enumerate(self.rules, start=1)
            if not any(rule.names(*names) for names in known)
        ]

    def unknown_after(
        self, functions: Iterable[tuple[str, str]]
    ) -> list[tuple[int, str]]:
        """@private List, by rule, the patterns of ``after`` that are for none of these functions."""
        known = ["-".join(filter(None, names)) for names in functions]
        patterns = (
            (n, one) for n, rule in enumerate(self.rules, start=1) for one in rule.after
        )
        return [
            (n, one)
            for n, one in patterns
            if not any(_is_named(name, [one]) for name in known)
        ]


_SEPARATORS: Final = re.compile("[-.:/]")


def _is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern is for a function's whole name, or its name without the plugin's.

    A history may have been written with other separators and another case.
    """
    # With Semantic Kernel, a plugin's name has no hyphen.
    _, *own = _SEPARATORS.split(name, maxsplit=1)
    # "web_fetch" may be one name or two.
    own = [*own, _SEPARATORS.split(name)[-1]] if own else [name.partition("_")[2]]
    names = {_spelled(one) for one in (name, *own)}
    return any(
        fnmatchcase(one, _spelled(pattern)) for pattern in patterns for one in names
    )


def _spelled(name: str) -> str:
    return _SEPARATORS.sub("-", name.casefold()).replace("_", "-")


def _normal_rule(rule: ApprovalRule) -> dict[str, Any]:
    written = rule.model_dump(exclude={"reason", "arguments"}, exclude_defaults=True)
    arguments = {
        name: predicate.model_dump(exclude_unset=True)
        for name, predicate in rule.arguments.items()
    }
    rules = written | ({"arguments": arguments} if arguments else {})
    if rule.after:
        rules["after"] = sorted(set(rule.after))
    return with_plain_numbers(json.loads(json.dumps(rules, default=repr)))


def _all_hold(
    predicates: Mapping[str, ArgumentPredicate],
    values: Mapping[str, Any],
    *,
    unknown: bool,
) -> bool:
    """Return whether all conditions hold; ``unknown`` stands for one that cannot be evaluated."""
    for name, predicate in predicates.items():
        held = None
        if name in values:
            held = predicate.holds(values[name])
        if not (unknown if held is None else held):
            return False
    return True


def _decision(action: str, reason: str, by: str) -> Decision:
    if action == "allow":
        return Approve(by=by)
    return Deny(reason or "The policy of this application does not allow it.", by=by)


_KINDS: Final = (bool, int | float, str, Mapping, list)
"""The JSON types but null; a boolean is a number to Python, so it comes first."""


def _kind(value: object) -> object:
    return next((kind for kind in _KINDS if isinstance(value, kind)), type(value))


def _same(value: object, wanted: object) -> bool | None:
    """Compare JSON values; None if a level has two types, and all others are equal."""
    if wanted is None:
        return value is None
    if _kind(value) != _kind(wanted):
        return None
    if isinstance(value, Mapping) and isinstance(wanted, Mapping):
        one = cast("Mapping[str, object]", value)
        other = cast("Mapping[str, object]", wanted)
        return one.keys() == other.keys() and _all(
            _same(one[key], other[key]) for key in one
        )
    if isinstance(value, list) and isinstance(wanted, list):
        items = cast("list[object]", value)
        others = cast("list[object]", wanted)
        return len(items) == len(others) and _all(map(_same, items, others))
    return value == wanted


def _is_one_of(value: object, wanted: Sequence[object]) -> bool | None:
    """Compare with each value of its type; None if there is none, or one cannot be compared."""
    others = [one for one in wanted if one is not None]
    if value is None and len(others) < len(wanted):
        return True
    results = {_same(value, one) for one in others if _kind(one) == _kind(value)}
    if True in results or not others:
        return bool(results)
    return None if None in results or not results else False


def _all(results: Iterable[bool | None]) -> bool | None:
    known = set(results)
    return False if False in known else None if None in known else True


_MOST_VALUES = 10_000
"""The most JSON values in the conditions on one argument; YAML's aliases count in
full."""
_MOST_LEVELS = 50
_MOST_BITS = 14_000
"""Of a whole number: Python reads and writes none with more than 4,300 digits."""


def _check_json(conditions: object) -> None:
    """Refuse what no argument equals, and what YAML's aliases make endless."""
    level = [conditions]
    number = 0
    for _ in range(_MOST_LEVELS):
        level = [
            part for value in level for part in islice(_parts(value), _MOST_VALUES)
        ]
        number += len(level)
        if number > _MOST_VALUES:
            raise ValueError(
                f"the conditions on an argument may hold {_MOST_VALUES:,} values; there are more"
            )
    if level:
        raise ValueError(
            f"the conditions on an argument may have {_MOST_LEVELS} levels; there are more"
        )


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for name, part in cast("dict[object, object]", value).items():
            if not isinstance(name, str):
                raise ValueError(
                    f"a name in a JSON object is a text; got {shown(name)}"
                )
            yield part
    elif isinstance(value, list):
        yield from cast("list[object]", value)
    elif not _is_scalar(value):
        raise ValueError(
            f"expected JSON values; got {shown(value)}. Quote it if it is a text"
        )


def _is_scalar(value: object) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    return isinstance(value, str | None) or (
        isinstance(value, int) and value.bit_length() <= _MOST_BITS
    )


def _explain(error: ValidationError) -> str:
    problems = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    first = problems[0]
    place = ".".join(str(part) for part in first["loc"]) or "the policy"
    match first["loc"]:
        case ("rules", int(index), *_):
            place = f"rule {index + 1}, {place}"
        case _:
            pass
    if first["type"] == "extra_forbidden":
        known = _keys_at(first["loc"])
        hint = nearest(first["loc"][-1], known)
        return (
            f"The policy has an unknown key: {place}. Correct its spelling or leave it out.{hint} The keys there are "
            f"{', '.join(known)}."
        )
    if first["type"] == "missing":
        return f"The policy lacks {place}. State it: a policy has no silent default."
    return f"The policy cannot be used at {place}: {first['msg']}; got {shown(first['input'])}."


def _keys_at(place: Sequence[int | str]) -> tuple[str, ...]:
    kind: type[BaseModel] = ApprovalPolicy
    if place[0] == "rules":
        kind = ApprovalRule if len(place) == _KEY_OF_RULE else ArgumentPredicate
    return tuple(kind.model_fields)


_KEY_OF_RULE = 3
"""The length of the place of a rule's key: ``rules``, the index and the key."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which would silently take the last of two equal keys."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, Any]:
        constructor = cast("Any", self)
        seen = set[Hashable]()
        given = cast("yaml.Node", node)
        # YAML's loader refuses another node.
        pairs = ()
        if isinstance(given, yaml.MappingNode):
            pairs = node.value
        for key in (constructor.construct_object(key, deep=True) for key, _ in pairs):
            if isinstance(key, Hashable):  # and another key
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        "while reading a policy",
                        node.start_mark,
                        f"the key {key!r} stands twice",
                        node.start_mark,
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)
