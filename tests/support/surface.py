"""The public surface as text: each public name with its parameters, members, bases and alternatives.

    cd tests && python -m support.surface > surface.txt      after a change that is meant

Left out are types, which Python's versions write in different ways, and members that
only this package calls ("@private" in their docstring).
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from inspect import get_annotations
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from typer.main import get_command
from typing_extensions import is_protocol

from planner_ext.cli.app import app

MODULES = (
    "planner_ext",
    "planner_ext.ag_ui",
    "planner_ext.agent",
    "planner_ext.budgets",
    "planner_ext.compare",
    "planner_ext.durable",
    "planner_ext.durable.hosts",
    "planner_ext.errors",
    "planner_ext.events",
    "planner_ext.handler",
    "planner_ext.hitl_manager",
    "planner_ext.inbox",
    "planner_ext.iteration",
    "planner_ext.planner",
    "planner_ext.plugin",
    "planner_ext.service",
    "planner_ext.session",
    "planner_ext.testing",
    "planner_ext.timeline",
)
"""The modules that users import."""


def surface() -> str:
    """Write each public module's names, a line a name and a line a member."""
    lines: list[str] = []
    for module in MODULES:
        names = importlib.import_module(module).__all__
        lines += ["", module]
        for name in names:
            value = getattr(sys.modules[module], name)
            lines += [f"  {line}" for line in described(name, value)]
    lines += ["", "planner-ext", *(f"  {line}" for line in commands(get_command(app)))]
    return "\n".join(lines[1:]) + "\n"


def commands(command: Any, *words: str) -> Iterator[str]:
    """Write each command with its arguments and options, in the order of its help."""
    if words and not hasattr(command, "commands"):
        yield " ".join([*words, *map(parameter, command.params)])
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *words, name)


def parameter(value: Any) -> str:
    """Write an argument or option of a command: its names, and its default if it has one."""
    names = "/".join([*value.opts, *value.secondary_opts])
    if value.param_type_name == "argument":
        names = names.upper()
    if value.required or value.default in (None, False, ()):
        return names if value.required else f"[{names}]"
    return f"[{names}={default(value.default)}]"


def described(name: str, value: Any) -> Iterator[str]:
    """Write one name: a class with its members, a function with its parameters."""
    if "@private" in (getattr(value, "__doc__", None) or ""):
        return
    if get_origin(value) is not None or not callable(value):
        yield f"{name}: {alternatives(value)}"
    elif inspect.isclass(value):
        bases = [base.__name__ for base in value.__bases__ if base is not object]
        yield f"{kind(value)} {name}({', '.join(bases)})"
        given = constructor(value)
        if given is not None:
            yield f"  __init__{shown(given)}"
        said: set[str] = set(given.parameters) if given is not None else set()
        for key in sorted(members(value) - said):
            yield f"  {member(value, key)}"
    else:
        yield called(name, value)


def alternatives(value: Any) -> str:
    """Write what a union or a `Literal` allows, by name; anything else is a value."""
    if get_origin(value) not in (Literal, Union, UnionType):
        return "value"
    return " | ".join(
        one.__name__ if inspect.isclass(one) else as_argument(one)
        for one in get_args(value)
    )


def as_argument(value: Any) -> str:
    """Write a value of a `Literal`; a type that has no name of its own by what it is."""
    origin = get_origin(value)
    return repr(value) if origin is None else str(getattr(origin, "__name__", origin))


def kind(value: type) -> str:
    """Say whether a class is one of data, whose values are equal by their fields, and whether these stay."""
    if not is_dataclass(value):
        return "class"
    given: Any = vars(value).get("__dataclass_params__")
    if given is None:  # the fields are those of a base
        return "class"
    words = [word for word in ("frozen", "order") if getattr(given, word)]
    return " ".join([*words, "dataclass" if given.eq else "dataclass of identities"])


def called(name: str, value: Any) -> str:
    """Write a function: whether it is awaited, and its parameters."""
    awaited = "async " if inspect.iscoroutinefunction(value) else ""
    return f"{awaited}{name}{shown(inspect.signature(value))}"


def members(value: Any) -> set[str]:
    """Find what this package gives to a class: its own attributes, and fields of data."""
    attributes: set[str] = {
        key
        for base in ours(value)
        for key, attribute in attributes_of(base)
        if "@private" not in (getattr(attribute, "__doc__", None) or "")
    }
    if is_dataclass(value) or issubclass(value, BaseModel):
        attributes |= own_fields(value)
    return {key for key in attributes if not key.startswith(("_", "model_"))}


def attributes_of(value: type) -> Iterator[tuple[str, Any]]:
    """Give what a class itself defines."""
    yield from vars(value).items()


def own_fields(value: Any) -> set[str]:
    """Find the fields that this package gives to a class of data."""
    return {name for base in ours(value) for name in get_annotations(base)}


def constructor(value: type) -> inspect.Signature | None:
    """Find how a class is made, if this package says so; without the fields that Semantic Kernel's bases add."""
    makers = [base for base in ours(value) if "__init__" in vars(base)]
    if is_protocol(value) or not (makers or issubclass(value, BaseModel)):
        return None
    fields: set[str] = set()
    if issubclass(value, BaseModel):
        value.model_rebuild()  # until then its constructor takes anything
        fields = set(value.model_fields)
    signature = signature_of(value)
    foreign = fields - own_fields(value)
    kept = [one for one in signature.parameters.values() if one.name not in foreign]
    return signature.replace(parameters=kept)


def signature_of(value: Any) -> inspect.Signature:
    """Return how a class is made."""
    return inspect.signature(value)


def ours(value: Any) -> list[type]:
    """List a class and those of its bases in this package that have no line of their own."""
    bases = [
        base for base in value.__mro__ if base.__module__.startswith("planner_ext")
    ]
    return [base for base in bases if base is value or base not in exported()]


@cache
def exported() -> set[Any]:
    """Find the public classes."""
    modules = [importlib.import_module(name) for name in MODULES]
    values = [getattr(module, name) for module in modules for name in module.__all__]
    return {value for value in values if inspect.isclass(value)}


def member(value: type, key: str) -> str:
    """Write one member: a method with its parameters, anything else by its name."""
    try:
        found = inspect.getattr_static(value, key)
    except AttributeError:
        return key
    if isinstance(found, staticmethod | classmethod) or inspect.isfunction(found):
        return called(key, getattr(value, key))
    return key


def shown(signature: inspect.Signature) -> str:
    """Write parameters by name, kind and default, without types."""
    plain = [
        one.replace(annotation=one.empty, default=default(one.default))
        for one in signature.parameters.values()
        if not one.name.startswith("_")
    ]
    return str(inspect.Signature(plain))


class AsIs:
    """A default that is written as it stands."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def default(value: Any) -> Any:
    """Write a simple default as it is, an option that was not given as ``...``, any other by its class."""
    if value is None or value is inspect.Parameter.empty:
        return value
    if type(value) in (bool, int, float, str, bytes, tuple):
        return value
    if value is Ellipsis:
        return AsIs("...")
    made = repr(value) == "<factory>"  # by a field's default_factory
    return AsIs("<factory>" if made else f"<{type(value).__name__}>")


if __name__ == "__main__":
    sys.stdout.write(surface())
