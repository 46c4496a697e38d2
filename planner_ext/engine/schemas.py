r"""JSON schemas of answers and of arguments, checked in bounded time. Nothing is ever fetched for a schema.

Values are checked here, since the checks of ``jsonschema``, which reads the schemas,
are not bounded. Every check counts its steps and levels, patterns run in RE2 (``\d``
and ``\w`` are ASCII), and items are compared by their JSON text. What is beyond the
bounds is refused by name.

The keywords are those of the drafts 2020-12 and 2019-09, and those of the drafts 7, 6
and 4 that these replaced. ``format`` is not checked. Keywords beside a ``$ref`` are
checked, too.
"""

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any, Final, TypeAlias, cast

import re2 as _re2  # pyright: ignore[reportMissingTypeStubs]
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from planner_ext.approval.decisions import with_plain_numbers

re2: Any = _re2

_PROBLEMS: Final = 5
"""The most problems of one answer that are described."""

_CHARACTERS: Final = 100
"""The most characters of one value that a problem shows."""

_LEVELS: Final = 100
"""The levels of a value; as `planner_ext.sk.functions.conversion.MAX_DEPTH` for
arguments."""

_LEVELS_OF_CHECK: Final = 250
"""The levels of a check; a reference or a combination of schemas is one more."""

_STEPS = 20_000
_STEPS_A_VALUE = 100
"""The steps of a check: so many, and so many more for each value in what is checked."""

_TEXT_OF_A_STEP: Final = 100
"""The characters of a text that count as one value, and are compared in one step."""

_ITSELF_ALONE: Registry[Any] = Registry()
"""Resolves references within a schema alone."""


class _BeyondBoundsError(Exception):
    """A check would take too long, or a schema cannot be checked; its text follows a name."""


def read_json(text: str) -> Any:
    """Read a JSON value: finite numbers, and a bounded number of levels.

    Raises:
        ValueError: What is wrong with it, to be read after its name.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}.") from None
    except ValueError as error:
        raise ValueError(f"holds a number that cannot be used: {error}.") from None
    if text.count("{") + text.count("[") > _LEVELS and _measured(value) is None:
        raise ValueError(_TOO_DEEP)
    return value


_TOO_DEEP: Final = (
    f"is nested too deeply: it may have {_LEVELS} levels. Write a flatter one."
)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_CHARACTERS]} is too large for a float")
    return value


_DECODER: Final = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def answer_problems(schema: dict[str, Any], value: Any) -> str:
    """Describe how a value violates a schema, or why it cannot be checked; "" if it is valid."""
    try:
        found = islice(
            _At(_Check(schema, value, _KEYWORDS), schema, value).problems(), _PROBLEMS
        )
        return "; ".join(f"${one.path()}: {one.text()}" for one in found)
    except _BeyondBoundsError as refused:
        return f"The answer {refused}"
    except RecursionError:
        return "The answer takes more levels to check than the stack of this process has left. Write a flatter one."


def argument_problem(
    parameters: Mapping[str, Any], arguments: Mapping[str, Any]
) -> str:
    """Describe which argument surely violates its schema, and how, or return "".

    A function's own conversion decides on the rest: patterns, references, unique items,
    invalid schemas, and what is beyond the bounds. It may also accept a number as text,
    a number for a text, or null; and Semantic Kernel's schemas say a bare ``object``
    for an unknown type, and require fields without ``None``.
    """
    known: Mapping[str, Any] = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"{json.dumps(name)} is missing"
    for name, value in arguments.items():
        if name not in known:
            return f"{json.dumps(name)} is not a parameter; there are: {', '.join(known) or 'none'}"
        # The schema cannot be used: the function's own check decides.
        with suppress(Exception):
            check = _Check(known[name], value, _OF_ARGUMENTS)
            for problem in _At(check, known[name], value).problems():
                if problem.is_certain():
                    return f"{json.dumps(name)}{problem.path()}: {problem.text()}"
    return ""


def schema_problem(schema: dict[str, Any]) -> str:
    """Say why a schema is not valid, or what in it cannot be checked; "" if it can be used."""
    draft = str(schema.get("$schema", "")).rstrip("#")
    if draft and not _DRAFTS.search(draft):
        return f"its $schema is {_brief(draft)}. Write it in the draft 2020-12."
    try:
        known: Any = validator_for(schema)
        # A format checker would try patterns in Python's dialect.
        known.check_schema(schema, format_checker=None)
    except SchemaError as error:
        return f"its schema is not valid: {error.message}."
    except RecursionError:
        return "its schema is nested too deeply. Put parts of it under $defs."
    resolver = _resolver_of(schema)
    return next(
        (
            problem
            for part in _parts(schema)
            if (problem := _part_problem(part, resolver))
        ),
        "",
    )


def _resolver_of(schema: dict[str, Any]) -> Any:
    return _ITSELF_ALONE.resolver_with_root(
        Resource.from_contents(schema, default_specification=DRAFT202012)
    )


def _part_problem(part: dict[str, Any], resolver: Any) -> str:
    for dynamic in ("$dynamicRef", "$recursiveRef"):
        if dynamic in part:
            return (
                f"its schema has {dynamic}, which is not followed. Write it with $ref."
            )
    reference = part.get("$ref")
    try:
        if isinstance(reference, str):
            resolver.lookup(reference)
        for pattern in (part.get("pattern", ""), *part.get("patternProperties", ())):
            _pattern(pattern)
    except Unresolvable:
        return f"its schema refers to {reference!r}, which is not in it. Put that under $defs."
    except _BeyondBoundsError as refused:
        return f"its schema {refused}"
    return ""


_DRAFTS: Final = re.compile(
    r"json-schema\.org/(?:draft/20(?:20-12|19-09)|draft-0[467])/schema$"
)


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        known = cast("dict[str, Any]", part)
        yield known
        for name, inner in known.items():
            if name in _NAMED and isinstance(inner, dict):
                waiting += cast("dict[str, Any]", inner).values()
            elif name in _INNER:
                waiting += (
                    cast("list[Any]", inner) if isinstance(inner, list) else [inner]
                )


_NAMED: Final = {
    "properties",
    "patternProperties",
    "dependentSchemas",
    "dependencies",
    "$defs",
    "definitions",
}
_INNER: Final = {
    *(
        "items",
        "prefixItems",
        "additionalItems",
        "contains",
        "unevaluatedItems",
        "additionalProperties",
    ),
    *(
        "propertyNames",
        "unevaluatedProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
    ),
}


# Patterns of others.


@lru_cache(maxsize=256)
def _pattern(text: str) -> Any:
    """Compile a pattern whose time is in proportion to the text.

    Raises:
        _BeyondBoundsError: If RE2 cannot express it.
    """
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    try:
        return re2.compile(_ESCAPE.sub(_escape_of_re2, text).encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        said: Any = error.args[0]
        why = (
            said.decode(errors="replace")
            if isinstance(said, bytes)
            else "it is not valid Unicode"
        )
        raise _BeyondBoundsError(
            f"has the pattern {_brief(text)}, which cannot run in time in proportion to the text ({why}). Patterns run "
            "in RE2: write it without lookahead, lookbehind, backreferences and repeats over 1000, or take a pydantic "
            "model with a validator of its own."
        ) from None


_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|.)", re.DOTALL)


def _escape_of_re2(found: re.Match[str]) -> str:
    if found[1] is not None:
        return rf"\x{{{found[1]}}}"
    return r"\z" if found[0] == r"\Z" else found[0]


# Texts and sizes.


_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _CHARACTERS
_REPR.maxlist = _REPR.maxdict = 8


def _brief(value: object) -> str:
    return _REPR.repr(value)


def _key_text(key: str | int) -> str:
    return (
        f"[{key}]"
        if isinstance(key, int)
        else f".{key}"
        if _NAME.fullmatch(key)
        else f"[{_brief(key)}]"
    )


_NAME: Final = re.compile(r"[A-Za-z]\w{0,99}")


def _listed(types: Any) -> list[str]:
    return (
        [types]
        if isinstance(types, str)
        else [str(one) for one in cast("list[object]", types)]
    )


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def _measured(value: object) -> int | None:
    """Count the values, a long text as several; None if they have too many levels."""
    level = [value]
    number = 0
    for _ in range(_LEVELS):
        inner: list[object] = []
        for one in level:
            number += 1 + (len(one) // _TEXT_OF_A_STEP if isinstance(one, str) else 0)
            if isinstance(one, dict):
                inner += cast("dict[str, object]", one).values()
            elif isinstance(one, list):
                inner += cast("list[object]", one)
        if not inner:
            return number
        level = inner
    return (
        None
        if any(isinstance(one, dict | list) for one in level)
        else number + len(level)
    )


# The check.


class _Check:
    def __init__(self, root: Any, value: Any, keywords: "Mapping[str, _Rule]") -> None:
        """Prepare a check of a value against a schema, of which these keywords are read."""
        values = _measured(value)
        if values is None:
            raise _BeyondBoundsError(_TOO_DEEP)
        self.keywords = keywords
        self._steps = self._left = _STEPS + _STEPS_A_VALUE * values
        self._root = root
        self._targets: dict[str, Any] = {}
        self._texts: dict[int, frozenset[str]] = {}

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _BeyondBoundsError(
                f"takes more than {self._steps:,} steps to check against its schema. Write a shorter and flatter one."
            )

    def text_of(self, value: Any) -> str:
        """Write a value so that equal ones have one text; whole numbers have one spelling."""
        self.spend(_measured(value) or 0)
        return json.dumps(with_plain_numbers(value), sort_keys=True)

    def is_in(self, value: Any, values: Any) -> bool:
        if id(values) not in self._texts:
            self._texts[id(values)] = frozenset(map(self.text_of, values))
        return self.text_of(value) in self._texts[id(values)]

    def is_equal(self, value: Any, wanted: Any) -> bool:
        return self.text_of(value) == self.text_of(wanted)

    def match(self, text: str, pattern: str) -> bool:
        self.spend(1 + len(text) // _TEXT_OF_A_STEP)
        return _pattern(pattern).search(text.encode(errors="replace")) is not None

    def target(self, reference: str) -> Any:
        if reference not in self._targets:
            self._targets[reference] = (
                _resolver_of(self._root).lookup(reference).contents
            )
        return self._targets[reference]


class _At:
    """A value and a schema that it is checked against.

    ``around`` is the value around it, under whose ``key`` it is; without a key, another
    schema of the same value.
    """

    __slots__ = ("around", "check", "key", "level", "schema", "value")

    def __init__(
        self,
        check: _Check,
        schema: Any,
        value: Any,
        around: "_At | None" = None,
        key: str | int | None = None,
    ) -> None:
        self.check = check
        self.schema = schema
        self.value = value
        self.around = around
        self.key = key
        self.level: int = around.level + 1 if around else 0

    def under(self, schema: Any) -> "_At":
        """Check the value against another schema, too."""
        return _At(self.check, schema, self.value, self)

    def inner(self, schema: Any, key: str | int) -> "_At":
        """Check a property or an item of the value."""
        return _At(self.check, schema, self.value[key], self, key)

    def fits(self) -> bool:
        return next(self.problems(), None) is None

    def problems(self) -> "_Found":
        """Find how the value violates the schema."""
        schema = self.schema
        if isinstance(schema, dict):
            return self._problems(cast("dict[str, Any]", schema))
        problem = _Problem(self, "", None, "False schema does not allow {value}")
        return iter((problem,) if schema is False else ())

    def _problems(self, schema: dict[str, Any]) -> "_Found":
        if self.level >= _LEVELS_OF_CHECK:
            raise _BeyondBoundsError(
                f"takes more than {_LEVELS_OF_CHECK} levels to check: it is nested too deeply, or its schema refers to "
                "itself without end."
            )
        check = self.check
        value = self.value
        check.spend(1)
        if "$ref" in schema and "$ref" not in check.keywords:
            return
        for keyword, wanted in schema.items():
            rule = check.keywords.get(keyword)
            if rule is None:
                continue
            check.spend(1)
            kind, find, said = rule
            if not isinstance(value, kind) or (
                kind is _NUMBER and isinstance(value, bool)
            ):
                continue
            if said is None:
                yield from find(self, keyword, wanted)
            elif not find(check, value, wanted):
                yield _Problem(self, keyword, wanted, said)

    def evaluated(self) -> set[str | int]:
        """List the properties or items that the schema evaluates, if the value fits it."""
        part: object = self.schema
        if not isinstance(part, dict) or not self.fits():
            return set()
        schema = cast("dict[str, Any]", part)
        is_object = isinstance(self.value, dict)
        seen = self._named(schema) if is_object else self._indexed(schema)
        parts = [
            part
            for keyword in ("allOf", "anyOf", "oneOf")
            for part in schema.get(keyword, ())
        ]
        if "$ref" in schema:
            parts.append(self.check.target(schema["$ref"]))
        if "if" in schema:
            parts += [schema["if"], self.consequence(schema["if"])]
        parts += [
            part
            for name, part in schema.get("dependentSchemas", {}).items()
            if name in self.value
        ]
        return seen.union(*(self.under(part).evaluated() for part in parts))

    def consequence(self, condition: Any) -> Any:
        """Choose the schema that follows a condition."""
        branch = "then" if self.under(condition).fits() else "else"
        return self.schema.get(branch, True)

    def unknown(self) -> Iterator[str]:
        """Find the properties that no ``properties`` or ``patternProperties`` names."""
        known = self.schema.get("properties", ())
        patterns = self.schema.get("patternProperties", ())
        for name in self.value:
            if name not in known and not any(
                self.check.match(name, pattern) for pattern in patterns
            ):
                yield name

    def _named(self, schema: dict[str, Any]) -> set[str | int]:
        self.check.spend(len(self.value))
        names = {*self.value}
        if "additionalProperties" in schema or "unevaluatedProperties" in schema:
            return names
        return names.difference(self.unknown())

    def _indexed(self, schema: dict[str, Any]) -> set[str | int]:
        number = len(self.value)
        self.check.spend(number)
        rest = {"items", "additionalItems", "unevaluatedItems"} & schema.keys()
        if rest and not (rest == {"items"} and isinstance(schema["items"], list)):
            return {*range(number)}
        prefix = schema.get("prefixItems", schema.get("items", ()))
        seen: set[str | int] = {*range(min(len(prefix), number))}
        if "contains" in schema:
            seen |= {
                index
                for index in range(number)
                if self.inner(schema["contains"], index).fits()
            }
        return seen


@dataclass(frozen=True, slots=True)
class _Problem:
    """A value that violates a keyword; ``beneath`` has a problem of each schema that it combines."""

    at: _At
    keyword: str
    wanted: Any
    said: str
    beneath: tuple["_Problem", ...] = ()

    def path(self) -> str:
        keys: list[str] = []
        at: _At | None = self.at
        while at is not None:
            if at.key is not None:
                keys.append(_key_text(at.key))
            at = at.around
        return "".join(reversed(keys))

    def text(self) -> str:
        """Describe it; of value and condition, the beginning."""
        wanted = (
            ", ".join(map(repr, _listed(self.wanted)))
            if self.keyword == "type"
            else _brief(self.wanted)
        )
        return self.said.format(value=_brief(self.at.value), wanted=wanted)

    def is_certain(self) -> bool:
        """Return whether a function's own conversion refuses the value, too."""
        value = self.at.value
        match self.keyword:
            case "required":
                return False
            case "anyOf" | "oneOf":
                return all(one.is_certain() for one in self.beneath)
            case "type":
                types = set(_listed(self.wanted))
                described = (
                    self.at.schema.get("properties")
                    or "additionalProperties" in self.at.schema
                )
                if value is None or ("object" in types and not described):
                    return False
                if isinstance(value, str):
                    return not (types & {"integer", "number"} and _is_number(value))
                return not ("string" in types and isinstance(value, bool | int | float))
            case _:
                return value is not None


_Found: TypeAlias = Iterator[_Problem]


# Conditions on the value itself.


def _is_of_type(_: _Check, value: Any, types: Any) -> bool:
    return any(_TYPES[name](value) for name in _listed(types) if name in _TYPES)


def _is_least(_: _Check, value: float, least: float) -> bool:
    return value >= least


def _is_most(_: _Check, value: float, most: float) -> bool:
    return value <= most


def _is_multiple(_: _Check, value: float, wanted: float) -> bool:
    """Compare the decimal numbers exactly, as they are written."""
    return Fraction(str(value)) % Fraction(str(wanted)) == 0


def _has_least(_: _Check, value: Any, least: int) -> bool:
    return len(value) >= least


def _has_most(_: _Check, value: Any, most: int) -> bool:
    return len(value) <= most


def _is_distinct(check: _Check, value: list[Any], wanted: bool) -> bool:
    return not wanted or len(set(map(check.text_of, value))) == len(value)


def _exclusive(at: _At, keyword: str, wanted: Any) -> _Found:
    if isinstance(wanted, bool):  # in draft 4, whether minimum and maximum are excluded
        bound = keyword.removeprefix("exclusive").lower()
        if not wanted or bound not in at.schema:
            return
        wanted = at.schema[bound]
    if keyword == "exclusiveMinimum" and at.value <= wanted:
        yield _Problem(
            at,
            keyword,
            wanted,
            "{value} is less than or equal to the minimum of {wanted}",
        )
    if keyword == "exclusiveMaximum" and at.value >= wanted:
        yield _Problem(
            at,
            keyword,
            wanted,
            "{value} is greater than or equal to the maximum of {wanted}",
        )


def _required(at: _At, _: str, wanted: Any) -> _Found:
    if isinstance(wanted, list):
        names = cast("list[Any]", wanted)
        at.check.spend(len(names))
        for name in names:
            if name not in at.value:
                yield _Problem(at, "required", name, "{wanted} is a required property")


# Schemas of what is in the value.


def _properties(at: _At, _: str, wanted: Any) -> _Found:
    at.check.spend(len(wanted))
    for name, schema in wanted.items():
        if name in at.value:
            yield from at.inner(schema, name).problems()


def _pattern_properties(at: _At, _: str, wanted: Any) -> _Found:
    for pattern, schema in wanted.items():
        for name in at.value:
            if at.check.match(name, pattern):
                yield from at.inner(schema, name).problems()


def _additional_properties(at: _At, keyword: str, wanted: Any) -> _Found:
    if (
        at.schema.get("patternProperties")
        and "patternProperties" not in at.check.keywords
    ):
        return  # it is about the names that no pattern matches
    at.check.spend(len(at.value))
    yield from _further(at, keyword, wanted, at.unknown())


def _unevaluated(at: _At, keyword: str, wanted: Any) -> _Found:
    seen = at.under(
        {name: part for name, part in at.schema.items() if name != keyword}
    ).evaluated()
    keys = range(len(at.value)) if keyword == "unevaluatedItems" else at.value
    others = (key for key in keys if key not in seen)
    yield from _further(at, keyword, wanted, others)


def _further(at: _At, keyword: str, wanted: Any, keys: Iterable[Any]) -> _Found:
    """Check what no other keyword is about; where nothing may be, its key is the problem."""
    for key in keys:
        if wanted is False:
            what = "property" if isinstance(key, str) else "item"
            # About the one value, and said at the place of all of them.
            one = _At(at.check, wanted, at.value[key], at)
            yield _Problem(
                one, keyword, key, f"Additional {what} {{wanted}} is not allowed"
            )
        else:
            yield from at.inner(wanted, key).problems()


def _property_names(at: _At, _: str, wanted: Any) -> _Found:
    for name in at.value:
        yield from _At(at.check, wanted, name, at).problems()


def _dependent(at: _At, keyword: str, wanted: Any) -> _Found:
    at.check.spend(len(wanted))
    for name, needs in wanted.items():
        if name in at.value:
            yield from (
                _required(at, keyword, needs)
                if isinstance(needs, list)
                else at.under(needs).problems()
            )


def _prefix_items(at: _At, _: str, wanted: Any) -> _Found:
    for index in range(min(len(wanted), len(at.value))):
        yield from at.inner(wanted[index], index).problems()


def _items(at: _At, keyword: str, wanted: Any) -> _Found:
    if isinstance(wanted, list):  # in draft 2019-09 and before
        return _prefix_items(at, keyword, wanted)
    return _further(
        at, keyword, wanted, range(len(at.schema.get("prefixItems", ())), len(at.value))
    )


def _additional_items(at: _At, keyword: str, wanted: Any) -> _Found:
    prefix: Any = at.schema.get("items")
    if isinstance(prefix, list):
        yield from _further(
            at, keyword, wanted, range(len(cast("list[Any]", prefix)), len(at.value))
        )


def _contains(at: _At, keyword: str, wanted: Any) -> _Found:
    places = range(len(at.value))
    number = sum(at.inner(wanted, index).fits() for index in places)
    least = at.schema.get("minContains", 1)
    most = at.schema.get("maxContains", math.inf)
    if not least <= number <= most:
        said = f"{{value}} has {number} items that fit {{wanted}}: there must be {least} to {most}"
        yield _Problem(at, keyword, wanted, said)


# Schemas that are combined.


def _reference(at: _At, _: str, wanted: Any) -> _Found:
    return at.under(at.check.target(wanted)).problems()


def _if(at: _At, _: str, wanted: Any) -> _Found:
    return at.under(at.consequence(wanted)).problems()


def _all_of(at: _At, _: str, wanted: Any) -> _Found:
    for schema in wanted:
        yield from at.under(schema).problems()


def _any_of(at: _At, keyword: str, wanted: Any) -> _Found:
    beneath: list[_Problem] = []
    for schema in wanted:
        problem = next(at.under(schema).problems(), None)
        if problem is not None:
            beneath.append(problem)
        elif keyword == "anyOf":
            return
    fitting = len(wanted) - len(beneath)
    if fitting == 0:
        said = "{value} is not valid under any of the given schemas"
        yield _Problem(at, keyword, wanted, said, tuple(beneath))
    elif fitting > 1:
        said = f"{{value}} is valid under {fitting} of the given schemas, and may be under one"
        yield _Problem(at, keyword, wanted, said)


def _not(at: _At, keyword: str, wanted: Any) -> _Found:
    if at.under(wanted).fits():
        yield _Problem(
            at, keyword, wanted, "{value} should not be valid under {wanted}"
        )


_NUMBER: Final = int | float

_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "number": lambda value: isinstance(value, _NUMBER) and not isinstance(value, bool),
    "integer": lambda value: (
        _TYPES["number"](value) and (isinstance(value, int) or value.is_integer())
    ),
}


_SHORT: Final = "{value} is too short: there must be at least {wanted}"
_LONG: Final = "{value} is too long: there may be at most {wanted}"

_Rule: TypeAlias = tuple[Any, Callable[..., Any], str | None]

_KEYWORDS: Final[Mapping[str, _Rule]] = {
    "type": (object, _is_of_type, "{value} is not of type {wanted}"),
    "enum": (object, _Check.is_in, "{value} is not one of {wanted}"),
    "const": (object, _Check.is_equal, "{wanted} was expected, not {value}"),
    "minimum": (_NUMBER, _is_least, "{value} is less than the minimum of {wanted}"),
    "maximum": (_NUMBER, _is_most, "{value} is greater than the maximum of {wanted}"),
    "multipleOf": (_NUMBER, _is_multiple, "{value} is not a multiple of {wanted}"),
    "minLength": (str, _has_least, _SHORT),
    "maxLength": (str, _has_most, _LONG),
    "minItems": (list, _has_least, _SHORT),
    "maxItems": (list, _has_most, _LONG),
    "minProperties": (dict, _has_least, _SHORT),
    "maxProperties": (dict, _has_most, _LONG),
    "pattern": (str, _Check.match, "{value} does not match {wanted}"),
    "uniqueItems": (list, _is_distinct, "{value} has items that are equal"),
    "exclusiveMinimum": (_NUMBER, _exclusive, None),
    "exclusiveMaximum": (_NUMBER, _exclusive, None),
    "required": (dict, _required, None),
    "properties": (dict, _properties, None),
    "patternProperties": (dict, _pattern_properties, None),
    "additionalProperties": (dict, _additional_properties, None),
    "unevaluatedProperties": (dict, _unevaluated, None),
    "propertyNames": (dict, _property_names, None),
    "dependentRequired": (dict, _dependent, None),
    "dependentSchemas": (dict, _dependent, None),
    "dependencies": (dict, _dependent, None),
    "prefixItems": (list, _prefix_items, None),
    "items": (list, _items, None),
    "additionalItems": (list, _additional_items, None),
    "unevaluatedItems": (list, _unevaluated, None),
    "contains": (list, _contains, None),
    "$ref": (object, _reference, None),
    "allOf": (object, _all_of, None),
    "anyOf": (object, _any_of, None),
    "oneOf": (object, _any_of, None),
    "not": (object, _not, None),
    "if": (object, _if, None),
}
"""The keywords: the values that each is about, then one of two checks.

A condition, with words for its problem, holds for a value or not. The other kind finds
problems in what is in the value, or under other schemas.
"""

_OF_ARGUMENTS: Final = {
    keyword: _KEYWORDS[keyword]
    for keyword in (
        *(
            "type",
            "enum",
            "const",
            "required",
            "minLength",
            "maxLength",
            "minItems",
            "maxItems",
        ),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("items", "additionalProperties", "properties", "anyOf", "allOf", "oneOf"),
    )
}
"""The keywords of which a function's own conversion surely thinks the same."""
