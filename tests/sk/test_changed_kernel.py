"""A kernel that changes, between two requests or between two runs: the next request offers what the kernel has then."""

import gc
import weakref
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from typing import Annotated, Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_calling_utils import (
    kernel_function_metadata_to_function_call_format,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import (
    KernelFunction,
    KernelFunctionFromMethod,
    KernelFunctionMetadata,
    KernelParameterMetadata,
    kernel_function,
)

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    requires_approval,
)
from planner_ext.durable import effect
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.narrow import as_type, present
from support.served import Answer, Served, question
from support.values import each_of

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]
Change = Callable[[Kernel], None]


class Shop:
    """A plugin with two functions, and the one that changes the kernel."""

    def __init__(self, kernel: Kernel, change: Change) -> None:
        self._kernel = kernel
        self._change = change

    @kernel_function(description="Sells.")
    async def sell(
        self,
        item: Annotated[str, "What"],
        idempotency_key: str = "",
        tags: list[str] | None = None,
    ) -> str:
        return f"sold {item}"

    @kernel_function(description="Counts.")
    async def count(self) -> int:
        return 3

    def counted(self, key: str, arguments: Mapping[str, Any]) -> None:
        """Cannot tell."""

    @kernel_function(description="Rebuilds.")
    async def rebuild(self) -> str:
        self._change(self._kernel)
        return "rebuilt"


class OtherConnector(OpenAIChatCompletion):
    """One whose requests its own methods write."""


def shop(change: Change = lambda _: None) -> Kernel:
    kernel = Kernel()
    kernel.add_plugin(Shop(kernel, change), "shop")
    return kernel


def sell(kernel: Kernel) -> KernelFunctionFromMethod:
    return as_type(KernelFunctionFromMethod, kernel.get_function("shop", "sell"))


def item(kernel: Kernel) -> KernelParameterMetadata:
    return sell(kernel).parameters[0]


def made(name: str, description: str) -> KernelFunction:
    @kernel_function(name=name, description=description)
    async def function(number: int) -> int:
        return number

    return KernelFunctionFromMethod(function, "shop")


def _plugin_added(kernel: Kernel) -> None:
    kernel.add_function("annex", made("open", "Opens."))


def _plugin_removed(kernel: Kernel) -> None:
    _plugin_added(kernel)
    del kernel.plugins["annex"]
    kernel.add_function("store", made("close", "Closes."))


def _plugins_ordered(kernel: Kernel) -> None:
    plugin = kernel.plugins.pop("shop")
    _plugin_added(kernel)
    kernel.plugins["shop"] = plugin


def _function_added(kernel: Kernel) -> None:
    kernel.add_function("shop", made("open", "Opens."))


def _function_removed(kernel: Kernel) -> None:
    del kernel.plugins["shop"].functions["count"]


def _function_replaced(kernel: Kernel) -> None:
    kernel.add_function("shop", made("count", "Counts again."))


def _copied_elsewhere(kernel: Kernel) -> None:
    kernel.add_function("annex", sell(kernel))


def _description(kernel: Kernel) -> None:
    sell(kernel).metadata.description = "Sells dear."


def _words_of_a_parameter(kernel: Kernel) -> None:
    present(item(kernel).schema_data)["description"] = "Which"


def _values_of_a_parameter(kernel: Kernel) -> None:
    present(sell(kernel).parameters[2].schema_data)["items"]["enum"] = ["new"]


def _schema(kernel: Kernel) -> None:
    item(kernel).schema_data = {"type": "string", "enum": ["tea"]}


def _required(kernel: Kernel) -> None:
    item(kernel).is_required = False


def _hidden(kernel: Kernel) -> None:
    item(kernel).include_in_function_choices = False


def _parameters(kernel: Kernel) -> None:
    sell(kernel).metadata.parameters.pop()


def _metadata(kernel: Kernel) -> None:
    own = sell(kernel).metadata
    sell(kernel).metadata = KernelFunctionMetadata(
        name=own.name,
        plugin_name=own.plugin_name,
        description="Sells cheap.",
        is_prompt=False,
        parameters=[],
    )


CHANGES = [
    _plugin_added,
    _plugin_removed,
    _plugins_ordered,
    _function_added,
    _function_removed,
    _function_replaced,
    _copied_elsewhere,
    _description,
    _words_of_a_parameter,
    _values_of_a_parameter,
    _schema,
    _required,
    _hidden,
    _parameters,
    _metadata,
]


def stock_schemas(kernel: Kernel) -> list[Any]:
    """What Semantic Kernel sends of a kernel."""
    return deepcopy(
        [
            *map(
                kernel_function_metadata_to_function_call_format,
                kernel.get_full_list_of_function_metadata(),
            )
        ]
    )


def sent_schemas(served: Served) -> list[Any]:
    return [request.body["tools"] for request in served.server.requests]


def connected(served: Served, connector: str) -> FunctionInvokingChatCompletion:
    kind: Any = OtherConnector if connector == "other" else OpenAIChatCompletion
    return FunctionInvokingChatCompletion(
        kind("scripted", service_id="served", async_client=served.connector.client)
    )


@each_of("connector", ["openai", "other"])
@each_of("change", CHANGES)
async def test_a_change_between_two_requests_is_in_the_second(
    ask: Ask, serve: Serve, change: Change, connector: str
) -> None:
    """What a function changes in its kernel is offered as it is then, and as Semantic Kernel would."""
    kernel = shop(change)
    before = stock_schemas(shop())
    served = serve([call("shop-rebuild"), say("Done.")])
    await ask(connected(served, connector), to=question(), kernel=kernel)
    assert stock_schemas(kernel) != before
    assert sent_schemas(served) == [before, stock_schemas(kernel)]


@each_of("connector", ["openai", "other"])
@each_of("change", CHANGES)
async def test_a_change_between_two_runs_is_in_the_second(
    ask: Ask, serve: Serve, change: Change, connector: str
) -> None:
    """Nothing that was kept of the first run, here of one kernel and of its copy, outlasts the change."""
    kernel = shop()
    before = stock_schemas(kernel)
    served = serve([say("Hi.")] * 4)
    service = connected(served, connector)
    for again in (kernel, kernel.clone()):
        await ask(service, to=question(), kernel=again)
    change(kernel)
    await ask(service, to=question(), kernel=kernel)
    await ask(service, to=question(), kernel=shop())
    assert sent_schemas(served) == [before, before, stock_schemas(kernel), before]


@each_of("at", ["function", "method"])
async def test_another_effect_is_seen_at_the_next_request(
    ask: Ask, serve: Serve, at: str
) -> None:
    """A parameter that the run fills once the function is marked is no longer offered, and its call gets it."""
    marked: list[Kernel] = []

    def mark(kernel: Kernel) -> None:
        function = sell(kernel)
        effect("keyed")(function if at == "function" else function.method)
        marked.append(kernel)

    served = serve([call("shop-rebuild"), say("Done.")])
    service = FunctionInvokingChatCompletion(served.connector)
    await ask(service, to=question(), kernel=shop(mark))
    names = [
        [*tools[2]["function"]["parameters"]["properties"]]
        for tools in sent_schemas(served)
    ]
    for kernel in marked:
        del vars(sell(kernel) if at == "function" else sell(kernel).method.__func__)[
            "__planner_ext_effect__"
        ]
    assert names == [["item", "idempotency_key", "tags"], ["item", "tags"]]


async def test_another_mark_is_seen_at_the_next_call(ask: Ask) -> None:
    """A function that is marked during a run waits for a person from the next call on."""
    kernel = shop(lambda kernel: present(requires_approval(sell(kernel))) and None)
    sold = call("shop-sell", {"item": "tea"})
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([calls(sold, call("shop-rebuild")), sold, say("Sold.")])
    )
    answer = await ask(service, kernel=kernel)
    assert answer.metadata["status"] == "paused"
    assert answer.metadata["tool_calls"] == 2


async def test_another_method_runs_at_the_next_call(ask: Ask) -> None:
    """A method that is replaced in place is what the next call runs, with the arguments that it declares."""

    async def refuse(item: str) -> str:
        return f"no {item} left"

    kernel = shop(lambda kernel: setattr(sell(kernel), "method", refuse))
    sold = call("shop-sell", {"item": "tea"})
    inner = ScriptedChatCompletion([sold, call("shop-rebuild"), sold, say("Done.")])
    await ask(FunctionInvokingChatCompletion(inner), kernel=kernel)
    results = [
        message["content"]
        for message in inner.requests[-1].messages
        if message["role"] == "tool"
    ]
    assert results == ["sold tea", "rebuilt", "no tea left"]


@pytest.mark.parametrize("door", ["service", "planner"])
async def test_a_kernel_is_freed_when_its_application_drops_it(
    ask: Ask, serve: Serve, door: str
) -> None:
    """What is kept of a kernel's functions keeps neither it nor its plugins."""
    kernel = shop()
    plugin = sell(kernel).method.__self__
    effect(probe=plugin.counted)(kernel.get_function("shop", "count"))
    served = serve([call("shop-count"), say("Three.")])
    if door == "service":
        await ask(FunctionInvokingChatCompletion(served.connector), kernel=kernel)
    else:
        kernel.add_service(served.connector)
        options = FunctionCallingStepwisePlannerOptions(plan=False)
        await FunctionCallingStepwisePlanner(options=options).invoke(
            kernel, "How many?"
        )
    kept = [weakref.ref(kernel), weakref.ref(plugin)]
    del kernel, plugin
    gc.collect()
    assert [one() for one in kept] == [None, None]
