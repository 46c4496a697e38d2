"""The kernel functions that a request offers, the description of each, and the arguments that a model may pass to it.

Accepted arguments are JSON values; others are answered by a message that a model can
act on. Must not know the application's arguments.
"""

import inspect
import json
import marshal
import sys
from collections import Counter
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    Set,
)
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from operator import itemgetter
from types import CellType
from typing import Annotated, Any, Final, Literal, Self, cast
from weakref import ref

from pydantic import ValidationError
from pydantic_core import to_jsonable_python
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import (
    FunctionChoiceBehavior,
    PromptExecutionSettings,
)
from semantic_kernel.connectors.ai.function_call_choice_configuration import (
    FunctionCallChoiceConfiguration,
)
from semantic_kernel.connectors.ai.function_calling_utils import (
    kernel_function_metadata_to_function_call_format,
)
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.exceptions import FunctionExecutionException
from semantic_kernel.functions import (
    KernelFunction,
    KernelFunctionFromMethod,
    KernelFunctionMetadata,
    KernelParameterMetadata,
    KernelPlugin,
    kernel_function,
)

from planner_ext.approval.decisions import edited_text, with_plain_numbers
from planner_ext.core.marks import mark_name
from planner_ext.core.state import READ_RESULT
from planner_ext.core.values import frozen
from planner_ext.engine.effects import Effect, effect_of, injected
from planner_ext.sk.errors import InvalidOptionError
from planner_ext.sk.functions.conversion import (
    InvalidArguments,
    Parameter,
    UnfitError,
    convertible_type,
    json_text,
    parameter_of,
    parse_object,
    quoted,
    validation_details,
)

INJECTED = frozenset({"kernel", "service", "execution_settings", "arguments"})
"""Parameters that Semantic Kernel fills in by name (``gather_function_parameters``)."""

_NAMES_SHOWN: Final = 10

_TYPES = {
    "auto": FunctionChoiceType.AUTO,
    "required": FunctionChoiceType.REQUIRED,
    "none": FunctionChoiceType.NONE,
}


Select = Callable[[Sequence[KernelFunction]], Sequence[KernelFunction]]
"""Narrows the functions that a run offers."""


class RequestBehavior(FunctionChoiceBehavior):
    """Tells a connector which functions one request offers; the connector invokes none."""

    offered: list[KernelFunctionMetadata] = []  # noqa: RUF012  (a pydantic field: copied for each instance)
    schemas: list[Any] = []  # noqa: RUF012  (likewise)

    @classmethod
    def of(
        cls,
        offered: list[KernelFunctionMetadata],
        choice: Literal["auto", "required", "none"],
        *,
        schemas: Sequence[Any] = (),
    ) -> Self:
        """Offer these functions, and the caller's own schemas, under this tool choice."""
        return cls.model_construct(
            type_=_TYPES[choice],
            offered=offered,
            schemas=list(schemas),
            filters=None,
            enable_kernel_functions=True,
            maximum_auto_invoke_attempts=0,
        )

    def configure(
        self,
        kernel: Kernel,
        update_settings_callback: Callable[..., None],
        settings: PromptExecutionSettings,
    ) -> None:
        """Let the connector write the functions, then add the caller's own schemas."""
        super().configure(kernel, update_settings_callback, settings)
        if self.schemas:
            written: Any = settings
            written.tools = [*(written.tools or ()), *self.schemas]

    def get_config(self, kernel: Kernel) -> FunctionCallChoiceConfiguration:  # noqa: ARG002  (the signature of the base class)
        """Return the offered functions."""
        return FunctionCallChoiceConfiguration(available_functions=self.offered)

    def __deepcopy__(self, memo: Any = None) -> Self:
        """Share: settings are deep-copied on each request."""
        return self


class ToolSet:
    """The functions of one run, as the kernel has them now.

    Attributes:
        functions: By fully qualified name, as of the last `refresh`.
        schemas: The settings' own tool schemas for which the kernel has no function.
        schema_only: The names in them.
        available: Whether there is anything to call.
        reads: Whether the function that reads on in a result is offered.
    """

    def __init__(
        self,
        kernel: Kernel,
        behavior: FunctionChoiceBehavior | None,
        settings: PromptExecutionSettings,
        *,
        own: Sequence[KernelFunction] = (),
        select: Select | None = None,
    ) -> None:
        """Bind the offer to a kernel; ``settings`` may have tool schemas that the caller runs itself.

        Without a ``behavior`` only the planner's ``own`` functions are offered;
        ``select`` narrows the kernel's.
        """
        self._kernel = kernel
        self._behavior = behavior
        self._own = tuple(own)
        self.reads = False
        self._select = select
        # The caller's own, by the names of their functions.
        self._schemas: dict[str, Any] = {}
        tools: Any = getattr(settings, "tools", None) or ()
        for tool in tools:
            function: Any = tool.get("function") if isinstance(tool, Mapping) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            is_function = isinstance(function, Mapping)
            name: Any = function.get("name") if is_function else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            if isinstance(name, str):
                self._schemas[name] = tool
        self.refresh()

    def refresh(self) -> None:
        """Read the kernel's functions again."""
        own = (*self._own, read_result()) if self.reads else self._own
        functions = {function.fully_qualified_name: function for function in own}
        for function in self._kernel_functions():
            name = function.fully_qualified_name
            if name in functions:
                raise InvalidOptionError(
                    f"The kernel has a function {name!r}, which is the name of one that the planner offers itself. "
                    "Rename the plugin or the function, or exclude it."
                )
            functions[name] = function
        self.functions: Mapping[str, KernelFunction] = functions
        self._tools: Mapping[str, Tool] | None = None
        self.schema_only = frozenset(self._schemas.keys() - functions.keys())
        self.schemas = tuple(
            schema for name, schema in self._schemas.items() if name in self.schema_only
        )
        self.available = bool(functions or self.schema_only)

    @property
    def tools(self) -> Mapping[str, "Tool"]:
        """The descriptions, as of their first use after a `refresh`."""
        if self._tools is None:
            self._tools = {
                name: tool_of(function) for name, function in self.functions.items()
            }
        return self._tools

    @property
    def metadata(self) -> list[KernelFunctionMetadata]:
        """The functions without the parameters that the model does not fill."""
        return [
            _without(self.tools[name].hidden, function.metadata)
            for name, function in self.functions.items()
        ]

    def reserve_reading(self) -> None:
        """Refuse a kernel that has a function of the name of `read_result`."""
        if not self.reads and READ_RESULT in self.functions:
            raise InvalidOptionError(
                f"The kernel has a function {READ_RESULT!r}, which is the name of the one with which the model reads "
                "on in a result over max_result_tokens. Rename the plugin or the function, or set no such limit."
            )

    def _kernel_functions(self) -> Sequence[KernelFunction]:
        behavior = self._behavior
        if behavior is None or not behavior.enable_kernel_functions:
            return ()
        filters = behavior.filters or {}
        if [] in (filters.get("included_functions"), filters.get("included_plugins")):
            return ()  # Semantic Kernel takes an empty list for "all".
        try:
            config = behavior.get_config(self._kernel)
        except ValueError as error:
            raise InvalidOptionError(
                f"The behaviour's filters cannot be used: {error}"
            ) from error
        get = self._kernel.get_function
        offered = [
            get(metadata.plugin_name, metadata.name)
            for metadata in config.available_functions or ()
        ]
        if self._select is None:
            return offered
        return self._select(offered)


class _Results:
    @kernel_function(
        name=READ_RESULT.rpartition("-")[2],
        description="Read on in a function's result that was cut because it is long. A cut result ends with a line "
        "that has the call and the offset to use.",
    )
    def read(
        self,
        call: Annotated[str, "The call whose result it is, as the line names it"],
        offset: Annotated[
            int, "Where to read on, in characters from the beginning of the result"
        ],
    ) -> str:
        raise RuntimeError(
            f"The run itself answers a call that reads {call} from {offset}."
        )


@cache
def read_result() -> KernelFunction:
    """Return the function with which the model reads on in a result; made once."""
    plugin, _, name = READ_RESULT.rpartition("-")
    return KernelPlugin.from_object(plugin, _Results()).functions[name]


def _without(
    hidden: Set[str], metadata: KernelFunctionMetadata
) -> KernelFunctionMetadata:
    """Remove parameters such as ``kernel: Kernel``, whose schema is not JSON."""
    shown = [
        parameter for parameter in metadata.parameters if parameter.name not in hidden
    ]
    return (
        metadata
        if len(shown) == len(metadata.parameters)
        else metadata.model_copy(update={"parameters": shown})
    )


@frozen
class Tool:
    """A kernel function as its declaration describes it; see `tool_of`.

    Attributes:
        parameters: Those that the model may give, by name.
        required: Those that it must give.
        injected: Those that the run fills, of a function marked with `effect`.
        hidden: Those that the model does not fill: injected ones, and those of
            `INJECTED` that the signature asks for.
        unasked: Those of `INJECTED` that only a schema or ``**kwargs`` names. Semantic
            Kernel would fill them in, too; see ``execution.runnable``.
        loose: Those of ``parameters`` that the signature does not name; the
            application's arguments are not meant for them.
        refusal: Why the function cannot be called, for the model, or "".
        absent: None for each parameter that the model may omit and Python requires.
        kinds: The type of each declared parameter that Semantic Kernel can convert to.
        signature: ``name=digest`` of each declared parameter, joined by commas: of
            type, schema and default, not of descriptions.
        schema: JSON text of the parameters for a person, with the function's
            description and the defaults.
        offer: JSON text of the function in a request to OpenAI; both are "" if that is
            not JSON.
        blocks: Whether it is synchronous.
        restarts: Whether its call may start again, as declared by `effect`.
        asks_model: A prompt, an agent, or a function that takes the kernel or a
            service.
        defaults: JSON text of the defaults which can be written.
    """

    name: str
    parameters: Mapping[str, Parameter]
    required: frozenset[str]
    injected: frozenset[str]
    hidden: frozenset[str]
    unasked: frozenset[str]
    loose: frozenset[str]
    refusal: str
    absent: Mapping[str, None]
    kinds: tuple[Any, ...]
    signature: str
    schema: str
    offer: str
    blocks: bool
    restarts: bool
    asks_model: bool
    defaults: Mapping[str, str]

    def said(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the values that differ from the parameters' defaults; None if all do."""
        if self.defaults.keys().isdisjoint(values):
            return None
        rest = {
            name: value
            for name, value in values.items()
            if self.defaults.get(name) != _plain_text(value)
        }
        return None if len(rest) == len(values) else rest

    def put(
        self, given: Mapping[str, Any], arguments: MutableMapping[str, Any]
    ) -> None:
        """Put converted values among the arguments, without nulls that are passed by omission."""
        for name in self.loose.difference(given):
            arguments.pop(name, None)
        for name, value in given.items():
            if (
                value is None
                and name in self.parameters
                and self.parameters[name].drops_null
            ):
                arguments.pop(name, None)
            else:
                arguments[name] = value


@dataclass(frozen=True, slots=True)
class _KnownTool:
    """A description with its sources: the method, or a function without one, and its declaration."""

    target: ref[Any]
    declared: tuple[Any, ...]
    tool: Tool


_OF_FUNCTION = itemgetter("name", "plugin_name", "description", "is_prompt")
_OF_PARAMETER = itemgetter(
    "name",
    "type_",
    "is_required",
    "default_value",
    "include_in_function_choices",
    "schema_data",
)
_TYPE_OF_PARAMETER = itemgetter("type_object")
"""What a description is made of; types are compared by identity."""

_EFFECT: Final = mark_name(Effect)

_KNOWN: dict[tuple[Any, ...], _KnownTool] = {}
"""The one cache of descriptions, for all runs, by the id of the target and its names.

An entry goes with its target, so that dropped kernels are freed.
"""


def tool_of(function: KernelFunction) -> Tool:
    """Describe a kernel function; cached until its declaration changes, which may be in place."""
    method: Any = vars(function).get("method")
    declared = _declared(function)
    if declared is None:
        return _described(function, method)
    target = function if method is None else method
    key = (id(target), function.metadata.plugin_name, function.metadata.name)
    known = _KNOWN.get(key)
    if known is not None and known.target() is target and known.declared == declared:
        return known.tool
    tool = _described(function, method)
    with suppress(TypeError):  # of a target that has no weak references
        _KNOWN[key] = _KnownTool(
            ref(target, lambda _: _KNOWN.pop(key, None)), declared, tool
        )
    return tool


def _declared(function: KernelFunction) -> tuple[Any, ...] | None:
    """Collect what a description is made of, besides the method, in a form that does not change.

    None for a default or schema that is not plain: its changes would not be noticed.
    """
    own = vars(function)
    metadata = function.metadata
    parameters = [vars(parameter) for parameter in metadata.parameters]
    method: Any = own.get("method")
    # A probe may belong to the plugin, so only the kind of an effect is compared.
    plain = (
        getattr(own.get(_EFFECT), "kind", None),
        getattr(getattr(method, _EFFECT, None), "kind", None),
        _OF_FUNCTION(vars(metadata)),
        [*map(_OF_PARAMETER, parameters)],
    )
    try:
        # Bytes tell 1 from True, and do not change with their source; version 2 writes equal values equally.
        written = marshal.dumps(plain, 2)
    except ValueError:
        return None
    return written, type(function), [*map(_TYPE_OF_PARAMETER, parameters)]


def _described(function: KernelFunction, method: Any) -> Tool:
    from planner_ext.sk.functions.shown import shown_schema  # noqa: PLC0415  (not before there is a function)

    of_method = isinstance(function, KernelFunctionFromMethod)
    effect = effect_of(function)
    filled = injected(function)
    names = frozenset(str(one.name) for one in function.parameters)
    own, rest = _signature_of(method) if of_method else (names, frozenset[str]())
    reserved = INJECTED.intersection(names) if of_method else frozenset[str]()
    hidden = reserved.intersection(own | rest) | filled
    parameters = {
        one.name: parameter_of(one, of_method=of_method, of_prompt=function.is_prompt)
        for one in function.parameters
        if one.name is not None
        and one.include_in_function_choices
        and one.name not in hidden
    }
    offer = kernel_function_metadata_to_function_call_format(
        _without(hidden, function.metadata)
    )
    defaults = {
        str(one.name): text
        for one in function.parameters
        if one.name in parameters
        and not one.is_required
        and (text := _plain_text(one.default_value))
    }
    return Tool(
        name=function.fully_qualified_name,
        parameters=parameters,
        required=frozenset(name for name, one in parameters.items() if one.required),
        defaults=defaults,
        injected=filled,
        hidden=hidden,
        unasked=reserved.difference(own),
        loose=frozenset(parameters).difference(own),
        refusal=_refusal(function),
        absent=_optional_without_default(function.parameters, method)
        if of_method
        else {},
        kinds=tuple(convertible_type(one.type_object) for one in function.parameters),
        signature=",".join(f"{one.name}={_digest(one)}" for one in function.parameters),
        schema=shown_schema(method, offer["function"], defaults),
        offer=_json(offer),
        blocks=of_method and not _is_lazy(method),
        restarts=effect is not None and effect.kind != "once",
        asks_model=not of_method
        or not hidden.isdisjoint(("kernel", "service"))
        or agent_of(method) is not None,
    )


def agent_of(method: Any) -> Any:
    """Find Semantic Kernel's agent behind a function, in a closure or bound; or None."""
    agents = sys.modules.get("semantic_kernel.agents.agent")
    if agents is None:
        return None
    holder = getattr(method, "__self__", None)
    if inspect.isfunction(method) and "self" in (names := method.__code__.co_freevars):
        holder = contents_of((method.__closure__ or ())[names.index("self")])
    return holder if isinstance(holder, agents.Agent) else None


def contents_of(cell: CellType) -> Any:
    """Read a variable of a closure; None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _signature_of(method: Any) -> tuple[frozenset[str], frozenset[str]]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(method).parameters
    own = frozenset(name for name, one in parameters.items() if one.kind in by_name)
    return own, frozenset(parameters) - own


def _refusal(function: KernelFunction) -> str:
    """Say which parameters of a function share a name; "" if none do.

    Semantic Kernel may make one name of two in an OpenAPI document, and would send one
    value in both places. Names that the document itself repeats, such as an ``id`` in
    path and body, are one.
    """
    counted = Counter(one.name for one in function.parameters)
    twice = sorted(str(name) for name, times in counted.items() if times > 1)
    if not twice:
        return ""
    operation: Any = (function.metadata.additional_properties or {}).get("operation")
    document: dict[str, set[str]] = {}
    for name in _document_names(operation):
        document.setdefault(operation.replace_invalid_symbols(name), set()).add(name)
    unclear = [name for name in twice if len(document.get(name, ())) != 1]
    if not unclear:
        return ""
    texts = (
        f"{quoted(name)} ({' and '.join(map(quoted, sorted(document.get(name, ()))))})"
        for name in unclear
    )
    return (
        f"{function.fully_qualified_name} cannot be called: several of its parameters meet under one name, "
        f"{', '.join(texts).replace(' ()', '')}. It did not run. Go on without it."
    )


def _document_names(operation: Any) -> Iterator[str]:
    yield from (str(one.name) for one in getattr(operation, "parameters", None) or ())
    body = getattr(operation, "request_body", None)
    if body is not None:
        yield from (
            operation.PAYLOAD_ARGUMENT_NAME,
            operation.CONTENT_TYPE_ARGUMENT_NAME,
        )
        yield from _payload_names(body.properties or (), "")


def _payload_names(properties: Iterable[Any], prefix: str) -> Iterator[str]:
    """List properties' names, alone and with their path: the plugin's settings choose."""
    for one in properties:
        if one.properties:
            yield from _payload_names(one.properties, f"{prefix}{one.name}.")
        else:
            yield from (str(one.name), f"{prefix}{one.name}")


def _json(value: Any) -> str:
    try:
        return json.dumps(
            value, separators=(",", ":"), allow_nan=False, ensure_ascii=False
        )
    except (TypeError, ValueError, RecursionError):
        return ""


def _plain_text(value: Any) -> str:
    """Write JSON text in which equal values are equal; "" if that is not possible."""
    try:
        return json.dumps(with_plain_numbers(to_jsonable_python(value)), sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return ""


def _is_lazy(method: Any) -> bool:
    """Whether calling a method only makes a coroutine or an async generator."""
    target = inspect.unwrap(method)
    called = getattr(target, "__call__", None)  # noqa: B004  (the method of an object that is called, async or not)
    lazy = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_lazy(target) or is_lazy(called) for is_lazy in lazy)


def _optional_without_default(
    declared: Iterable[KernelParameterMetadata], method: Any
) -> dict[str, None]:
    """Collect the parameters that Semantic Kernel declares optional, and Python requires."""
    optional = {
        one.name
        for one in declared
        if not one.is_required
        and one.default_value is None
        and one.include_in_function_choices
    }
    if not optional:
        return {}
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: None
        for name, own in inspect.signature(method).parameters.items()
        if name in optional
        and own.kind in keyword
        and own.default is inspect.Parameter.empty
    }


def _digest(declared: KernelParameterMetadata) -> str:
    value = [declared.type_, declared.is_required, declared.include_in_function_choices]
    value += [_undescribed(declared.schema_data), declared.default_value]
    # A default that is not JSON is written by its type: its repr may hold an address, which differs by process.
    text = json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        default=lambda one: type(one).__qualname__,
    )
    return sha256(text.encode()).hexdigest()[:16]


def _undescribed(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        items = cast("Mapping[str, Any]", schema).items()
        return {
            key: _undescribed(value)
            for key, value in items
            if key != "description" or not isinstance(value, str)
        }
    if isinstance(schema, list):
        return [_undescribed(one) for one in cast("list[Any]", schema)]
    return schema


def parse_edited(
    arguments: Mapping[str, Any], tool: Tool
) -> dict[str, Any] | InvalidArguments:
    """Check and convert the arguments of an `Approve` as those of a call."""
    try:
        return convert_arguments(parse_object(edited_text(arguments)), tool)
    except ValueError as error:
        return InvalidArguments(message=str(error))


def convert_arguments(
    given: dict[str, Any] | InvalidArguments, tool: Tool
) -> dict[str, Any] | InvalidArguments:
    """Check the arguments of one call, and convert each to its parameter's type.

    Returns:
        The arguments in the order given: the same dict where nothing had to be
        converted. Or what is wrong with them. A null stays a null, also where
        `Parameter.drops_null` says how to pass it.
    """
    if tool.refusal:
        return InvalidArguments(message=tool.refusal)
    if isinstance(given, InvalidArguments):
        return InvalidArguments(message=f"The arguments of {tool.name} {given.message}")
    unfit: list[str] = []
    changed: dict[str, Any] = {}
    for name, value in given.items():
        parameter = tool.parameters.get(name)
        if parameter is None or type(value) is parameter.exact:
            continue
        try:
            converted = parameter.convert(value)
        except UnfitError as error:
            unfit.append(f"{quoted(name)}{error.place} {error.problem}")
            continue
        if converted is not value and json_text(converted) != json_text(value):
            changed[name] = converted
    if unfit or not tool.required <= given.keys() <= tool.parameters.keys():
        return _invalid(given, tool, unfit)
    return {**given, **changed} if changed else given


def _invalid(
    given: Mapping[str, Any], tool: Tool, unfit: Sequence[str]
) -> InvalidArguments:
    by_name = tool.parameters
    unknown = [name for name in given if name not in by_name]
    problems = [
        f"{quoted(name)} is missing"
        for name in by_name
        if name in tool.required and name not in given
    ]
    problems += [
        f"{quoted(name)} is not a parameter" for name in unknown[:_NAMES_SHOWN]
    ]
    if len(unknown) > _NAMES_SHOWN:
        problems.append(f"{len(unknown) - _NAMES_SHOWN} more are not parameters")
    problems += unfit
    items = (
        f"{one.name} ({one.expected()}{', required' if one.required else ''})"
        for one in by_name.values()
    )
    taken = (
        f"Its parameters: {', '.join(items)}." if by_name else "It takes no parameters."
    )
    return InvalidArguments(
        message=f"The arguments of {tool.name} cannot be used: {'; '.join(problems)}. "
        f"{taken} Correct the arguments."
    )


def conversion_problem(
    error: BaseException, tool: Tool, given: Mapping[str, Any]
) -> str | None:
    """Tell the model which argument Semantic Kernel could not convert; None for another error."""
    declared = unconverted_parameter(error)
    if declared is None or declared.name not in given:
        return None
    cause = None
    if error.__cause__ is not None:
        cause = error.__cause__.__cause__
    details = ""
    if isinstance(cause, ValidationError):
        details = validation_details(cause)
    return (
        f"The argument {quoted(declared.name)} of {tool.name} cannot be converted to {declared.type_}"
        f"{details}. The function was not run. Call it again with a corrected argument."
    )


def unconverted_parameter(error: BaseException) -> KernelParameterMetadata | None:
    """Find the parameter that Semantic Kernel could not convert, by where it raised; or None."""
    place = (
        error.__traceback__ if isinstance(error, FunctionExecutionException) else None
    )
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    gather = getattr(
        KernelFunctionFromMethod.gather_function_parameters, "__code__", None
    )
    if place is None or place.tb_frame.f_code is not gather:
        return None
    parameter = place.tb_frame.f_locals.get("param")
    return parameter if isinstance(parameter, KernelParameterMetadata) else None
