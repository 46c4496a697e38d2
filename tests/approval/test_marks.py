"""What a function is marked with, and what cannot be marked."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Annotated, Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import KernelFunctionFromPrompt, kernel_function

from planner_ext import ApprovalFilter, ApprovalPolicy, requires_approval
from planner_ext.durable import effect
from planner_ext.engine.effects import Effect, effect_of
from planner_ext.errors import InvalidLimitError, NotAFunctionError
from planner_ext.sk.functions.toolset import tool_of
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.approval import DOORS, World, results, world
from support.approval_filter import ENTRIES, guarded
from support.values import each_of


@each_of(
    "given",
    ["x", 7, object(), [], type, len],
    ids=["text", "int", "object", "list", "class", "C"],
)
def test_only_functions_can_be_marked(given: Any) -> None:
    """Anything else is refused in a sentence that says how it is written; a function of C keeps no mark."""
    for mark in (
        requires_approval,
        requires_approval(prompt="Sure?"),
        requires_approval(expires_in=1),
    ):
        with pytest.raises(
            NotAFunctionError,
            match=r"marks a function; got .*@requires_approval\(prompt=",
        ):
            mark(given)
    with pytest.raises(NotAFunctionError, match="marks a function"):
        effect("once")(given)


def test_a_prompt_is_a_text() -> None:
    """Another one is refused when the function is marked."""
    with pytest.raises(InvalidLimitError, match="prompt must be text"):
        requires_approval(prompt=7)  # pyright: ignore[reportArgumentType]  # junk, on purpose


class Bank:
    @kernel_function
    def pay(
        self, amount: float, idempotency_key: Annotated[str, "Of the call"] = ""
    ) -> str:
        raise AssertionError(f"{amount} was paid as {idempotency_key}")


def marked_kernel() -> Kernel:
    """Make a kernel with marked functions: of a class, of a prompt, and of a partial, as those of an MCP server are."""
    kernel = Kernel()
    kernel.add_plugin(Bank(), "bank")
    kernel.add_function("text", prompt="Summarise the news.", function_name="sum-up")

    async def call_tool(name: str, **arguments: Any) -> str:
        raise AssertionError(f"{name} was called with {arguments}")

    kernel.add_function(
        "mcp", kernel_function(name="fetch-page")(partial(call_tool, "fetch-page"))
    )
    for plugin in kernel.plugins.values():
        for function in plugin.functions.values():
            assert requires_approval(prompt="Sure?")(function) is function
    return kernel


def added_again(kernel: Kernel) -> Kernel:
    return Kernel(plugins=[*kernel.plugins.values()])


ALL = calls(
    call("bank-pay", {"amount": 1}), call("text-sum-up"), call("mcp-fetch-page")
)


@each_of("copied", [lambda kernel: kernel, Kernel.clone, deepcopy, added_again])
async def test_a_function_of_a_kernel_can_be_marked(
    copied: Callable[[Kernel], Kernel],
) -> None:
    """The mark of a kernel's function, of every kind, holds in copies of the kernel and of its plugins."""
    kernel, service = copied(marked_kernel()), ScriptedChatCompletion([ALL])
    kernel.add_service(service)
    outcome = await DOORS[0].ask(World(kernel, service, world([]).shop))
    assert [
        (one["fully_qualified_name"], one["prompt"]) for one in outcome.pending
    ] == [(name, "Sure?") for name in ("bank-pay", "text-sum-up", "mcp-fetch-page")]


async def test_a_marked_prompt_that_a_function_runs_is_decided() -> None:
    """A prompt outside the kernel's functions is a request, not a call, unless it is marked."""
    prompt = requires_approval(KernelFunctionFromPrompt("say", prompt="Say it."))

    class Outer:
        @kernel_function
        async def run(self, kernel: Kernel) -> str:
            return str(await kernel.invoke(prompt))

    here = world([call("outer-run"), say("Done.")], outer=Outer())
    outcome = await DOORS[0].ask(here)
    assert (outcome.status, here.requests) == ("answered", 2)
    assert "needs a person's decision" in results(outcome.history)[0]


async def test_a_filter_sees_the_mark_of_a_kernels_function() -> None:
    """An allow default of its policy does not free the function."""
    filter = ApprovalFilter(ApprovalPolicy.from_dict({"default": "allow"}))
    here = guarded(
        [call("text-sum-up"), say("Done.")],
        by=filter,
        text=marked_kernel().plugins["text"],
    )
    await ENTRIES[0].ask(here)
    assert here.requests == 1


def test_a_function_of_a_kernel_can_declare_its_effect() -> None:
    """The declaration holds for it and its copies, not for other functions of the same method."""
    kernel, other = marked_kernel(), marked_kernel()
    pay = kernel.get_function("bank", "pay")
    assert effect("keyed")(pay) is pay
    for one in (pay, kernel.clone().get_function("bank", "pay")):
        assert effect_of(one) == Effect(kind="keyed")
        assert tool_of(one).restarts
        assert (tool_of(one).injected, [*tool_of(one).parameters]) == (
            {"idempotency_key"},
            ["amount"],
        )
    assert not tool_of(other.get_function("bank", "pay")).restarts
    said = kernel.get_function("text", "sum-up")
    with pytest.raises(
        InvalidLimitError,
        match=r'^text-sum-up is declared effect."keyed".* no parameter',
    ):
        effect("keyed")(said)
    assert effect_of(said) is None
