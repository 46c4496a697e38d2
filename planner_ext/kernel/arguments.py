"""What a model may pass to a function: its arguments, parsed and checked before anything runs.

Promises that what is accepted is a dict of the function's own, visible parameters, fit for Semantic Kernel to convert
and for JSON to write again; and that everything else is answered by a message a model can act on, the same one each
time. The check is light: the type of each argument, not what is inside it. Must not know the application's arguments.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType, UnionType
from typing import Any, Final, Literal, Union, cast, get_args, get_origin

from pydantic import ValidationError
from semantic_kernel.exceptions import FunctionExecutionException
from semantic_kernel.functions import KernelFunction, KernelParameterMetadata
from semantic_kernel.functions.kernel_function_from_method import KernelFunctionFromMethod

from planner_ext.effects import injected

__all__ = [
    "InvalidArguments",
    "Parameter",
    "Parameters",
    "conversion_problem",
    "convertible_type",
    "injected_parameters",
    "parameters_of",
    "parse_arguments",
    "parse_object",
    "quoted",
    "unconverted_parameter",
]

MAX_DEPTH: Final = 100
"""Levels of nesting accepted: far more than any function takes, far fewer than exhaust the stack when written again."""

_SHOWN: Final = 10
_VALUES_SHOWN: Final = 50
_SHOWN_CHARACTERS: Final = 80

_INJECTED = frozenset({"kernel", "service", "execution_settings", "arguments"})
"""Parameters of a method that Semantic Kernel fills in by name (``gather_function_parameters``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidArguments:
    """Arguments that cannot be used; ``message`` tells the model what is wrong and what is expected."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter that the model may give.

    Attributes:
        expected: What it takes, in words.
        accepts: Whether a value, parsed from JSON, may be passed.
        drops_null: Whether null must be passed by leaving the argument out, as Semantic Kernel makes ``"None"`` of it.
    """

    name: str
    required: bool
    expected: str
    accepts: Callable[[Any], bool]
    drops_null: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one function that the model may give, by name."""

    function: str
    by_name: Mapping[str, Parameter]

    def drops_null(self, name: str) -> bool:
        """Whether a null for this parameter is passed by leaving it out."""
        parameter = self.by_name.get(name)
        return parameter is not None and parameter.drops_null

    def described(self) -> str:
        """A sentence that lists them."""
        if not self.by_name:
            return "It takes no parameters."
        items = (f"{p.name} ({p.expected}{', required' if p.required else ''})" for p in self.by_name.values())
        return f"Its parameters: {', '.join(items)}."


def parse_arguments(text: str, parameters: Parameters) -> dict[str, Any] | InvalidArguments:
    """Parse and check the arguments of one call.

    Args:
        text: JSON text of one object, as the model sent it; "" is no arguments.
        parameters: What the function takes, see `parameters_of`.

    Returns:
        The arguments, or what is wrong with them.
    """
    value = parse_object(text)
    if isinstance(value, InvalidArguments):
        return InvalidArguments(message=f"The arguments of {parameters.function} {value.message}")
    problems = _problems(value, parameters.by_name)
    if not problems:
        return value
    return InvalidArguments(
        message=f"The arguments of {parameters.function} cannot be used: {'; '.join(problems)}. "
        f"{parameters.described()} Call it again with corrected arguments."
    )


def parse_object(text: str) -> dict[str, Any] | InvalidArguments:
    """Parse JSON text of one object, strictly; "" is an empty one."""
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


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_constant(text)


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent) if isinstance(child, dict | list)]
    return bool(level)


def _children(value: Any) -> Iterable[Any]:
    return cast("dict[str, Any]", value).values() if isinstance(value, dict) else value


def _problems(arguments: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> list[str]:
    missing = [name for name, parameter in parameters.items() if parameter.required and name not in arguments]
    unknown = [name for name in arguments if name not in parameters]
    problems = [f"{quoted(name)} is missing" for name in missing]
    problems += [f"{quoted(name)} is not a parameter" for name in unknown[:_SHOWN]]
    if len(unknown) > _SHOWN:
        problems.append(f"{len(unknown) - _SHOWN} more are not parameters")
    for name, value in arguments.items():
        parameter = parameters.get(name)
        if parameter is not None and not parameter.accepts(value):
            problems.append(f"{quoted(name)} must be {parameter.expected}, not {quoted(value)}")
    return problems


def quoted(value: Any) -> str:
    """Write a value that the model sent as JSON, shortened and fit to be sent back."""
    text = json.dumps(value[:_SHOWN_CHARACTERS] if isinstance(value, str) else value, ensure_ascii=False)
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _SHOWN_CHARACTERS + 2 else f"{text[:_SHOWN_CHARACTERS]}..."


def parameters_of(function: KernelFunction) -> Parameters:
    """Collect what a model may pass to a function: neither what is hidden from it nor what Semantic Kernel injects."""
    hidden = injected_parameters(function)
    visible = {
        parameter.name: _parameter(parameter.name, parameter, function)
        for parameter in function.parameters
        if parameter.name is not None and parameter.include_in_function_choices and parameter.name not in hidden
    }
    return Parameters(function=function.fully_qualified_name, by_name=visible)


def injected_parameters(function: KernelFunction) -> frozenset[str]:
    """Name the parameters that the model does not fill: Semantic Kernel's own, and those of `effect`."""
    if not isinstance(function, KernelFunctionFromMethod):
        return frozenset()
    return _INJECTED | injected(function.method)


def _parameter(name: str, declared: KernelParameterMetadata, function: KernelFunction) -> Parameter:
    check = _Check.of(declared, is_prompt=function.is_prompt)
    return Parameter(
        name=name,
        required=bool(declared.is_required),
        expected=check.expected(),
        accepts=check.accepts,
        drops_null=isinstance(function, KernelFunctionFromMethod)
        and not declared.is_required
        and _is_converted(declared),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """The light check of one parameter; without types and values, everything passes.

    Attributes:
        types: JSON schema types, "null" not among them.
        values: The values that an enumeration allows, or None.
        converted: The type to which Semantic Kernel converts, so that a near miss of the model still arrives as meant.
    """

    types: tuple[str, ...]
    values: tuple[Any, ...] | None
    nullable: bool
    converted: Any

    @classmethod
    def of(cls, declared: KernelParameterMetadata, *, is_prompt: bool) -> "_Check":
        schema = declared.schema_data or {}
        listed: Any = schema.get("type") or ()
        types = (listed,) if isinstance(listed, str) else tuple(str(name) for name in listed)
        values: Any = schema.get("enum")
        # Semantic Kernel's schema of `X | None` is that of X: only the parameter's metadata still knows.
        optional = declared.type_object is not None and not declared.is_required and declared.default_value is None
        opaque = not all(name in _TYPES for name in types) or ("object" in types and not _means_object(declared))
        return cls(
            types=() if opaque else tuple(name for name in types if name != "null"),
            values=tuple(cast("list[Any]", values)) if isinstance(values, list) else None,
            nullable=optional or "null" in types or schema.get("nullable") is True,
            # A prompt takes everything as text.
            converted=str if is_prompt else convertible_type(declared.type_object),
        )

    def accepts(self, value: Any) -> bool:
        if not self.types and self.values is None:
            return True
        if value is None and self.nullable:
            return True
        if self.values is not None:
            return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in self.values)
        return any(_TYPES[name](value) for name in self.types) or self._is_near(value)

    def _is_near(self, value: Any) -> bool:
        if "string" in self.types and self.converted is str:
            return isinstance(value, bool | int | float)
        if isinstance(value, str) and self.converted in (int, float) and {"integer", "number"} & set(self.types):
            return _converts(value, int if self.converted is int else float)
        return False

    def expected(self) -> str:
        names = list(self.types)
        if self.values is not None:
            shown = [json.dumps(one, ensure_ascii=False, default=str) for one in self.values[:_VALUES_SHOWN]]
            names = [f"one of {', '.join(shown)}{', ...' if len(self.values) > _VALUES_SHOWN else ''}"]
        if not names:
            return "any value"
        return " or ".join([*names, "null"] if self.nullable else names)


def _converts(value: Any, to: Callable[[Any], float]) -> bool:
    try:
        return math.isfinite(to(value))
    except (ValueError, OverflowError):
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _converts(value, float)


def _is_integer(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": _is_integer,
    "number": _is_number,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
"""What JSON schema's types accept. Never "false" as a boolean: Semantic Kernel would make True of it."""


def _means_object(declared: KernelParameterMetadata) -> bool:
    """Whether a schema of type object means one: Semantic Kernel also writes it for every type unknown to it."""
    schema = declared.schema_data or {}
    if schema.get("properties") or "additionalProperties" in schema:
        return True
    kind = convertible_type(declared.type_object)
    if kind is None:
        name = "object" if declared.type_ is None else declared.type_
        return name in ("object", "dict", "str") or name.startswith("dict[")
    return (get_origin(kind) or kind) is dict


def convertible_type(declared: Any) -> Any:
    """The type that Semantic Kernel can convert an argument to, where it kept one that it cannot.

    It keeps ``Optional[X]`` of ``Annotated[Optional[X], ...]``, and literals, and calls them like a class.
    """
    origin = get_origin(declared)
    if origin in (Union, UnionType):
        types = [one for one in get_args(declared) if one is not type(None)]
        return convertible_type(types[0]) if len(types) == 1 else Any
    return Any if origin is Literal else declared


def _is_converted(declared: KernelParameterMetadata) -> bool:
    """Whether Semantic Kernel converts this parameter, as its ``gather_function_parameters`` decides."""
    kind = convertible_type(declared.type_object)
    known = bool(kind) and kind not in (Any, object, inspect.Parameter.empty)
    return known and bool(declared.type_) and "," not in (declared.type_ or "")


def conversion_problem(error: BaseException, parameters: Parameters, given: Mapping[str, Any]) -> str | None:
    """Tell the model which of its arguments Semantic Kernel could not convert, if that is what an error says.

    The error is recognised by the place it was raised at: its class is used for everything, its text is no interface.

    Args:
        error: What the call raised.
        parameters: What the function takes.
        given: What the model gave; an argument of the application is none of its concern.

    Returns:
        What the model may read; None where the error is another one, or not about an argument of the model.
    """
    declared = unconverted_parameter(error)
    if declared is None or declared.name not in given:
        return None
    return (
        f"The argument {quoted(declared.name)} of {parameters.function} cannot be converted to {declared.type_}"
        f"{_details(error)}. The function was not run. Call it again with a corrected argument."
    )


def unconverted_parameter(error: BaseException) -> KernelParameterMetadata | None:
    """Find the parameter that Semantic Kernel could not convert, so that the function did not run; None otherwise."""
    place = error.__traceback__ if isinstance(error, FunctionExecutionException) else None
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return _parameter_at(place)


def _parameter_at(place: TracebackType | None) -> KernelParameterMetadata | None:
    gather = getattr(KernelFunctionFromMethod.gather_function_parameters, "__code__", None)
    if place is None or place.tb_frame.f_code is not gather:
        return None
    parameter = place.tb_frame.f_locals.get("param")
    return parameter if isinstance(parameter, KernelParameterMetadata) else None


def _details(error: BaseException) -> str:
    """What pydantic found, without the words of the application's own validators."""
    cause = error.__cause__.__cause__ if error.__cause__ is not None else None
    if not isinstance(cause, ValidationError):
        return ""
    found = cause.errors(include_url=False, include_context=False, include_input=False)[:_SHOWN]
    lines = (
        f"{'.'.join(str(part) for part in one['loc']) or 'it'}: "
        f"{'not valid' if one['type'] in ('value_error', 'assertion_error') else one['msg']}"
        for one in found
    )
    return f" ({'; '.join(lines)})"
