"""Descriptions of kernel functions: worked out once, and again for a declaration that has changed."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

from semantic_kernel.functions import (
    KernelFunction,
    KernelFunctionFromMethod,
    KernelParameterMetadata,
)

from planner_ext.engine.effects import effect
from planner_ext.sk.functions.toolset import tool_of
from support.arguments import ADD, declaring, function_of, taking
from support.narrow import as_type, present
from support.values import each_of


def test_a_function_is_described_once() -> None:
    """The same declaration has the same description; that of a copy, which shares the method, is equal."""
    assert tool_of(ADD) is tool_of(ADD)
    assert tool_of(ADD.model_copy()) == tool_of(ADD)


def _schema(function: KernelFunction) -> None:
    schema = function.parameters[0].schema_data
    assert schema is not None
    schema["items"]["enum"] = [1, 2]


def _default(function: KernelFunction) -> None:
    function.parameters[0].default_value = True


def _hidden(function: KernelFunction) -> None:
    function.parameters[0].include_in_function_choices = False


def _type(function: KernelFunction) -> None:
    function.parameters[0].type_object = set[int]


def _name(function: KernelFunction) -> None:
    function.metadata.name = "g"


def _effect(function: KernelFunction) -> None:
    effect("idempotent")(as_type(KernelFunctionFromMethod, function).method)


def _method(function: KernelFunction) -> None:
    async def f(p: list[int]) -> int:
        return len(p)

    as_type(KernelFunctionFromMethod, function).method = f


def _parameters(function: KernelFunction) -> None:
    function.metadata.parameters = [KernelParameterMetadata(name="q")]


@each_of(
    "change", [_schema, _default, _hidden, _type, _name, _effect, _method, _parameters]
)
def test_a_declaration_that_is_changed_in_place_is_described_again(
    change: Callable[[KernelFunction], None],
) -> None:
    """Each part of a description may be changed on the function itself, at any depth."""

    def f(p: list[int] = 1) -> int:  # pyright: ignore[reportArgumentType]  # a default of another type
        return len(p)

    function = function_of(f)
    before = tool_of(function)
    change(function)
    assert tool_of(function) != before


def test_values_that_are_not_plain_are_read_each_time() -> None:
    """A change inside an object of the application's own is noticed, too."""

    class Own(dict[str, Any]):
        pass

    function = declaring(schema_data=Own(type="string"))
    before = tool_of(function)
    present(function.parameters[0].schema_data)["type"] = "integer"
    assert tool_of(function) != before


def test_a_description_does_not_keep_its_function() -> None:
    """A kernel that its application drops is freed, with its plugins."""
    function = taking(int)
    tool_of(function)
    seen = weakref.ref(function)
    del function
    gc.collect()
    assert seen() is None
