"""One value for every reader: arguments are parsed, and converted to their parameters' types, before any decision.

The result is JSON; Semantic Kernel's own conversion (``_parse_parameter``) does not
change its meaning, a second conversion changes nothing, and the spellings of one value
have one digest. A number that its type takes stays as written: 7.0 and 7 have one
digest. Of the application, only pydantic models and dataclasses run. Must not know the
call or the function.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from copy import deepcopy
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from enum import Enum
from functools import lru_cache, partial
from numbers import Number
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin
from uuid import UUID

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from semantic_kernel.functions import KernelParameterMetadata

from planner_ext.approval.decisions import with_plain_numbers
from planner_ext.core.values import frozen

MAX_DEPTH: Final = 100
"""Levels of nesting accepted: far fewer than exhaust the stack."""

MAX_EXPONENT: Final = 4_300
"""Of an exact number: as many digits as Python accepts for an integer. A fraction writes them all out."""

_PROBLEMS_SHOWN: Final = 10
_VALUES_SHOWN: Final = 50
_CHARACTERS_REMEMBERED: Final = 500
_CHARACTERS_SHOWN: Final = 80

Convert = Callable[[Any], Any]
"""Converts a JSON value to the one that a function gets; raises `UnfitError`."""


class UnfitError(Exception):
    """A value that cannot be converted unambiguously.

    Attributes:
        problem: What is wrong with it, to be read after its name.
        place: Where in the argument it stands, as ``[1]["name"]``, or "".
    """

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(f"{place} {problem}")
        self.problem = problem
        self.place = place


def quoted(value: Any) -> str:
    """Write a model's value as JSON, shortened and fit to be sent back."""
    text = json.dumps(
        value[:_CHARACTERS_SHOWN] if isinstance(value, str) else value,
        ensure_ascii=False,
    )
    text = text.encode(errors="replace").decode()
    return (
        text if len(text) <= _CHARACTERS_SHOWN + 2 else f"{text[:_CHARACTERS_SHOWN]}..."
    )


def unfit(expected: str, value: Any) -> UnfitError:
    """Make the error for a value of another type than expected."""
    return UnfitError(f"must be {expected}, not {quoted(value)}")


def listed(values: tuple[Any, ...]) -> str:
    """List the values of an enumeration as JSON."""
    return ", ".join(json.dumps(one, ensure_ascii=False, default=str) for one in values)


def json_text(value: Any) -> str:
    """Write a value as JSON, to compare it; raises ValueError for a number that is not finite."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _as_sent(value: Any) -> Any:
    """Leave a value as the model sent it: its type says nothing of it."""
    return value


def to_integer(value: Any) -> Any:
    """Convert as ``int`` does, but neither a boolean nor a fraction."""
    if type(value) is int:
        return value
    if isinstance(value, str) or (isinstance(value, float) and value.is_integer()):
        with suppress(ValueError):
            return int(value)
    raise unfit("integer", value)


def _to_number(value: Any) -> Any:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
            if math.isfinite(number) and isinstance(value, str):
                return with_plain_numbers(number)
            if math.isfinite(number):
                # An integer that no float stands for is rounded once, here.
                return value if value == number else number
    raise unfit("number", value)


def _to_text(value: Any) -> Any:
    if isinstance(value, str | bool | int | float):
        return value if isinstance(value, str) else str(value)
    raise unfit("string", value)


def _to_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        return value  # never "false", of which Semantic Kernel would make True
    raise unfit("boolean", value)


def to_one_of(values: tuple[Any, ...], value: Any) -> Any:
    """Return the declared value that this one equals; a boolean is not a number."""
    for one in values:
        if isinstance(value, bool) is isinstance(one, bool) and value == one:
            if isinstance(one, bool | int | float | str):
                return one
            return value
    raise unfit(f"one of {listed(values[:_PROBLEMS_SHOWN])}", value)


def _to_optional(convert: Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _at(place: int | str, convert: Convert, value: Any) -> Any:
    try:
        return convert(value)
    except UnfitError as unfit:
        raise UnfitError(unfit.problem, f"[{quoted(place)}]{unfit.place}") from None


def _to_list(convert: Convert, value: Any) -> Any:
    if isinstance(value, list):
        return [
            _at(index, convert, one)
            for index, one in enumerate(cast("list[Any]", value))
        ]
    raise unfit("array", value)


def _to_set(convert: Convert, value: Any) -> Any:
    items = {
        json_text(with_plain_numbers(item)): item for item in _to_list(convert, value)
    }
    return [items[text] for text in sorted(items)]


def _to_tuple(converts: tuple[Convert, ...], value: Any) -> Any:
    if isinstance(value, list) and len(items := cast("list[Any]", value)) == len(
        converts
    ):
        return [
            _at(index, convert, one)
            for index, (convert, one) in enumerate(zip(converts, items, strict=True))
        ]
    raise unfit(f"array of {len(converts)}", value)


def _to_dict(convert: Convert, value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _at(name, convert, one)
            for name, one in cast("dict[str, Any]", value).items()
        }
    raise unfit("object", value)


def _to_model(model: type[BaseModel], value: Any) -> Any:
    """Convert to what a pydantic model reads: near types converted, extra keys dropped, its defaults filled in.

    A default that differs each time is not part of the value. A value that the model
    cannot read back from its own output stays as it was sent.
    """

    def reading(data: Any) -> BaseModel:
        # A validator of the application's may change what it is given.
        return model.model_validate(deepcopy(data))

    check_exponents(model, value)
    try:
        read = reading(value)
        again = reading(value)
    except ValidationError as error:
        raise UnfitError(
            f"cannot be converted to {model.__name__}{validation_details(error)}"
        ) from None
    except (Exception, SystemExit) as error:
        raise UnfitError(f"cannot be converted to {model.__name__}") from error
    drawn = read != again
    for by_alias in (False, True):
        write = partial(
            model.model_dump, round_trip=True, by_alias=by_alias, warnings=False
        )
        try:
            written = _written(write(read, exclude_unset=drawn))
            reread = reading(written)
        except (Exception, SystemExit):  # noqa: S112  (of the application's serializers and validators: it does not read it again)
            continue
        if (
            (write(reread, exclude_unset=True) == write(read, exclude_unset=True))
            if drawn
            else reread == read
        ):
            return _finite(value, written)
    return value


def _to_value(kind: type[Any], adapter: TypeAdapter[Any], value: Any) -> Any:

    def made(data: Any) -> Any:
        # As Semantic Kernel does.
        if isinstance(data, dict):
            return kind(**data)
        return kind(data)

    check_exponents(kind, value)
    try:
        read = adapter.validate_python(value)
        written = _written(adapter.dump_python(read, round_trip=True, warnings=False))
        same = not isinstance(value, bool) and made(written) == read
    except (Exception, SystemExit):
        written = None
        same = False
    if same:
        return _finite(value, written)
    try:
        if isinstance(value, bool) or issubclass(kind, Number | UUID):
            raise TypeError  # a number of true, of {} or of its parts is a spelling that means something else
        if isinstance(value, int | float) and issubclass(kind, bytes | bytearray):
            raise TypeError  # it would be that many zeros
        made(value)
    except (Exception, SystemExit):
        raise UnfitError(
            f"cannot be converted to {kind.__name__}: {quoted(value)}"
        ) from None
    return value


def check_exponents(kind: type[Any], value: Any) -> None:
    """Refuse a text with an exponent over `MAX_EXPONENT` that may become an exact number."""
    if not (issubclass(kind, Number) or _holds_fractions(kind)):
        return
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting += _children(one)
        elif isinstance(one, str) and _has_large_exponent(one):
            raise unfit(f"number with an exponent of at most {MAX_EXPONENT}", one)


def _has_large_exponent(text: str) -> bool:
    mantissa, e, exponent = text.strip().lower().rpartition("e")
    digits = exponent.lstrip("+-").replace("_", "").lstrip("0")
    if not e or mantissa.strip("+-._0123456789") or not digits.isdecimal():
        return False
    return len(digits) > len(str(MAX_EXPONENT)) or int(digits) > MAX_EXPONENT


@lru_cache(maxsize=512)
def _holds_fractions(kind: type[Any]) -> bool:
    adapter = _adapter(kind)
    return adapter is not None and "fractions.Fraction" in repr(adapter.core_schema)


def _finite(value: Any, written: Any) -> Any:
    try:
        return value if json_text(value) == json_text(written) else written
    except ValueError:
        raise UnfitError(
            f"holds a number that is not finite: {quoted(value)}"
        ) from None


def _written(value: Any) -> Any:
    match value:
        case Enum():
            return _written(value.value)
        case dict():
            return {
                name
                if isinstance(name, str)
                else str(to_jsonable_python(name)): _written(one)
                for name, one in cast("dict[Any, Any]", value).items()
            }
        case list() | tuple():
            return [_written(one) for one in cast("list[Any]", value)]
        case set() | frozenset():
            return sorted(
                (_written(one) for one in cast("set[Any]", value)), key=json_text
            )
        case Decimal():
            return _decimal(value)
        case float():
            return value + 0.0  # which makes 0.0 of -0.0
        case _:
            return to_jsonable_python(value)


def _decimal(value: Decimal) -> str:
    if not value.is_finite():
        return str(value)
    exact = Context(prec=len(value.as_tuple().digits), Emin=MIN_EMIN, Emax=MAX_EMAX)
    value = value.normalize(exact) if value else Decimal(0)
    return (
        str(value) if abs(value.adjusted()) > _CHARACTERS_SHOWN else format(value, "f")
    )


def validation_details(error: ValidationError) -> str:
    """Write what pydantic found, without the words of the application's validators."""
    try:
        found = error.errors(
            include_url=False, include_context=False, include_input=False
        )[:_PROBLEMS_SHOWN]
    except Exception:  # an exception of a validator whose text cannot be read
        return ""
    lines = (
        f"{'.'.join(str(part) for part in one['loc']) or 'it'}: "
        f"{'not valid' if one['type'] in ('value_error', 'assertion_error') else one['msg']}"
        for one in found
    )
    return f" ({'; '.join(lines)})"


def conversion_to(kind: Any) -> Convert:
    """Return the conversion to an annotated type; `_as_sent` for one that says nothing."""
    if hasattr(kind, "__supertype__"):  # of NewType
        return conversion_to(kind.__supertype__)
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin is Annotated:
        return conversion_to(inner[0])
    if origin in (Union, UnionType):
        types = [one for one in inner if one is not type(None)]
        return (
            partial(_to_optional, conversion_to(types[0]))
            if len(types) == 1
            else _as_sent
        )
    if inner:
        return _generic(origin, inner)
    kind = origin or kind
    return (
        _of_class(kind)
        if isinstance(kind, type) and kind not in (Any, object)
        else _as_sent
    )


def _generic(origin: Any, inner: tuple[Any, ...]) -> Convert:
    if origin is tuple and inner[-1] is not Ellipsis:
        return partial(_to_tuple, tuple(map(conversion_to, inner)))
    if origin in (dict, Mapping, MutableMapping):
        return partial(_to_dict, conversion_to(inner[1]))
    if origin in (list, tuple, set, frozenset):
        return partial(
            _to_list if origin in (list, tuple) else _to_set, conversion_to(inner[0])
        )
    return _as_sent


def _of_class(kind: type[Any]) -> Convert:
    if kind in _CLASSES:
        return _CLASSES[kind]
    if issubclass(kind, Enum):
        return partial(to_one_of, tuple(member.value for member in kind))
    if issubclass(kind, BaseModel):
        return partial(_to_model, kind)
    for base in (int, float, str):
        if issubclass(kind, base):
            return _CLASSES[base]
    adapter = _adapter(kind)
    if adapter is None:
        return _as_sent
    return partial(_to_value, kind, adapter)


@lru_cache(maxsize=512)
def _adapter(kind: type[Any]) -> TypeAdapter[Any] | None:
    """Adapt a class that pydantic knows; None for others: no constructor runs before the decision."""
    try:
        return TypeAdapter(kind)
    except Exception:
        # Pydantic's own errors, and those of annotations that cannot be read.
        return None


_CLASSES: Final[Mapping[type[Any], Convert]] = {
    bool: _to_boolean,
    int: to_integer,
    float: _to_number,
    str: _to_text,
    list: partial(_to_list, _as_sent),
    tuple: partial(_to_list, _as_sent),
    set: partial(_to_set, _as_sent),
    frozenset: partial(_to_set, _as_sent),
    dict: partial(_to_dict, _as_sent),
}


@frozen
class Parameter:
    """One parameter that the model may give.

    Attributes:
        types: JSON schema types, without "null"; () accepts every value as it is.
        values: The values of an enumeration, or None.
        drops_null: Whether null must be passed by omission, as Semantic Kernel makes
            ``"None"`` of it.
        kind: The annotated type; None if only a schema is known, to whose types near
            misses are not converted.
        exact: A value of exactly this type needs no conversion; None if each has to be
            checked.
        to: Converts a value that passed the check.
    """

    name: str
    required: bool
    types: tuple[str, ...]
    values: tuple[Any, ...] | None
    nullable: bool
    drops_null: bool
    kind: Any
    exact: type[Any] | None
    to: Convert

    def convert(self, value: Any) -> Any:
        """Return what the function gets for a parsed value; raises `UnfitError`."""
        if value is None and self.nullable:
            return None
        try:
            if self.values is not None:
                value = to_one_of(self.values, value)
            elif self.types and not (
                any(_TYPES[name](value) for name in self.types) or self._is_near(value)
            ):
                raise UnfitError("")
        except UnfitError:
            raise unfit(self.expected(), value) from None
        return self.to(value)

    def _is_near(self, value: Any) -> bool:
        if "string" in self.types and self.kind is str:
            return isinstance(value, bool | int | float)
        return (
            isinstance(value, str)
            and self.kind in (int, float)
            and bool({"integer", "number"} & set(self.types))
        )

    def expected(self) -> str:
        """Say what it takes."""
        names = list(self.types)
        if self.values is not None:
            more = ", ..." if len(self.values) > _VALUES_SHOWN else ""
            names = [f"one of {listed(self.values[:_VALUES_SHOWN])}{more}"]
        if not names:
            return "any value"
        return " or ".join([*names, "null"] if self.nullable else names)


def parameter_of(
    declared: KernelParameterMetadata, *, of_method: bool, of_prompt: bool
) -> Parameter:
    """Work out what a model may give for a declared parameter."""
    schema = declared.schema_data or {}
    listed: Any = schema.get("type") or ()
    names = (listed,) if isinstance(listed, str) else tuple(str(one) for one in listed)
    values: Any = schema.get("enum")
    kind: Any = convertible_type(declared.type_object)
    known = bool(kind) and kind not in (Any, object, inspect.Parameter.empty)
    # Whether Semantic Kernel converts the value.
    converted = (
        of_method
        and known
        and bool(declared.type_)
        and "," not in (declared.type_ or "")
    )
    optional = not declared.is_required and declared.default_value is None
    # Semantic Kernel's schema of `X | None` is that of X: only the parameter's metadata still knows.
    nullable = (
        "null" in names
        or schema.get("nullable") is True
        or (optional and declared.type_object is not None)
    )
    # A null that Semantic Kernel would convert can only be omitted; where there is a default, that is not null.
    nullable = nullable and (optional or not converted)
    opaque = not _TYPES.keys() >= set(names) or (
        "object" in names and not _means_object(declared, kind)
    )
    types = ()
    if not opaque:
        types = tuple(one for one in names if one != "null")
    if of_prompt and types == ("string",):
        kind = str  # a prompt takes everything as text
    exact = (
        _EXACT.get(types[0])
        if len(types) == 1 and not isinstance(values, list)
        else None
    )
    return Parameter(
        name=declared.name or "",
        required=bool(declared.is_required),
        types=types,
        values=tuple(cast("list[Any]", values)) if isinstance(values, list) else None,
        nullable=nullable,
        drops_null=converted and nullable,
        kind=kind,
        exact=exact if kind in (exact, None) else None,
        to=to_integer
        if kind is None and types == ("integer",)
        else conversion_to(kind),
    )


def convertible_type(declared: Any) -> Any:
    """Return the type that Semantic Kernel can convert to: it keeps some that it cannot.

    These are ``Optional[X]`` of ``Annotated[Optional[X], ...]``, and literals, called
    like a class.
    """
    origin = get_origin(declared)
    if origin in (Union, UnionType):
        types = [one for one in get_args(declared) if one is not type(None)]
        if len(types) == 1:
            return convertible_type(types[0])
        return Any
    return Any if origin is Literal else declared


def _means_object(declared: KernelParameterMetadata, kind: Any) -> bool:
    """Whether a schema of type object means one: Semantic Kernel also writes it for unknown types."""
    schema = declared.schema_data or {}
    if schema.get("properties") or "additionalProperties" in schema:
        return True
    if kind is None:
        name = "object" if declared.type_ is None else declared.type_
        return name in ("object", "dict", "str") or name.startswith("dict[")
    return (get_origin(kind) or kind) is dict


_EXACT: Final[Mapping[str, type[Any]]] = {
    "string": str,
    "integer": int,
    "boolean": bool,
}


def _is_number(value: Any) -> bool:
    with suppress(OverflowError):
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
        )
    return False


def _is_integer(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and value.is_integer()
    )


_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "null": lambda value: value is None,
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": _is_integer,
    "number": _is_number,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
"""What JSON schema's types accept. Never "false" as a boolean: Semantic Kernel would make True of it."""


@frozen
class InvalidArguments:
    """Arguments that cannot be used; ``message`` tells the model why, and what is expected."""

    message: str


def parse_object(text: str) -> dict[str, Any] | InvalidArguments:
    """Parse JSON text of one object, strictly; "" is an empty one."""
    if len(text) > _CHARACTERS_REMEMBERED or "[" in text or text.count("{") > 1:
        return _parsed(text)
    flat = _parsed_flat(text)
    return flat if isinstance(flat, InvalidArguments) else dict(flat)


def _parsed(text: str) -> dict[str, Any] | InvalidArguments:
    if not text or text.isspace():
        return {}
    too_deep = InvalidArguments(
        message=f"are nested deeper than {MAX_DEPTH} levels. Send a flatter JSON object."
    )
    try:
        value = _DECODER.decode(text)
        if text.count("{") + text.count("[") > MAX_DEPTH and _is_deep(value):
            return too_deep
        # Escapes may make lone surrogates, which no request can carry back to the model.
        (json.dumps(value, ensure_ascii=False) if "\\u" in text else text).encode()
    except RecursionError:
        return too_deep
    except json.JSONDecodeError as error:
        return InvalidArguments(
            message=f"are not valid JSON, see character {error.pos + 1}. Send one JSON object."
        )
    except UnicodeEncodeError:
        return InvalidArguments(
            message="hold text that is not valid Unicode: a lone surrogate. Send valid text."
        )
    except ValueError:
        return InvalidArguments(
            message="hold a number that is not finite, or too long. Send one that can be written."
        )
    if not isinstance(value, dict):
        return InvalidArguments(
            message=f"must be one JSON object; got {quoted(value)}."
        )
    return cast("dict[str, Any]", value)


_parsed_flat = lru_cache(maxsize=64)(_parsed)
"""A call is parsed twice, when accepted and when resolved; values in a flat object can be shared."""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite_number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_constant(text)


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite_number)


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in _children(parent)
            if isinstance(child, dict | list)
        ]
    return bool(level)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return value
