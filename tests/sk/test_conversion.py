"""One value: what is decided on, what is digested and what the function gets are the same, however it was spelled."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Optional

import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.functions import KernelArguments, KernelFunction
from typing_extensions import TypedDict

from planner_ext.approval.decisions import digest_of, with_plain_numbers
from planner_ext.sk.functions.conversion import InvalidArguments
from planner_ext.sk.functions.execution import runnable
from planner_ext.sk.functions.toolset import convert_arguments, tool_of
from support.arguments import (
    Colour,
    Item,
    declaring,
    function_of,
    message_of,
    parse,
    taking,
)
from support.examples import tried
from support.narrow import present
from support.values import each_of

Account = NewType("Account", int)


class Number(int):
    """A type of the application's own that is a number."""


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Share(Enum):
    HALF = 0.5
    WHOLE = 1.0


@dataclass
class Point:
    x: int
    y: float = 1.5


class Named(TypedDict):
    name: str
    account: int


class Payment(pydantic.BaseModel):
    account: int
    amount: Decimal = Decimal(1)
    tags: set[str] = set()


class Aliased(pydantic.BaseModel):
    account: int = pydantic.Field(alias="acc")


class EitherName(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    account: int = pydantic.Field(alias="acc")


class Drawn(pydantic.BaseModel):
    account: int
    id: uuid.UUID = pydantic.Field(default_factory=uuid.uuid4)


class Secret(pydantic.BaseModel):
    secret: pydantic.SecretStr
    account: int


async def received(function: KernelFunction, arguments: dict[str, Any]) -> Any:
    """What Semantic Kernel makes of arguments."""
    tool, given = tool_of(function), dict[str, Any]()
    tool.put(arguments, given)
    return present(
        await runnable(function, tool, threads=False).invoke(
            Kernel(), KernelArguments(**given)
        )
    ).value


def written(value: Any) -> str:
    """Write a value as it is digested."""
    return json.dumps(with_plain_numbers(value), sort_keys=True)


def converted(function: KernelFunction, value: Any) -> Any:
    parsed = parse(function, json.dumps({"p": value}))
    assert not isinstance(parsed, InvalidArguments), parsed.message
    return parsed["p"]


CONVERTED: list[tuple[Any, list[Any], Any, Any]] = [
    (int, [7, 7.0, "7", " 7\n", "+7", "007", "\u0667", 7e0], 7, 7),
    (int, ["1_0", 10, 1e1], 10, 10),
    (int, [-0.0, 0, "-0"], 0, 0),
    (int, [10**400, "1" + "0" * 400], 10**400, 10**400),
    (float, [7, 7.0, "7", " 7.0", "70e-1"], 7, 7.0),
    (float, [1e2, "1e2", 100], 100, 100.0),
    (float, [0.0, -0.0, 0, "-0"], 0, 0.0),
    (float, [2**53 + 1, 2**53, 2.0**53, "9007199254740993"], 2.0**53, 2.0**53),
    (float, [1e100, "1e100", int(1e100)], 1e100, 1e100),
    (Any, [1e16, 10**16], 10**16, 10**16),
    (list[float], [[1e16], [10**16]], [1e16], [1e16]),
    (str, [7, "7"], "7", "7"),
    (str, [7.0, "7.0"], "7.0", "7.0"),
    (str, [True, "True"], "True", "True"),
    (str, [" 7 "], " 7 ", " 7 "),
    (bool, [True], True, True),
    (Optional[int], [7, "7"], 7, 7),  # noqa: UP045  (as older code writes it)
    (Annotated[Optional[int], "described"], [7, "7"], 7, 7),  # noqa: UP045  (as older code writes it)
    (Account, [7, "7", 7.0], 7, 7),
    (Number, [7, "7", 7.0], 7, Number(7)),
    (Colour, ["red"], "red", Colour.RED),
    (Level, [1, 1.0], 1, Level.LOW),
    (Share, [1, 1.0], 1.0, Share.WHOLE),
    (Literal[7], [7, 7.0], 7, 7),
    (list[int], [[7, "8"], [7.0, 8], ["7", " 8"]], [7, 8], [7, 8]),
    (list[list[float]], [[[1]], [["1"]]], [[1]], [[1.0]]),
    (list[Colour], [["red"]], ["red"], [Colour.RED]),
    (
        list[Item],
        [[{"name": "a"}], [{"name": "a", "count": "1", "more": 5}]],
        [{"name": "a", "count": 1}],
        [Item(name="a")],
    ),
    (set[int], [[2, 1], [1, "2", 1.0]], [1, 2], {1, 2}),
    (frozenset[str], [["b", "a"], ["a", "b", "a"]], ["a", "b"], frozenset("ab")),
    (tuple[int, str], [["7", 7], [7.0, "7"]], [7, "7"], [7, "7"]),
    (
        dict[str, float],
        [{"a": "7", "b": 1}, {"b": 1.0, "a": 7}],
        {"a": 7, "b": 1},
        {"a": 7, "b": 1},
    ),
    (dict, [{"a": 7}, {"a": 7.0}], {"a": 7}, {"a": 7}),
    (Any, [7, 7.0], 7, 7),
    (Any, [[{"a": -0.0}]], [{"a": 0}], [{"a": 0}]),
    (int | str, [7, 7.0], 7, 7),
    (int | str, ["7"], "7", "7"),
    (Decimal, ["1.50", 1.5, "1.5", "15e-1"], "1.5", Decimal("1.5")),
    (Decimal, [100.1, "100.10"], "100.1", Decimal("100.1")),
    (Decimal, [100, "1e2", "100.00"], "100", Decimal(100)),
    (Decimal, ["-0", 0, 0.0, "0E-100", "0E+100"], "0", Decimal(0)),
    (Decimal, ["1E+100", "1.0E+100", 10**100, 1e100], "1E+100", Decimal("1E+100")),
    (Decimal, ["1E-100", "1.0E-100", 1e-100], "1E-100", Decimal("1E-100")),
    (Path, ["a//b", "a/b", "a/./b"], "a/b", Path("a/b")),
    (
        uuid.UUID,
        [f"{{{uuid.UUID(int=7)}}}", uuid.UUID(int=7).hex, str(uuid.UUID(int=7))],
        str(uuid.UUID(int=7)),
        uuid.UUID(int=7),
    ),
    (Point, [{"x": "7"}, {"x": 7.0, "y": 1.5}], {"x": 7, "y": 1.5}, Point(7)),
    (
        Named,
        [{"name": "a", "account": "7"}],
        {"name": "a", "account": 7},
        {"name": "a", "account": 7},
    ),
    (
        Item,
        [{"name": "a"}, {"name": "a", "count": 1.0, "more": 5}],
        {"name": "a", "count": 1},
        Item(name="a"),
    ),
    (
        Payment,
        [
            {"account": "7", "amount": "2.50", "tags": ["b", "a", "b"]},
            {"tags": ["a", "b"], "account": 7, "amount": 2.5},
        ],
        {"account": 7, "amount": "2.5", "tags": ["a", "b"]},
        Payment(account=7, amount=Decimal("2.5"), tags={"a", "b"}),
    ),
    (Aliased, [{"acc": "7"}, {"acc": 7}], {"acc": 7}, Aliased(acc=7)),
    (EitherName, [{"acc": "7"}, {"account": 7}], {"account": 7}, EitherName(acc=7)),
]


@each_of(
    ("annotation", "spellings", "seen", "got"),
    CONVERTED,
    ids=[f"{row[0]}-{row[1]}" for row in CONVERTED],
)
async def test_every_spelling_is_one_value(
    annotation: Any, spellings: Sequence[Any], seen: Any, got: Any
) -> None:
    """A value is seen, digested and received in one way, and converting it again changes nothing."""
    function = taking(annotation)
    for value in spellings:
        assert written(converted(function, value)) == written(seen)
        assert written(converted(function, seen)) == written(seen)
        assert await received(function, {"p": converted(function, value)}) == got


@each_of(
    ("annotation", "values"),
    [
        (int, [True, 7.5, "7.0", "0x7", "seven", "", None, [7]]),
        (float, [True, "nan", "inf", "1e999", 10**400, "7,5", None]),
        (bool, ["true", "false", 0, 1, "", None]),
        (str, [None, [], {}]),
        (list[int], [[True], [7.5], [None], ["x"], "7"]),
        (list[str], [[None]]),
        (list[bool], [["false"], [0]]),
        (dict[str, int], [{"a": 7.5}, {"a": True}, {"a": None}]),
        (set[int], [["x"], {"a": 1}]),
        (tuple[int, str], [[7], [7, "a", 1]]),
        (Number, [True, "x", None]),
        (Account, [True, "x", None]),
        (Level, [True, 3, "1"]),
        (
            Decimal,
            [True, "x", None, [1], {}, {"value": "7"}, [0, [7], 0], "NaN", "Infinity"],
        ),
        (uuid.UUID, ["x", {}, {"int": 7}, True]),
        (Item, [{}, {"name": 7}, {"name": "a", "count": "many"}, "a"]),
        (Payment, [{"account": 7.5}, {"account": "x"}]),
    ],
    ids=repr,
)
def test_what_means_no_value_of_its_type_is_refused(
    annotation: Any, values: list[Any]
) -> None:
    """Semantic Kernel would take some of these for something else, on every level; the model reads what is expected."""
    function = taking(annotation)
    for value in values:
        assert isinstance(
            parse(function, json.dumps({"p": value})), InvalidArguments
        ), value


class Ratio(pydantic.BaseModel):
    of: list[Fraction | None]
    name: str = ""


@dataclass
class Scale:
    by: Fraction


@pytest.mark.timeout(20)
@each_of(
    "number", ["1e30000000", " -1.5E-30000000 ", "1e+3_0000_000", "1e" + "9" * 10_000]
)
@each_of(
    ("annotation", "made"),
    [
        (Fraction, lambda number: number),
        (Decimal, lambda number: number),
        (list[Fraction], lambda number: [number]),
        (dict[str, Fraction], lambda number: {"a": number}),
        (Ratio, lambda number: {"of": ["1/2", number]}),
        (Scale, lambda number: {"by": number}),
    ],
    ids=["fraction", "decimal", "list", "dict", "model", "dataclass"],
)
def test_a_number_whose_digits_would_fill_the_memory_is_refused_before_it_is_made(
    annotation: Any, made: Any, number: str
) -> None:
    """An exponent is bounded where the number becomes exact: to write out its digits would hold the event loop."""
    assert "number with an exponent of at most 4300" in message_of(
        taking(annotation), json.dumps({"p": made(number)})
    )


@each_of(
    ("annotation", "value"),
    [
        (Fraction, "1e300"),
        (Fraction, "3/4"),
        (Decimal, "1E+4300"),
        (str, "1e30000000"),
        (Ratio, {"of": ["1/2"], "name": "commit e30000000"}),
        (Ratio, {"of": ["1/2"], "name": "abc1e30000000"}),
        (Payment, {"account": 1, "tags": ["1e30000000"]}),
    ],
)
def test_a_text_that_becomes_no_such_number_is_taken(
    annotation: Any, value: Any
) -> None:
    """Only what a fraction or a decimal would be read from is looked at."""
    assert isinstance(parse(taking(annotation), json.dumps({"p": value})), dict)


def test_a_number_is_not_read_as_so_many_bytes() -> None:
    """``bytes(n)`` makes n zeros."""
    assert "cannot be converted to bytes" in message_of(
        taking(bytes), json.dumps({"p": 10**12})
    )


def test_a_message_names_the_place_inside_an_argument() -> None:
    """The model reads which member of which list cannot be used, and what would be."""
    message = message_of(taking(dict[str, list[int]]), '{"p": {"a": [1, "x"]}}')
    assert '"p"["a"][1] must be integer, not "x".' in message
    message = message_of(taking(list[Item]), '{"p": [{"name": "forbidden"}]}')
    assert '"p"[0] cannot be converted to Item (name: not valid).' in message


@each_of(
    ("schema", "value", "seen"),
    [
        ({"type": "integer"}, 7.0, 7),
        ({"type": "integer"}, 1e20, 10**20),
        ({"type": "number"}, 7.0, 7),
        ({"type": "number"}, 7.5, 7.5),
        ({"type": "array", "items": {"type": "integer"}}, [7.0], [7]),
        ({"enum": [1, "a"]}, 1.0, 1),
        ({}, {"a": [7.0]}, {"a": [7]}),
    ],
)
async def test_a_number_has_one_spelling_where_only_a_schema_is_known(
    schema: Any, value: Any, seen: Any
) -> None:
    """JSON has one kind of number: 7.0 is 7, also for the functions of remote tools, which get it as it was sent."""
    function = declaring(schema_data=schema, is_required=True)
    assert written(converted(function, value)) == written(seen)
    assert await received(function, {"p": seen}) == seen


async def test_a_number_that_its_type_takes_is_not_rewritten() -> None:
    """A function that tells 50.0 from 50, or passes its arguments on as JSON, gets what the model sent."""
    for function in (
        declaring(schema_data={"type": "number"}, is_required=True),
        taking(Any),
        taking(dict),
    ):
        for value in (50.0, 50):
            sent = {"a": [value]} if function.parameters[0].type_ == "dict" else value
            assert json.dumps(
                await received(function, {"p": converted(function, sent)})
            ) == json.dumps(sent)


async def test_a_null_is_none_or_refused() -> None:
    """A null that would be dropped for a default other than None is refused: that default was never shown."""
    optional = taking(Annotated[Optional[int], "described"], 3)  # noqa: UP045  (as older code writes it)
    assert isinstance(parse(optional, '{"p": null}'), InvalidArguments)
    assert isinstance(
        parse(
            declaring(
                type_object=str,
                schema_data={"type": ["string", "null"]},
                is_required=True,
            ),
            '{"p": null}',
        ),
        InvalidArguments,
    )
    function = taking(str | None, None)
    assert parse(function, '{"p": null}') == {"p": None}
    assert parse(function, '{"p": "None"}') == {"p": "None"}


def test_defaults_that_are_drawn_are_left_out_of_a_value() -> None:
    """A default that differs each time is the function's own: the same call has the same digest."""
    function = taking(Drawn)
    assert (
        converted(function, {"account": "7"})
        == converted(function, {"account": 7})
        == {"account": 7}
    )
    assert converted(function, {"account": "7", "id": uuid.UUID(int=7).hex}) == {
        "account": 7,
        "id": str(uuid.UUID(int=7)),
    }


async def test_a_model_that_does_not_read_what_it_writes_is_left_as_it_was_sent() -> (
    None
):
    """A secret is written as stars: the function gets what the model sent, and that is what is decided on."""
    sent = {"secret": "hush", "account": "7"}
    assert converted(taking(Secret), sent) == sent
    got = await received(taking(Secret), {"p": sent})
    assert (got.secret.get_secret_value(), got.account) == ("hush", 7)


def test_a_constructor_of_the_applications_own_is_not_called() -> None:
    """What it may do is not done before the decision."""

    class Connection:
        def __init__(self, url: str) -> None:
            raise AssertionError("connected")

    assert converted(taking(Connection), "db://") == "db://"


def test_a_validator_that_changes_what_it_reads_changes_no_argument() -> None:
    """The model's own text is parsed once, and stays as it was."""

    class Popping(pydantic.BaseModel):
        account: int

        @pydantic.model_validator(mode="before")
        @classmethod
        def move(cls, data: Any) -> Any:
            return {"account": data.pop("number", data.get("account"))}

    assert converted(taking(Popping), {"number": "7"}) == {"account": 7}


def test_what_needs_no_conversion_is_the_same_object() -> None:
    """What is already one value is not copied."""

    def f(
        a: int, b: str, c: list[int], d: dict[str, Any], e: float, g: bool
    ) -> None: ...

    function = function_of(f)
    given = {"a": 1, "b": "x", "c": [1, 2], "d": {"x": [1, 1.5]}, "e": 1.5, "g": True}
    assert convert_arguments(given, tool_of(function)) is given


SCALARS = st.sampled_from(
    [int, float, str, bool, Any, Colour, Level, Decimal, Item, Account, Number]
)
TYPES = st.recursive(
    SCALARS,
    lambda inner: (
        inner.map(lambda one: list[one])
        | inner.map(lambda one: dict[str, one])
        | inner.filter(lambda one: one in (int, str, float)).map(lambda one: set[one])
    ),
    max_leaves=2,
)
NUMBERS = (
    st.integers(-20, 20)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | NUMBERS.map(str)
    | st.integers(-5, 5).map(lambda n: f" {n} ")
    | st.sampled_from(["red", "1", "7.0", "x"])
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "count", "a"]), inner)
    ),
    max_leaves=4,
)


def seen_as(got: Any) -> Any:
    """Write what a function received as the JSON that says the same, without a look at how it was spelled."""
    match got:
        case Item():
            return got.model_dump()
        case Enum():
            return seen_as(got.value)
        case Decimal():
            plain = got.normalize()
            return str(plain) if abs(plain.adjusted()) > 80 else format(plain, "f")
        case list():
            return [seen_as(one) for one in got]
        case dict():
            return {name: seen_as(one) for name, one in got.items()}
        case set():
            return sorted((seen_as(one) for one in got), key=json.dumps)
        case _:
            return got


@tried(300)
@given(kind=TYPES, value=VALUES)
@example(kind=list[Decimal], value=[1e81])
async def test_what_is_seen_is_what_is_received(kind: Any, value: Any) -> None:
    """For any type and any value: refused, or the function gets what was seen, and no other digest is its."""
    function = taking(kind)
    parsed = parse(function, json.dumps({"p": value}))
    if isinstance(parsed, InvalidArguments):
        return
    got = await received(function, parsed)
    assert seen_as(got) == parsed["p"]
    again = parse(function, json.dumps(parsed))
    assert not isinstance(again, InvalidArguments)
    assert digest_of("f", again) == digest_of("f", parsed)
    written = parse(function, json.dumps({"p": seen_as(got)}))
    assert not isinstance(written, InvalidArguments)
    assert digest_of("f", written) == digest_of("f", parsed)
