r"""JSON schemas of answers and of arguments, checked in bounded time. Nothing is ever fetched for a schema.

A value is a model's or a person's, and the schema of an argument may be a stranger's. So every check counts its steps,
and may take so many for each value that it compares; it goes down a bounded number of levels; patterns run in RE2,
whose time is in proportion to the text; items are compared by their JSON text. What is beyond that is refused by name.
A check of its own, since that of ``jsonschema`` has none of these bounds; that library checks the schemas themselves.

Read are the keywords of the drafts 2020-12 and 2019-09, and those of the drafts 7, 6 and 4 that these replaced. As in
the drafts, ``format`` is a note and no condition. What stands beside a ``$ref`` counts in each of them. A pattern means
what RE2 makes of it: ``\d`` and ``\w`` are ASCII.
"""

import json
import math
import operator
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
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
"""Has no types."""

_PROBLEMS: Final = 5
"""The number of problems of one answer that are described."""

_CHARACTERS: Final = 100
"""The most characters of one value that a problem shows."""

_LEVELS: Final = 100
"""The levels of nesting that a value may have; as `planner_ext.sk.functions.conversion.MAX_DEPTH` for arguments."""

_LEVELS_OF_CHECK: Final = 250
"""The levels of a check: a reference or a combination of schemas is one more on the same level of the value."""

_STEPS = 20_000
_STEPS_A_VALUE = 100
"""The steps of a check: so many, and so many more for each value in what is checked."""

_TEXT_OF_A_STEP: Final = 100
"""The characters of a text that count as one value, and that are compared in one step."""

_ITSELF_ALONE: Registry[Any] = Registry()
"""Resolves the references of a schema within itself, and no other."""

Place: TypeAlias = "tuple[Place | None, str | int | None, int]"
"""A place in a value: that of the value around it, the key or index in that, and the level of the check."""

_TOP: Final[Place] = (None, None, 0)


class _BeyondBoundsError(Exception):
    """A check that would take too long, or a schema that cannot be checked; the text is to be read after a name."""


def read_json(text: str) -> Any:
    """Read a JSON value of a model or a person: finite numbers, and a bounded number of levels.

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


_TOO_DEEP: Final = f"is nested too deeply: it may have {_LEVELS} levels. Write a flatter one."


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_CHARACTERS]} is too large for a float")
    return value


_DECODER: Final = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def answer_problems(schema: dict[str, Any], value: Any) -> str:
    """Describe how JSON values violate a schema, or why they cannot be checked; "" if they do not violate it."""
    try:
        found = islice(_Check(schema, value).problems(schema, value, _TOP), _PROBLEMS)
        return "; ".join(f"${one.path()}: {one.text()}" for one in found)
    except _BeyondBoundsError as refused:
        return f"The answer {refused}"
    except RecursionError:
        return "The answer takes more levels to check than the stack of this process has left. Write a flatter one."


def argument_problem(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Describe which argument violates the schema of a function's parameters, and how; "" if none surely does.

    Keywords that a function's own conversion may see otherwise are left to it: patterns, references, unique items. So
    is what cannot be checked within the bounds, and an invalid schema.

    A value that a function's own conversion may accept passes: a number as text, a number for a text, null. So does
    what Semantic Kernel's schemas say wrongly: a bare ``object`` for a type that they do not know, and each field of a
    model without ``None`` as required.
    """
    known: Mapping[str, Any] = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"{json.dumps(name)} is missing"
    for name, value in arguments.items():
        if name not in known:
            return f"{json.dumps(name)} is not a parameter; there are: {', '.join(known) or 'none'}"
        with suppress(Exception):  # of a schema that cannot be used: the function's own check decides
            for problem in _Check(known[name], value, only=_OF_ARGUMENTS).problems(known[name], value, _TOP):
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
        known.check_schema(schema, format_checker=None)  # a format checker would try patterns in Python's dialect
    except SchemaError as error:
        return f"its schema is not valid: {error.message}."
    except RecursionError:
        return "its schema is nested too deeply. Put parts of it under $defs."
    resolver = _resolver_of(schema)
    return next((problem for part in _parts(schema) if (problem := _part_problem(part, resolver))), "")


def _resolver_of(schema: dict[str, Any]) -> Any:
    return _ITSELF_ALONE.resolver_with_root(Resource.from_contents(schema, default_specification=DRAFT202012))


def _part_problem(part: dict[str, Any], resolver: Any) -> str:
    for dynamic in ("$dynamicRef", "$recursiveRef"):
        if dynamic in part:
            return f"its schema has {dynamic}, which is not followed. Write it with $ref."
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


_DRAFTS: Final = re.compile(r"json-schema\.org/(?:draft/20(?:20-12|19-09)|draft-0[467])/schema$")


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Walk the schemas in a schema, itself first."""
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
                waiting += cast("list[Any]", inner) if isinstance(inner, list) else [inner]


_NAMED: Final = {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}
_INNER: Final = {
    *("items", "prefixItems", "additionalItems", "contains", "unevaluatedItems", "additionalProperties"),
    *("propertyNames", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
}


# Patterns of others.


@lru_cache(maxsize=256)
def _pattern(text: str) -> Any:
    """Compile a pattern to run in a time in proportion to the text.

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
        why = said.decode(errors="replace") if isinstance(said, bytes) else "it is not valid Unicode"
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


def _matches(pattern: str, text: str) -> bool:
    return _pattern(pattern).search(text.encode(errors="replace")) is not None


# The check.


@dataclass(frozen=True, slots=True)
class _Problem:
    """A value that violates a keyword; ``beneath`` has a problem of each schema that it combines."""

    place: Place
    keyword: str
    wanted: Any
    value: Any
    schema: Any
    said: str
    beneath: tuple["_Problem", ...] = ()

    def path(self) -> str:
        keys: list[str] = []
        place: Place | None = self.place
        while place is not None:
            place, key, _ = place
            if key is not None:
                keys.append(_key_text(key))
        return "".join(reversed(keys))

    def text(self) -> str:
        """Describe it; of the value, and of what is wanted, the beginning."""
        wanted = ", ".join(map(repr, _listed(self.wanted))) if self.keyword == "type" else _brief(self.wanted)
        return self.said.format(value=_brief(self.value), wanted=wanted)

    def is_certain(self) -> bool:
        """Return whether a function's own conversion refuses the value, too."""
        value = self.value
        match self.keyword:
            case "required":
                return False
            case "anyOf" | "oneOf":
                return all(one.is_certain() for one in self.beneath)
            case "type":
                types = set(_listed(self.wanted))
                described = self.schema.get("properties") or "additionalProperties" in self.schema
                if value is None or ("object" in types and not described):
                    return False
                if isinstance(value, str):
                    return not (types & {"integer", "number"} and _is_number(value))
                return not ("string" in types and isinstance(value, bool | int | float))
            case _:
                return value is not None


_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _CHARACTERS
_REPR.maxlist = _REPR.maxdict = 8


def _brief(value: object) -> str:
    return _REPR.repr(value)


def _key_text(key: str | int) -> str:
    return f"[{key}]" if isinstance(key, int) else f".{key}" if _NAME.fullmatch(key) else f"[{_brief(key)}]"


_NAME: Final = re.compile(r"[A-Za-z]\w{0,99}")


def _listed(types: Any) -> list[str]:
    return [types] if isinstance(types, str) else [str(one) for one in cast("list[object]", types)]


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def _measured(value: object) -> int | None:
    """Count the values in JSON values, with a long text as several; None if they have too many levels."""
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
    return None if any(isinstance(one, dict | list) for one in level) else number + len(level)


_Found: TypeAlias = Iterator[_Problem]


class _Check:
    """One check of a value: what it costs is counted, and it ends by name where that is beyond its bounds."""

    def __init__(self, root: Any, value: Any, only: frozenset[str] | None = None) -> None:
        """Prepare a check of a value against a schema; ``only`` names the keywords that are read, None all."""
        values = _measured(value)
        if values is None:
            raise _BeyondBoundsError(_TOO_DEEP)
        self._steps = self._left = _STEPS + _STEPS_A_VALUE * values
        self._only = only
        self._root = root
        self._targets: dict[str, Any] = {}
        self._texts: dict[int, frozenset[str]] = {}

    def problems(self, schema: Any, value: Any, place: Place) -> _Found:
        """Find how a value violates a schema."""
        if not isinstance(schema, dict):
            if schema is False:
                yield _Problem(place, "", None, value, schema, "False schema does not allow {value}")
            return
        if place[2] >= _LEVELS_OF_CHECK:
            raise _BeyondBoundsError(
                f"takes more than {_LEVELS_OF_CHECK} levels to check: it is nested too deeply, or its schema refers to "
                "itself without end."
            )
        self._spend(1)
        known = cast("dict[str, Any]", schema)
        if self._only is not None and "$ref" in known:
            return
        for keyword in known:
            if (reads := _KEYWORDS.get(keyword)) is None or (self._only is not None and keyword not in self._only):
                continue
            self._spend(1)
            kind, check = reads
            if isinstance(value, kind) and not (kind is _NUMBER and isinstance(value, bool)):
                yield from check(self, known, keyword, value, place)

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _BeyondBoundsError(
                f"takes more than {self._steps:,} steps to check against its schema. Write a shorter and flatter one."
            )

    def _fits(self, schema: Any, value: Any, place: Place) -> bool:
        return next(self.problems(schema, value, _deeper(place)), None) is None

    def _text_of(self, value: Any) -> str:
        """Write a value so that equal ones have one text; whole numbers have one spelling."""
        self._spend(_measured(value) or 0)
        return json.dumps(with_plain_numbers(value), sort_keys=True)

    def _is_in(self, values: Any, value: Any) -> bool:
        if id(values) not in self._texts:
            self._texts[id(values)] = frozenset(map(self._text_of, values))
        return self._text_of(value) in self._texts[id(values)]

    def _match(self, pattern: str, text: str) -> bool:
        self._spend(1 + len(text) // _TEXT_OF_A_STEP)
        return _matches(pattern, text)

    def _target(self, reference: str) -> Any:
        if reference not in self._targets:
            self._targets[reference] = _resolver_of(self._root).lookup(reference).contents
        return self._targets[reference]

    # Conditions on the value itself.

    def type(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        wanted = schema[keyword]
        if not any(_TYPES[name](value) for name in _listed(wanted) if name in _TYPES):
            yield _Problem(place, keyword, wanted, value, schema, "{value} is not of type {wanted}")

    def equality(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        wanted = schema[keyword]
        if keyword == "enum" and not self._is_in(wanted, value):
            yield _Problem(place, keyword, wanted, value, schema, "{value} is not one of {wanted}")
        if keyword == "const" and self._text_of(value) != self._text_of(wanted):
            yield _Problem(place, keyword, wanted, value, schema, "{wanted} was expected, not {value}")

    def number(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        wanted = schema[keyword]
        if isinstance(wanted, bool):  # in draft 4 it says of minimum and maximum whether they are excluded
            of, keyword = ("minimum", keyword) if keyword.endswith("Minimum") else ("maximum", keyword)
            if not wanted or of not in schema:
                return
            wanted = schema[of]
        holds, said = _OF_NUMBERS[keyword]
        if not holds(value, wanted):
            yield _Problem(place, keyword, wanted, value, schema, f"{{value}} is {said} {{wanted}}")

    def length(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        wanted = schema[keyword]
        too_short = keyword.startswith("min") and len(value) < wanted
        too_long = keyword.startswith("max") and len(value) > wanted
        if too_short or too_long:
            said = "short: there must be at least" if too_short else "long: there may be at most"
            yield _Problem(place, keyword, wanted, value, schema, f"{{value}} is too {said} {{wanted}}")

    def pattern(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        if not self._match(schema[keyword], value):
            yield _Problem(place, keyword, schema[keyword], value, schema, "{value} does not match {wanted}")

    def unique(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        if schema[keyword] and len(set(map(self._text_of, value))) < len(value):
            yield _Problem(place, keyword, True, value, schema, "{value} has items that are equal")

    def required(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        if not isinstance(wanted := schema[keyword], list):
            return
        self._spend(len(cast("list[Any]", wanted)))
        for name in cast("list[Any]", wanted):
            if name not in value:
                yield _Problem(place, keyword, name, value, schema, "{wanted} is a required property")

    # Schemas of what is in the value.

    def properties(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        self._spend(len(schema[keyword]))
        for name, inner in schema[keyword].items():
            if name in value:
                yield from self.problems(inner, value[name], _within(place, name))

    def pattern_properties(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        for pattern, inner in schema[keyword].items():
            for name, one in value.items():
                if self._match(pattern, name):
                    yield from self.problems(inner, one, _within(place, name))

    def additional_properties(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        patterns = schema.get("patternProperties", {})
        if patterns and self._only is not None:
            return  # it is about the names that no pattern matches
        known = schema.get("properties", {})
        self._spend(len(value))
        for name, one in value.items():
            if name not in known and not any(self._match(pattern, name) for pattern in patterns):
                yield from self._further(schema, keyword, one, place, name)

    def unevaluated_properties(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        seen = self._evaluated({name: part for name, part in schema.items() if name != keyword}, value, place)
        for name, one in value.items():
            if name not in seen:
                yield from self._further(schema, keyword, one, place, name)

    def _further(self, schema: dict[str, Any], keyword: str, value: Any, place: Place, name: str | int) -> _Found:
        """Check what no other keyword is about; where nothing further may be there, its name is the problem."""
        if schema[keyword] is False:
            what = "property" if isinstance(name, str) else "item"
            said = f"Additional {what} {{wanted}} is not allowed"
            yield _Problem(place, keyword, name, value, schema, said)
            return
        yield from self.problems(schema[keyword], value, _within(place, name))

    def property_names(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        for name in value:
            yield from self.problems(schema[keyword], name, _deeper(place))

    def dependent(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        self._spend(len(schema[keyword]))
        for name, needs in schema[keyword].items():
            if name not in value:
                continue
            if isinstance(needs, list):
                yield from self.required({"required": needs}, "required", value, place)
            else:
                yield from self.problems(needs, value, _deeper(place))

    def prefix_items(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        for index, (inner, one) in enumerate(zip(schema[keyword], value, strict=False)):
            yield from self.problems(inner, one, _within(place, index))

    def items(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        if isinstance(schema[keyword], list):  # in draft 2019-09 and before
            yield from self.prefix_items(schema, keyword, value, place)
            return
        first = len(schema.get("prefixItems", ()))
        for index in range(first, len(value)):
            yield from self._further(schema, keyword, value[index], place, index)

    def additional_items(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        if isinstance(prefix := schema.get("items"), list):
            for index in range(len(cast("list[Any]", prefix)), len(value)):
                yield from self._further(schema, keyword, value[index], place, index)

    def unevaluated_items(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        seen = self._evaluated({name: part for name, part in schema.items() if name != keyword}, value, place)
        for index, one in enumerate(value):
            if index not in seen:
                yield from self._further(schema, keyword, one, place, index)

    def contains(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        number = sum(self._fits(schema[keyword], one, place) for one in value)
        least = schema.get("minContains", 1)
        most = schema.get("maxContains", math.inf)
        if not least <= number <= most:
            said = f"{{value}} has {number} items that fit {{wanted}}: there must be {least} to {most}"
            yield _Problem(place, keyword, schema[keyword], value, schema, said)

    # Schemas that are combined.

    def reference(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        yield from self.problems(self._target(schema[keyword]), value, _deeper(place))

    def all_of(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        for inner in schema[keyword]:
            yield from self.problems(inner, value, _deeper(place))

    def any_of(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        beneath: list[_Problem] = []
        fitting = 0
        for inner in schema[keyword]:
            problem = next(self.problems(inner, value, _deeper(place)), None)
            if problem is not None:
                beneath.append(problem)
            elif keyword == "anyOf":
                return
            else:
                fitting += 1
        if fitting == 0:
            said = "{value} is not valid under any of the given schemas"
            yield _Problem(place, keyword, schema[keyword], value, schema, said, tuple(beneath))
        elif fitting > 1:
            said = f"{{value}} is valid under {fitting} of the given schemas, and may be under one"
            yield _Problem(place, keyword, schema[keyword], value, schema, said)

    def none_of(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        if self._fits(schema[keyword], value, place):
            said = "{value} should not be valid under {wanted}"
            yield _Problem(place, keyword, schema[keyword], value, schema, said)

    def condition(self, schema: dict[str, Any], keyword: str, value: Any, place: Place) -> _Found:
        follows = "then" if self._fits(schema[keyword], value, place) else "else"
        yield from self.problems(schema.get(follows, True), value, _deeper(place))

    def _evaluated(self, schema: Any, value: Any, place: Place) -> set[str | int]:
        """List the properties or items that a schema which the value fits is about, as ``unevaluated...`` counts."""
        if not isinstance(schema, dict) or not self._fits(schema, value, place):
            return set()
        known = cast("dict[str, Any]", schema)
        inner: list[Any] = []
        named = isinstance(value, dict)
        seen = self._named(known, cast("Any", value)) if named else self._indexed(known, value, place)
        for keyword in ("allOf", "anyOf", "oneOf"):
            inner += known.get(keyword, [])
        if "$ref" in known:
            inner.append(self._target(known["$ref"]))
        if "if" in known:
            follows = "then" if self._fits(known["if"], value, place) else "else"
            inner += [known["if"], known.get(follows)]
        for name, part in known.get("dependentSchemas", {}).items():
            inner += [part] if name in value else []
        for part in inner:
            seen |= self._evaluated(part, value, _deeper(place))
        return seen

    def _named(self, schema: dict[str, Any], value: dict[str, Any]) -> set[str | int]:
        self._spend(len(value))
        if "additionalProperties" in schema or "unevaluatedProperties" in schema:
            return {*value}
        patterns = schema.get("patternProperties", ())
        known = schema.get("properties", {})
        return {name for name in value if name in known or any(self._match(one, name) for one in patterns)}

    def _indexed(self, schema: dict[str, Any], value: list[Any], place: Place) -> set[str | int]:
        self._spend(len(value))
        rest = {"items", "additionalItems", "unevaluatedItems"} & schema.keys()
        if rest and not (rest == {"items"} and isinstance(schema["items"], list)):
            return {*range(len(value))}
        prefix = schema.get("prefixItems", schema.get("items", ()))
        seen: set[str | int] = {*range(min(len(prefix), len(value)))}
        if "contains" in schema:
            seen |= {index for index, one in enumerate(value) if self._fits(schema["contains"], one, place)}
        return seen


def _within(place: Place, key: str | int) -> Place:
    return place, key, place[2] + 1


def _deeper(place: Place) -> Place:
    return place, None, place[2] + 1


def _is_multiple(value: float, wanted: float) -> bool:
    """Compare the decimal numbers as they are written, exactly: their exponents are those of floats."""
    return Fraction(str(value)) % Fraction(str(wanted)) == 0


_NUMBER: Final = int | float

_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "number": lambda value: isinstance(value, _NUMBER) and not isinstance(value, bool),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    ),
}

_OF_NUMBERS: Final[Mapping[str, tuple[Callable[[Any, Any], bool], str]]] = {
    "minimum": (operator.ge, "less than the minimum of"),
    "maximum": (operator.le, "greater than the maximum of"),
    "exclusiveMinimum": (operator.gt, "less than or equal to the minimum of"),
    "exclusiveMaximum": (operator.lt, "greater than or equal to the maximum of"),
    "multipleOf": (_is_multiple, "not a multiple of"),
}

_KEYWORDS: Final[Mapping[str, tuple[Any, Callable[..., _Found]]]] = {
    "type": (object, _Check.type),
    **dict.fromkeys(("enum", "const"), (object, _Check.equality)),
    **dict.fromkeys(_OF_NUMBERS, (_NUMBER, _Check.number)),
    **dict.fromkeys(("minLength", "maxLength"), (str, _Check.length)),
    **dict.fromkeys(("minItems", "maxItems"), (list, _Check.length)),
    **dict.fromkeys(("minProperties", "maxProperties"), (dict, _Check.length)),
    "pattern": (str, _Check.pattern),
    "uniqueItems": (list, _Check.unique),
    "required": (dict, _Check.required),
    "properties": (dict, _Check.properties),
    "patternProperties": (dict, _Check.pattern_properties),
    "additionalProperties": (dict, _Check.additional_properties),
    "unevaluatedProperties": (dict, _Check.unevaluated_properties),
    "propertyNames": (dict, _Check.property_names),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), (dict, _Check.dependent)),
    "prefixItems": (list, _Check.prefix_items),
    "items": (list, _Check.items),
    "additionalItems": (list, _Check.additional_items),
    "unevaluatedItems": (list, _Check.unevaluated_items),
    "contains": (list, _Check.contains),
    "$ref": (object, _Check.reference),
    "allOf": (object, _Check.all_of),
    **dict.fromkeys(("anyOf", "oneOf"), (object, _Check.any_of)),
    "not": (object, _Check.none_of),
    "if": (object, _Check.condition),
}
"""The keywords, each with the values that it is about."""

_OF_ARGUMENTS: Final = frozenset(
    {
        *("type", "enum", "const", "required", "minLength", "maxLength", "minItems", "maxItems", *_OF_NUMBERS),
        *("items", "additionalProperties", "properties", "anyOf", "allOf", "oneOf"),
    }
)
"""The keywords of which a function's own conversion surely thinks the same."""
