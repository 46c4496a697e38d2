"""A user's module, and what a command left behind."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["COMMAND", "SHOP", "Command", "Outcome"]

SHOP = '''
"""What a user's own module may look like, noise included."""

import time

from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext.testing import ScriptedChatCompletion, call, say

print("imported")


class Shop:
    @kernel_function(description="The price of an article.")
    def price(self, article: str) -> dict:
        print("looked up")
        return {"lamp": {"price": 42}}[article]

    @kernel_function(description="Takes its time.")
    def wait(self) -> str:
        time.sleep(30)
        return "done"


def make():
    print("made")
    kernel = Kernel()
    kernel.add_plugin(Shop(), "shop")
    return kernel


async def make_async():
    return make()


def with_service():
    kernel = make()
    kernel.add_service(ScriptedChatCompletion([call("shop-price", {"article": "lamp"}), say("It is 42.")]))
    return kernel


kernel = make()
number = 3


def broken():
    raise LookupError("no such shop")


async def broken_later():
    raise SystemExit("closed")
'''


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output, which must be one JSON document and nothing else."""
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """Standard error, in one line: a paragraph is broken at the width of the terminal."""
        return " ".join(self.err.split())


Command = Callable[..., Outcome]
"""Runs the command with arguments."""


COMMAND = ("-m", "planner_ext.cli")
"""What a program of `Lives` begins with."""
