"""A caller's value in an error: one short line, and nothing of an object."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from planner_ext.core.errors import counted, shown
from support.values import each_of


@dataclass
class Account:
    """An object whose repr holds a secret."""

    password: str = "hunter2"


class Broken:
    """An object that cannot be written."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Loud(str):
    """A text with a repr of its own."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "password=hunter2"


@each_of(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (7, "7"),
        (0.5, "0.5"),
        ("seven", "'seven'"),
        ("a\nb", r"'a\nb'"),
        ([1, "b"], "[1, 'b']"),
        ({"a": 1}, "{'a': 1}"),
        (Account(), "an Account"),
        (Broken(), "a Broken"),
        ([Account()], "[an Account]"),
        ({"account": Account()}, "{'account': an Account}"),
        (Loud("x"), "'x'"),
        (Account, repr(Account)),
        (print, repr(print)),
        (Account().__init__, "a method"),
    ],
)
def test_a_value_is_shown_in_a_line(value: Any, text: str) -> None:
    """Plain values as they are, functions and classes by name, an object by its class alone."""
    assert shown(value) == text


@each_of(
    "value",
    [
        ["x" * 10**6],
        [10**5000],
        [[["y" * 500] * 500] * 500],
        [{str(n): n for n in range(9999)}],
        [b"z" * 9999],
    ],
    ids=["text", "number", "lists", "names", "bytes"],
)
def test_however_long_a_value_is_its_line_is_short(value: list[Any]) -> None:
    """At most 160 characters and three dots, on one line."""
    assert 0 < len(shown(value[0])) <= 163
    assert "\n" not in shown(value[0])


def test_a_text_of_eighty_characters_is_whole() -> None:
    """A longer one loses its end; below the third level nothing is shown."""
    name = "n" * (80 - len("<Long.: 1>"))
    whole: Any = Enum("Long", {name: 1})
    longer: Any = Enum("Long", {name + "n": 1})
    assert shown(whole(1)) == repr(whole(1))
    assert shown(longer(1)) == f"{repr(longer(1))[:80]}..."
    assert shown([[[[1]]]]) == "[[[[...]]]]"
    assert shown(["x" * 76] * 2) == str(["x" * 76] * 2)
    assert len(shown(["x" * 76, "x" * 77])) == 163
    assert shown([[[1]]]) == "[[[1]]]"


def test_one_is_counted_without_a_plural() -> None:
    """Any other number has one, with its thousands apart."""
    assert counted(1, "call") == "1 call"
    assert counted(0, "call") == "0 calls"
    assert counted(1200, "call") == "1,200 calls"
