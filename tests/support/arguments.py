"""What the tests of arguments share: functions of every parameter, and what is said of their arguments."""

import enum
import inspect
import json
from collections.abc import Callable
from typing import Any

import pydantic
from semantic_kernel.functions import (
    KernelFunction,
    KernelParameterMetadata,
    kernel_function,
)
from semantic_kernel.functions.kernel_function_from_method import (
    KernelFunctionFromMethod,
)

from planner_ext.sk.functions.conversion import InvalidArguments, parse_object
from planner_ext.sk.functions.toolset import convert_arguments, tool_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Item(pydantic.BaseModel):
    name: str
    count: int = 1

    @pydantic.field_validator("name")
    @classmethod
    def check_name(cls, name: str) -> str:
        if name == "forbidden":
            raise ValueError("looked up in the secret table")
        return name


def function_of(method: Callable[..., Any], **more: Any) -> KernelFunctionFromMethod:
    return KernelFunctionFromMethod(
        kernel_function(name="f")(method), plugin_name="p", **more
    )


def taking(annotation: Any, default: Any = inspect.Parameter.empty) -> KernelFunction:
    """A function ``p-f`` with one parameter ``p``."""

    def f(**arguments: Any) -> Any:
        return arguments["p"]

    parameter = inspect.Parameter(
        "p", inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )
    f.__signature__ = inspect.Signature([parameter])
    return function_of(f)


def declaring(**parameter: Any) -> KernelFunction:
    """A function ``p-f`` with one parameter ``p`` that was declared by hand, as plugins of remote tools do."""

    def f(**arguments: Any) -> Any:
        return arguments["p"]

    return function_of(f, parameters=[KernelParameterMetadata(name="p", **parameter)])


def parse(function: KernelFunction, text: str) -> dict[str, Any] | InvalidArguments:
    return convert_arguments(parse_object(text), tool_of(function))


def message_of(function: KernelFunction, text: str) -> str:
    parsed = parse(function, text)
    assert isinstance(parsed, InvalidArguments)
    return parsed.message


def accepts(function: KernelFunction, value: Any) -> bool:
    return not isinstance(parse(function, json.dumps({"p": value})), InvalidArguments)


def add(a: int, b: int = 0) -> int:
    return a + b


ADD = function_of(add)
