import dataclasses
import datetime
import decimal
import enum
import json
import math
import uuid
from collections import UserDict, UserString, deque
from types import MappingProxyType
from typing import Any

import pydantic
from hypothesis import given
from hypothesis import strategies as st
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionResultContent,
    ImageContent,
    StreamingChatMessageContent,
    TextContent,
)
from semantic_kernel.functions import FunctionResult, KernelFunctionMetadata

from planner_ext.sk.functions.execution import NOT_WRITABLE, result_text, sendable
from support.values import each_of


@dataclasses.dataclass
class Point:
    x: int
    label: Any = None


class Order(pydantic.BaseModel):
    number: int
    total: decimal.Decimal


class Colour(enum.Enum):
    RED = "red"


class Size(enum.StrEnum):
    SMALL = "small"


class Unknown:
    def __str__(self) -> str:
        return "an unknown thing"


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def assistant(text: str) -> ChatMessageContent:
    return ChatMessageContent(role=AuthorRole.ASSISTANT, content=text)


def function_result(value: Any) -> FunctionResult:
    return FunctionResult(
        function=KernelFunctionMetadata(name="f", is_prompt=False), value=value
    )


@each_of(
    ("value", "text"),
    [
        (None, ""),
        ("", ""),
        ("plain 'text'", "plain 'text'"),
        (Size.SMALL, "small"),
        (True, "true"),
        (3, "3"),
        (1.5, "1.5"),
        (math.nan, "null"),
        ({"a": math.inf, "b": None}, '{"a":null,"b":null}'),
        ({"é": ["日本", {"x": False}]}, '{"é":["日本",{"x":false}]}'),
        ([], "[]"),
        ((1, "two"), '[1,"two"]'),
        ({7}, "[7]"),
        (Point(1, Point(2)), '{"x":1,"label":{"x":2,"label":null}}'),
        (Order(number=1, total=decimal.Decimal("1.10")), '{"number":1,"total":"1.10"}'),
        (decimal.Decimal("0.1"), '"0.1"'),
        (datetime.datetime(2025, 1, 2, tzinfo=datetime.UTC), '"2025-01-02T00:00:00Z"'),
        (
            [datetime.date(2025, 1, 2), datetime.timedelta(seconds=3)],
            '["2025-01-02","PT3S"]',
        ),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (Colour.RED, '"red"'),
        ({Colour.RED: Size.SMALL, 1: 2}, '{"red":"small","1":2}'),
        (b"bytes", '"bytes"'),
        ({"raw": b"\xff"}, '{"raw":"_w=="}'),
        (Unknown(), '"an unknown thing"'),
        ({"it": Unknown()}, '{"it":"an unknown thing"}'),
        (pydantic.SecretStr("key"), '"**********"'),
        ({"of": MappingProxyType({"raw": b"\xff"})}, '{"of":{"raw":"_w=="}}'),
        (UserDict({"a": deque([UserString("b")])}), '{"a":["b"]}'),
    ],
)
def test_values_are_json_and_text_is_itself(value: object, text: str) -> None:
    """Strings are themselves, None is empty, everything else is compact JSON."""
    assert result_text(value) == text


@each_of(
    ("value", "text"),
    [
        (assistant("Hello"), "Hello"),
        ([assistant("Hello")], "Hello"),
        ([assistant("one"), assistant("two")], "one\ntwo"),
        ([TextContent(text="completion")], "completion"),
        (
            StreamingChatMessageContent(
                role=AuthorRole.ASSISTANT, choice_index=0, content="Hi"
            ),
            "Hi",
        ),
        (
            ChatMessageContent(
                role=AuthorRole.ASSISTANT,
                items=[TextContent(text="a"), TextContent(text="b")],
            ),
            "ab",
        ),
        (FunctionResultContent(id="1", name="p-f", result={"a": 1}), '{"a":1}'),
        (ImageContent(uri="https://example.com/a.png"), "https://example.com/a.png"),
        (function_result({"a": 1}), '{"a":1}'),
        (function_result([assistant("Hello")]), "Hello"),
        (function_result(None), ""),
    ],
)
def test_messages_and_contents_are_their_text(value: object, text: str) -> None:
    """What prompt functions return is read as text, not as a message object."""
    assert result_text(value) == text


@each_of(
    ("value", "text"),
    [
        ("half \ud83d", "half \ufffd"),
        ("pair \ud83d\ude00", "pair 😀"),
        ({"\ud800": "\udc00"}, '{"\ufffd":"\ufffd"}'),
    ],
)
def test_lone_surrogates_are_replaced(value: object, text: str) -> None:
    """Every result can be encoded as UTF-8."""
    assert result_text(value) == text
    assert result_text(value).encode().decode() == text


def cycle() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def deep() -> list[Any]:
    items: list[Any] = []
    for _ in range(10_000):
        items = [items]
    return items


@each_of(
    "value", [cycle(), deep(), Broken(), {"it": Broken()}, function_result(Broken())]
)
def test_a_result_without_a_text_is_described(value: object) -> None:
    """Every return value of a function is written without an exception; the model reads that it has no text."""
    assert result_text(value) == NOT_WRITABLE


@given(st.text(st.characters(codec=None)))
def test_any_text_becomes_sendable(text: str) -> None:
    """Text without lone surrogates is unchanged, any other can be encoded."""
    sent = sendable(text)
    sent.encode()
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert sent == text


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    )
)
def test_any_json_value_comes_back_the_same(value: Any) -> None:
    """The text of a JSON value is that value; strings are not quoted, and None is empty."""
    text = result_text(value)
    if isinstance(value, str):
        assert text == value
    elif value is None:
        assert text == ""
    else:
        assert json.loads(text) == value
