"""``max_repeated_calls``: what counts as the same call, however its arguments are written."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from semantic_kernel.functions import kernel_function

from planner_ext import Budget
from planner_ext.core.facts import CallDecided
from planner_ext.testing import call, say
from support.approval import Door, planner_with, three_doors, world
from support.values import each_of


class Point(BaseModel):
    """A value with defaults of its own."""

    a: int = 1
    b: int = 2


class Tools:
    """Functions that count how often they run."""

    def __init__(self) -> None:
        self.ran = 0

    def _run(self) -> str:
        self.ran += 1
        return "done"

    @kernel_function
    def ordered(self, value: OrderedDict[str, int]) -> str:
        return self._run()

    @kernel_function
    def mapped(self, value: Mapping[str, int]) -> str:
        return self._run()

    @kernel_function
    def listed(self, value: tuple[int, ...]) -> str:
        return self._run()

    @kernel_function
    def pointed(self, value: Point) -> str:
        return self._run()

    @kernel_function
    def numbered(self, value: float) -> str:
        return self._run()

    @kernel_function
    def defaulted(
        self, value: int = 7, unit: str = "kg", note: str | None = None
    ) -> str:
        return self._run()


SAME: dict[str, tuple[str, ...]] = {
    "ordered": ('{"value": {"a": 1, "b": 2}}', '{"value": {"b": 2, "a": 1}}'),
    "mapped": ('{"value": {"a": 1, "b": 2}}', '{"value": {"b": 2.0, "a": 1}}'),
    "listed": ('{"value": [1, 2]}', '{"value": [1.0, 2]}'),
    "pointed": ('{"value": {"a": 1}}', '{"value": {"b": 2, "a": 1}}'),
    "numbered": ('{"value": 1}', '{"value": 1.0}'),
    "defaulted": (
        "{}",
        '{"value": 7}',
        '{"unit": "kg", "note": null}',
        '{"value": 7.0, "unit": "kg"}',
    ),
}


@three_doors
@each_of("name", SAME)
async def test_equal_arguments_are_one_call(door: Door, name: str) -> None:
    """In any container, of any numeric type, with a default said or left out: it runs once."""
    for again in SAME[name][1:]:
        tools = Tools()
        here = world(
            [
                call(f"t-{name}", SAME[name][0]),
                call(f"t-{name}", again),
                say("Enough."),
            ],
            t=tools,
        )
        outcome = await door.ask(here, budget=Budget(max_repeated_calls=1))
        assert (tools.ran, outcome.status) == (1, "limit_reached"), again


@each_of("again", ['{"value": 8}', '{"unit": "g"}', '{"note": "kg"}'])
async def test_another_value_than_the_default_is_another_call(again: str) -> None:
    """It runs, and the limit is not reached."""
    tools = Tools()
    here = world(
        [call("t-defaulted", "{}"), call("t-defaulted", again), say("Done.")], t=tools
    )
    result = await planner_with(budget=Budget(max_repeated_calls=1)).invoke(
        here.kernel, "Go."
    )
    assert (tools.ran, result.status) == (2, "answered")


async def test_a_decision_binds_to_what_was_shown() -> None:
    """The count alone leaves defaults out: the calls' digests and fingerprints differ."""
    tools = Tools()
    script: Any = [
        call("t-defaulted", "{}"),
        call("t-defaulted", '{"value": 7}'),
        say("Done."),
    ]
    result = await planner_with().invoke(world(script, t=tools).kernel, "Go.")
    first, second = (fact for fact in result.facts if isinstance(fact, CallDecided))
    assert first.counted_as == second.counted_as
    assert (first.digest != second.digest, first.fingerprint != second.fingerprint) == (
        True,
        True,
    )
