"""The arguments that a model may pass to a function: parsed, checked and converted before anything runs.

Promises that arguments which are accepted are a dict of the function's own, visible parameters, and JSON; and that all
others are answered by a message a model can act on, the same one each time. Must not know the application's arguments.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Final, Literal, Union, cast, get_args, get_origin

from pydantic import ValidationError
from semantic_kernel.exceptions import FunctionExecutionException
from semantic_kernel.functions import KernelFunction, KernelParameterMetadata
from semantic_kernel.functions.kernel_function_from_method import KernelFunctionFromMethod

from planner_ext.engine.effects import injected
from planner_ext.sk.conversion import (
    Convert,
    UnfitError,
    conversion_to,
    json_text,
    listed,
    quoted,
    to_integer,
    to_one_of,
    unfit,
    validation_details,
)

__all__ = [
    "INJECTED",
    "InvalidArguments",
    "Parameters",
    "conversion_problem",
    "convert_arguments",
    "convertible_type",
    "injected_parameters",
    "parameters_of",
    "parse_arguments",
    "parse_object",
    "quoted",
    "unconverted_parameter",
]

INJECTED = frozenset({"kernel", "service", "execution_settings", "arguments"})
"""Parameters of a method that Semantic Kernel fills in by name (``gather_function_parameters``)."""

MAX_DEPTH: Final = 100
"""Levels of nesting accepted: far more than any function takes, far fewer than exhaust the stack when written again."""

_NAMES_SHOWN: Final = 10
_VALUES_SHOWN: Final = 50
_CHARACTERS_REMEMBERED: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidArguments:
    """Arguments that cannot be used; ``message`` tells the model what is wrong and what is expected."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter that the model may give.

    Attributes:
        types: JSON schema types, without "null"; () accepts every value as it is.
        values: The values that an enumeration allows, or None.
        nullable: Whether null is accepted.
        drops_null: Whether null must be passed by leaving the argument out, as Semantic Kernel makes ``"None"`` of it.
        kind: The type that the function's signature names; None if only a schema is known. A near miss of the model
            is converted to a kind, never to a schema's type: Semantic Kernel converts nothing there.
        exact: A value of exactly this Python type needs no conversion; None if each has to be checked.
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
        """Return what the function gets for a value that was parsed from JSON; raises `UnfitError`."""
        if value is None and self.nullable:
            return None
        try:
            if self.values is not None:
                value = to_one_of(self.values, value)
            elif self.types and not (any(_TYPES[name](value) for name in self.types) or self._is_near(value)):
                raise UnfitError("")
        except UnfitError:
            raise unfit(self.expected(), value) from None
        return self.to(value)

    def _is_near(self, value: Any) -> bool:
        if "string" in self.types and self.kind is str:
            return isinstance(value, bool | int | float)
        return isinstance(value, str) and self.kind in (int, float) and bool({"integer", "number"} & set(self.types))

    def expected(self) -> str:
        """Say what it takes."""
        names = list(self.types)
        if self.values is not None:
            more = ", ..." if len(self.values) > _VALUES_SHOWN else ""
            names = [f"one of {listed(self.values[:_VALUES_SHOWN])}{more}"]
        if not names:
            return "any value"
        return " or ".join([*names, "null"] if self.nullable else names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one function that the model may give, by name."""

    function: str
    by_name: Mapping[str, Parameter]

    def drops_null(self, name: str) -> bool:
        """Whether a null for this parameter is passed by leaving it out."""
        parameter = self.by_name.get(name)
        return parameter is not None and parameter.drops_null

    def put(self, given: Mapping[str, Any], arguments: MutableMapping[str, Any]) -> None:
        """Put converted values among a function's arguments, as items; leave out the nulls that are passed so."""
        for name, value in given.items():
            if value is None and self.drops_null(name):
                arguments.pop(name, None)
            else:
                arguments[name] = value


def parameters_of(function: KernelFunction) -> Parameters:
    """Collect what a model may pass to a function: neither what is hidden from it nor what Semantic Kernel injects."""
    hidden = injected_parameters(function)
    visible = {
        one.name: _parameter(one.name, one, function)
        for one in function.parameters
        if one.name is not None and one.include_in_function_choices and one.name not in hidden
    }
    return Parameters(function=function.fully_qualified_name, by_name=visible)


def injected_parameters(function: KernelFunction) -> frozenset[str]:
    """List the parameters that the model does not fill: Semantic Kernel's own, and those of `effect`."""
    if not isinstance(function, KernelFunctionFromMethod):
        return frozenset()
    return INJECTED | injected(function.method)


def _parameter(name: str, declared: KernelParameterMetadata, function: KernelFunction) -> Parameter:
    schema = declared.schema_data or {}
    listed: Any = schema.get("type") or ()
    names = (listed,) if isinstance(listed, str) else tuple(str(one) for one in listed)
    values: Any = schema.get("enum")
    kind: Any = convertible_type(declared.type_object)
    converted = isinstance(function, KernelFunctionFromMethod) and _is_converted(declared, kind)
    optional = not declared.is_required and declared.default_value is None
    # Semantic Kernel's schema of `X | None` is that of X: only the parameter's metadata still knows.
    nullable = "null" in names or schema.get("nullable") is True or (optional and declared.type_object is not None)
    # A null that Semantic Kernel would convert can only be omitted; where there is a default, that is not null.
    nullable = nullable and (optional or not converted)
    opaque = not _TYPES.keys() >= set(names) or ("object" in names and not _means_object(declared, kind))
    types = () if opaque else tuple(one for one in names if one != "null")
    if function.is_prompt and types == ("string",):
        kind = str  # a prompt takes everything as text
    exact = _EXACT.get(types[0]) if len(types) == 1 and not isinstance(values, list) else None
    return Parameter(
        name=name,
        required=bool(declared.is_required),
        types=types,
        values=tuple(cast("list[Any]", values)) if isinstance(values, list) else None,
        nullable=nullable,
        drops_null=converted and nullable,
        kind=kind,
        exact=exact if kind in (exact, None) else None,
        to=to_integer if kind is None and types == ("integer",) else conversion_to(kind),
    )


def convertible_type(declared: Any) -> Any:
    """Return the type that Semantic Kernel can convert an argument to, where it kept one that it cannot.

    It keeps ``Optional[X]`` of ``Annotated[Optional[X], ...]``, and literals, and calls them like a class.
    """
    origin = get_origin(declared)
    if origin in (Union, UnionType):
        types = [one for one in get_args(declared) if one is not type(None)]
        return convertible_type(types[0]) if len(types) == 1 else Any
    return Any if origin is Literal else declared


def _is_converted(declared: KernelParameterMetadata, kind: Any) -> bool:
    """Whether Semantic Kernel converts this parameter, as its ``gather_function_parameters`` decides."""
    known = bool(kind) and kind not in (Any, object, inspect.Parameter.empty)
    return known and bool(declared.type_) and "," not in (declared.type_ or "")


def _means_object(declared: KernelParameterMetadata, kind: Any) -> bool:
    """Whether a schema of type object means one: Semantic Kernel also writes it for every type unknown to it."""
    schema = declared.schema_data or {}
    if schema.get("properties") or "additionalProperties" in schema:
        return True
    if kind is None:
        name = "object" if declared.type_ is None else declared.type_
        return name in ("object", "dict", "str") or name.startswith("dict[")
    return (get_origin(kind) or kind) is dict


def parse_arguments(text: str, parameters: Parameters) -> dict[str, Any] | InvalidArguments:
    """Parse, check and convert the arguments of one call.

    Args:
        text: JSON text of one object, as the model sent it; "" is no arguments.
        parameters: What the function takes, see `parameters_of`.

    Returns:
        The arguments as the function gets them, or what is wrong with them.
    """
    return convert_arguments(parse_object(text), parameters)


def convert_arguments(
    given: dict[str, Any] | InvalidArguments, parameters: Parameters
) -> dict[str, Any] | InvalidArguments:
    """Check the arguments of one call, and convert each to its parameter's type.

    Args:
        given: JSON values by name, or what `parse_object` found wrong; they are not changed.
        parameters: What the function takes, see `parameters_of`.

    Returns:
        The arguments as the function gets them, in the order given: the same dict where nothing had to be converted.
        Or what is wrong with them. A null stays a null, also where `Parameter.drops_null` says how to pass it.
    """
    if isinstance(given, InvalidArguments):
        return InvalidArguments(message=f"The arguments of {parameters.function} {given.message}")
    by_name = parameters.by_name
    problems = _name_problems(given, by_name)
    changed: dict[str, Any] = {}
    for name, value in given.items():
        parameter = by_name.get(name)
        if parameter is None or type(value) is parameter.exact:
            continue
        try:
            converted = parameter.convert(value)
        except UnfitError as unfit:
            problems.append(f"{quoted(name)}{unfit.place} {unfit.problem}")
        else:
            if converted is not value and json_text(converted) != json_text(value):
                changed[name] = converted
    if not problems:
        return {**given, **changed} if changed else given
    items = (f"{one.name} ({one.expected()}{', required' if one.required else ''})" for one in by_name.values())
    taken = f"Its parameters: {', '.join(items)}." if by_name else "It takes no parameters."
    return InvalidArguments(
        message=f"The arguments of {parameters.function} cannot be used: {'; '.join(problems)}. "
        f"{taken} Call it again with corrected arguments."
    )


def _name_problems(given: Mapping[str, Any], by_name: Mapping[str, Parameter]) -> list[str]:
    unknown = [name for name in given if name not in by_name]
    problems = [f"{quoted(name)} is missing" for name, one in by_name.items() if one.required and name not in given]
    problems += [f"{quoted(name)} is not a parameter" for name in unknown[:_NAMES_SHOWN]]
    if len(unknown) > _NAMES_SHOWN:
        problems.append(f"{len(unknown) - _NAMES_SHOWN} more are not parameters")
    return problems


def parse_object(text: str) -> dict[str, Any] | InvalidArguments:
    """Parse JSON text of one object, strictly; "" is an empty one."""
    if len(text) > _CHARACTERS_REMEMBERED or "[" in text or text.count("{") > 1:
        return _parsed(text)
    flat = _parsed_flat(text)
    return flat if isinstance(flat, InvalidArguments) else dict(flat)


def _parsed(text: str) -> dict[str, Any] | InvalidArguments:
    if not text or text.isspace():
        return {}
    too_deep = InvalidArguments(message=f"are nested deeper than {MAX_DEPTH} levels. Send a flatter JSON object.")
    try:
        value = _DECODER.decode(text)
        if text.count("{") + text.count("[") > MAX_DEPTH and _is_deep(value):
            return too_deep
        # Escapes may make lone surrogates, which no request can carry back to the model.
        (json.dumps(value, ensure_ascii=False) if "\\u" in text else text).encode()
    except RecursionError:
        return too_deep
    except json.JSONDecodeError as error:
        return InvalidArguments(message=f"are not valid JSON, see character {error.pos + 1}. Send one JSON object.")
    except UnicodeEncodeError:
        return InvalidArguments(message="hold text that is not valid Unicode: a lone surrogate. Send valid text.")
    except ValueError:
        return InvalidArguments(message="hold a number that is not finite, or too long. Send one that can be written.")
    if not isinstance(value, dict):
        return InvalidArguments(message=f"must be one JSON object; got {quoted(value)}.")
    return cast("dict[str, Any]", value)


_parsed_flat = lru_cache(maxsize=64)(_parsed)
"""A call is parsed when its reply is accepted, and again when it is resolved; values in a flat object can be shared."""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite_number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_constant(text)


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite_number)


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent) if isinstance(child, dict | list)]
    return bool(level)


def _children(value: Any) -> Iterable[Any]:
    return cast("dict[str, Any]", value).values() if isinstance(value, dict) else value


def conversion_problem(error: BaseException, parameters: Parameters, given: Mapping[str, Any]) -> str | None:
    """Tell the model which of its arguments Semantic Kernel could not convert, if that is what an error says.

    The error is recognised by the place it was raised at: its class is used for everything, its text is no interface.

    Args:
        error: What the call raised.
        parameters: What the function takes.
        given: The arguments that the model gave; it reads nothing of the application's.

    Returns:
        What the model may read; None if the error is another one, or not about an argument of the model.
    """
    declared = unconverted_parameter(error)
    if declared is None or declared.name not in given:
        return None
    cause = error.__cause__.__cause__ if error.__cause__ is not None else None
    details = validation_details(cause) if isinstance(cause, ValidationError) else ""
    return (
        f"The argument {quoted(declared.name)} of {parameters.function} cannot be converted to {declared.type_}"
        f"{details}. The function was not run. Call it again with a corrected argument."
    )


def unconverted_parameter(error: BaseException) -> KernelParameterMetadata | None:
    """Find the parameter that Semantic Kernel could not convert, so that the function did not run; None otherwise."""
    place = error.__traceback__ if isinstance(error, FunctionExecutionException) else None
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    gather = getattr(KernelFunctionFromMethod.gather_function_parameters, "__code__", None)
    if place is None or place.tb_frame.f_code is not gather:
        return None
    parameter = place.tb_frame.f_locals.get("param")
    return parameter if isinstance(parameter, KernelParameterMetadata) else None


_EXACT: Final[Mapping[str, type[Any]]] = {"string": str, "integer": int, "boolean": bool}


def _is_number(value: Any) -> bool:
    with suppress(OverflowError):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return False


def _is_integer(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "null": lambda value: value is None,
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": _is_integer,
    "number": _is_number,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
"""The values that JSON schema's types accept. Never "false" as a boolean: Semantic Kernel would make True of it."""
