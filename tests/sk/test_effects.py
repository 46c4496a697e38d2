"""``@effect``: what it refuses, and the key that the model neither sees nor gives, in every run."""

from typing import Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
)
from planner_ext.core.errors import InvalidLimitError
from planner_ext.durable import effect
from planner_ext.engine.effects import Effect, effect_of
from planner_ext.events import ResultReady
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedOpenAIServer,
    call,
    calls,
    say,
)
from support.values import each_of

both_ways = pytest.mark.parametrize(
    "streamed", [False, True], ids=["plain", "streamed"]
)


class Bank:
    def __init__(self) -> None:
        self.keys: list[str] = []

    @effect("keyed")
    @kernel_function(description="Pays.")
    async def pay(self, amount: int, idempotency_key: str) -> str:
        self.keys.append(idempotency_key)
        return "paid"

    @kernel_function
    @effect("once", probe=lambda key, arguments: None)
    def book(self, idempotency_key: str = "") -> str:
        self.keys.append(idempotency_key)
        return "booked"

    @kernel_function
    def plain(self, idempotency_key: str) -> str:
        self.keys.append(f"of the model: {idempotency_key}")
        return "done"


async def run(
    script: Any, *, streamed: bool, **arguments: Any
) -> tuple[Bank, ScriptedChatCompletion, Any]:
    bank, service, kernel = Bank(), ScriptedChatCompletion(script), Kernel()
    kernel.add_service(service)
    kernel.add_plugin(bank, "bank")
    planner = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(plan=False)
    )
    if not streamed:
        return bank, service, await planner.invoke(kernel, "Pay.", **arguments)
    events = [
        event async for event in planner.invoke_stream(kernel, "Pay.", **arguments)
    ]
    assert isinstance(events[-1], ResultReady)
    return bank, service, events[-1].result


@both_ways
async def test_a_marked_function_receives_its_calls_key(streamed: bool) -> None:
    """Of a keyed function, and of any marked one that has the parameter: run, trip and call id."""
    script = [
        calls(
            call("bank-pay", {"amount": 1}, id="one"), call("bank-book", {}, id="two")
        ),
        call("bank-plain", {"idempotency_key": "mine"}, id="three"),
        say("Done."),
    ]
    bank, _, result = await run(
        script, streamed=streamed, idempotency_key="of the application"
    )
    run_id = result.checkpoint.run_id
    assert sorted(bank.keys) == sorted(
        [f"{run_id}/0/one", f"{run_id}/0/two", "of the model: mine"]
    )


@both_ways
async def test_the_model_neither_sees_nor_gives_the_key(streamed: bool) -> None:
    """It is in no schema and in no plan's list, and as an argument it is refused by name."""
    bank, kernel = Bank(), Kernel()
    kernel.add_plugin(bank, "bank")
    script = [
        say("Pay."),
        call("bank-pay", {"amount": 1, "idempotency_key": "forged"}, id="one"),
        say("Done."),
    ]
    with ScriptedOpenAIServer(script) as server:
        async with AsyncOpenAI(
            base_url=server.url, api_key="any", max_retries=0
        ) as client:
            kernel.add_service(
                OpenAIChatCompletion(ai_model_id="scripted", async_client=client)
            )
            options = FunctionCallingStepwisePlannerOptions(
                excluded_functions={"book", "plain"}
            )
            planner = FunctionCallingStepwisePlanner(options=options)
            if streamed:
                async for _ in planner.invoke_stream(kernel, "Pay."):
                    pass
            else:
                await planner.invoke(kernel, "Pay.")
    plan, step, last = (request.body for request in server.requests)
    assert "bank-pay" in str(plan)
    assert "idempotency_key" not in str(plan) + str(step)
    assert bank.keys == []
    assert '"idempotency_key" is not a parameter' in str(last)


def test_a_mark_is_read_off_methods_of_every_kind() -> None:
    """Bound methods, static and class methods, above or below ``@kernel_function``."""

    class Tools:
        @staticmethod
        @effect("idempotent")
        def below() -> None: ...

        @effect("idempotent")
        @classmethod
        def above(cls) -> None: ...

    assert (
        effect_of(Tools().below) == effect_of(Tools.above) == Effect(kind="idempotent")
    )
    assert effect_of(Bank().plain) is None


@each_of(
    ("declare", "problem"),
    [
        (lambda: effect("twice"), 'takes "once", "idempotent" or "keyed"'),  # pyright: ignore[reportArgumentType]  # junk, on purpose
        (
            lambda: effect("keyed", probe=lambda *_: None),
            'only stands with effect\\("once"\\)',
        ),
        (lambda: effect(probe="ask"), "probe must be a function"),  # pyright: ignore[reportArgumentType]  # junk, on purpose
        (
            lambda: effect("keyed")(lambda amount: None),
            "has no parameter idempotency_key: add it",
        ),
    ],
)
def test_a_mark_that_means_nothing_is_refused(declare: Any, problem: str) -> None:
    """Another kind, a probe that is of no use, and a keyed function without the parameter."""
    with pytest.raises(InvalidLimitError, match=problem):
        declare()
