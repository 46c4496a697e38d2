"""What gets the application's own kernel, service and arguments: functions that ask for them, and no others."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import (
    KernelArguments,
    KernelParameterMetadata,
    kernel_function,
)
from semantic_kernel.functions.kernel_function_from_method import (
    KernelFunctionFromMethod,
)

from planner_ext import ApprovalFilter, ApprovalPolicy, Approve, ToolUseSession
from planner_ext.durable import Runs
from planner_ext.hitl_manager import ToolCall
from planner_ext.testing import call
from support.approval import (
    DONE,
    Door,
    World,
    planner_with,
    results,
    three_doors,
    world,
)
from support.approval_filter import FUNCTION, Kinds, chat, under_each
from support.foreign import RESERVED, TEXT, api, in_query, mcp_tool
from support.stock import add_filter
from support.values import each_of

SECRET = "hunter2"
PROPERTIES = {"city": TEXT, "password": TEXT, **dict.fromkeys(RESERVED, TEXT)}
WRITTEN = {"city": "Oslo", **{name: f"the {name}" for name in RESERVED}}
ASK_ALL = ApprovalPolicy.from_dict({"default": "ask"})
ALLOW_ALL = ApprovalPolicy.from_dict({"default": "allow"})


def arguments() -> KernelArguments:
    """Make the application's arguments, a password among them, under a name that a schema has, too."""
    return KernelArguments(password=SECRET)


class Seen:
    """An approver that says yes, and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def __call__(self, call: ToolCall) -> Approve:
        self.shown.append(dict(call.arguments))
        return Approve(by="ann")


def model(*replies: Any) -> World:
    return world([*replies, DONE])


# An MCP server.


@each_of("given", [WRITTEN, {"city": "Oslo"}], ids=["all", "city"])
@three_doors
async def test_an_mcp_tool_gets_what_the_model_wrote_and_the_approver_saw(
    door: Door, given: dict[str, str]
) -> None:
    """For all names of its parameters: neither an object of the application, nor one of its arguments."""
    async with mcp_tool(PROPERTIES, ("city",)) as (plugin, called):
        here, seen = model(call("weather-lookup", given)), Seen()
        here.kernel.add_plugin(plugin, "weather")
        outcome = await door.ask(
            here, arguments=arguments(), approver=seen, interceptors=[ASK_ALL]
        )
        assert called == [given]
        assert seen.shown == [given]
        assert outcome.status == "answered"


@three_doors
async def test_an_mcp_tool_that_waited_gets_what_was_shown(door: Door) -> None:
    """Also after a pause, and where the person edits what the model wrote."""
    async with mcp_tool(PROPERTIES) as (plugin, called):
        here = model(call("weather-lookup", WRITTEN, id="c"))
        here.kernel.add_plugin(plugin, "weather")
        paused = await door.ask(here, arguments=arguments(), interceptors=[ASK_ALL])
        edited = {**WRITTEN, "arguments": "edited"}
        decisions = {"c": Approve(arguments=edited)}
        await door.resume(
            here,
            paused.checkpoint,
            decisions,
            arguments=arguments(),
            interceptors=[ASK_ALL],
        )
        assert (paused.pending[0]["arguments"], called) == (WRITTEN, [edited])


async def test_an_mcp_tool_of_a_session_gets_what_the_model_wrote() -> None:
    """A session is another door to the same call."""
    async with mcp_tool(PROPERTIES) as (plugin, called):
        here = model(call("weather-lookup", WRITTEN))
        here.kernel.add_plugin(plugin, "weather")
        await ToolUseSession(here.kernel).prompt("Is it sunny?")
        assert called == [WRITTEN]


async def test_an_mcp_tool_of_a_kept_run_gets_what_the_model_wrote(
    tmp_path: Path,
) -> None:
    """A run in a store is another door to the same call."""
    async with (
        mcp_tool(PROPERTIES) as (plugin, called),
        Runs.sqlite(tmp_path / "runs.db") as runs,
    ):
        here = model(call("weather-lookup", {"city": "Oslo", "arguments": "mine"}))
        here.kernel.add_plugin(plugin, "weather")
        handle = await runs.start(
            planner_with(), here.kernel, "Sunny?", run_id="r", arguments=arguments()
        )
        await handle.result()
        assert called == [{"city": "Oslo", "arguments": "mine"}]


@pytest.mark.parametrize("filtered", [False, True], ids=["bare", "filtered"])
async def test_an_mcp_tool_that_a_function_calls_gets_what_that_wrote(
    filtered: bool,
) -> None:
    """``kernel.invoke`` inside a function of a run passes the values, and the policy sees them."""
    seen = Seen()

    class Outer:
        @kernel_function
        async def ask(self, kernel: Kernel) -> str:
            given: dict[str, Any] = {**WRITTEN}
            return str(
                await kernel.invoke(
                    plugin_name="weather", function_name="lookup", arguments=_of(given)
                )
            )

    async with mcp_tool(PROPERTIES) as (plugin, called):
        here = model(call("outer-ask"))
        here.kernel.add_plugin(plugin, "weather")
        here.kernel.add_plugin(Outer(), "outer")
        if filtered:
            add_filter(
                here.kernel,
                "function_invocation",
                ApprovalFilter(ASK_ALL, approver=seen),
            )
        options = {} if filtered else {"interceptors": [ASK_ALL], "approver": seen}
        await Door("planner", False).ask(here, arguments=arguments(), **options)
        assert (called, seen.shown) == ([WRITTEN], [{}, WRITTEN])


def _of(values: dict[str, Any]) -> KernelArguments:
    given = KernelArguments()
    for name, value in values.items():
        given[name] = value
    return given


@each_of("policy", [ASK_ALL, ALLOW_ALL], ids=["ask", "allow"])
@under_each
async def test_a_stock_loop_does_not_call_such_a_tool(
    under: Kinds, policy: ApprovalPolicy
) -> None:
    """Where Semantic Kernel itself would inject, the filter refuses the call by name, and the tool is not called."""
    async with mcp_tool(PROPERTIES) as (plugin, called):
        here = model(call("weather-lookup", WRITTEN))
        here.kernel.add_plugin(plugin, "weather")
        for kind in under:
            add_filter(here.kernel, kind, ApprovalFilter(policy, approver=Seen()))
        await chat(here, history := _question(), arguments=arguments())
        (text,) = results(history)
        assert called == []
        assert text.startswith(
            "The call was refused and did not run: weather-lookup takes a value named arguments"
        )
        assert SECRET not in text


@under_each
async def test_a_stock_loop_keeps_the_applications_arguments_to_itself(
    under: Kinds,
) -> None:
    """An optional parameter that the model left out is not filled from arguments of the application by its name."""
    async with mcp_tool({"city": TEXT, "password": TEXT}) as (plugin, called):
        here, seen = model(call("weather-lookup", {"city": "Oslo"})), Seen()
        here.kernel.add_plugin(plugin, "weather")
        for kind in under:
            add_filter(here.kernel, kind, ApprovalFilter(ASK_ALL, approver=seen))
        await chat(here, _question(), arguments=arguments())
        assert called == seen.shown
        if (
            under != FUNCTION
        ):  # which does not know what the model wrote: there the approver is shown the whole
            assert called == [{"city": "Oslo"}]


async def test_a_call_that_a_filter_resumes_gets_what_was_shown() -> None:
    """``ApprovalFilter.resume`` passes what waited, without the arguments of the application."""
    async with mcp_tool({"city": TEXT, "password": TEXT}) as (plugin, called):
        here, asking = (
            model(call("weather-lookup", {"city": "Oslo"}, id="c")),
            ApprovalFilter(ASK_ALL),
        )
        here.kernel.add_plugin(plugin, "weather")
        add_filter(here.kernel, "auto_function_invocation", asking)
        await chat(here, history := _question(), arguments=arguments())
        await asking.resume(
            here.kernel, history, {"c": Approve()}, arguments=arguments()
        )
        assert called == [{"city": "Oslo"}]


def _question() -> ChatHistory:
    history = ChatHistory()
    history.add_user_message("Is it sunny in Oslo?")
    return history


# An API with an OpenAPI document.


@three_doors
async def test_an_api_is_asked_with_what_the_model_wrote(door: Door) -> None:
    """Parameters called as Semantic Kernel's own can be filled by the model; nothing else gets into the address."""
    with api() as server:
        here, seen = model(call("api-find", WRITTEN)), Seen()
        server.add_to(here.kernel, in_query("city", "password", *RESERVED))
        await door.ask(
            here, arguments=arguments(), approver=seen, interceptors=[ASK_ALL]
        )
        assert (server.queries, seen.shown) == ([WRITTEN], [WRITTEN])


async def test_the_model_is_offered_such_parameters() -> None:
    """They are offered, and a required one that is missing is named."""
    with api() as server:
        here = model(call("api-find", {}))
        server.add_to(here.kernel, in_query(*RESERVED, required=True))
        outcome = await Door("service", False).ask(here, arguments=arguments())
        assert all(
            f'"{name}" is missing' in results(outcome.history)[0] for name in RESERVED
        )
        assert server.queries == []


@each_of("given", [{"user_id": "1"}, {}], ids=["given", "empty"])
@three_doors
async def test_parameters_that_meet_under_one_name_are_refused(
    door: Door, given: dict[str, str]
) -> None:
    """Semantic Kernel makes one name of two, and one value would stand in both places: the call is refused by name."""
    with api() as server:
        here = model(call("api-find", given))
        server.add_to(here.kernel, in_query("user-id", "user_id"))
        outcome = await door.ask(here, interceptors=[ALLOW_ALL])
        assert server.queries == []
        assert (
            'meet under one name, "user_id" ("user-id" and "user_id")'
            in results(outcome.history)[0]
        )


@under_each
async def test_a_filter_refuses_parameters_that_meet_under_one_name(
    under: Kinds,
) -> None:
    """Also in the stock loop."""
    with api() as server:
        here = model(call("api-find", {"user_id": "1"}))
        server.add_to(here.kernel, in_query("user-id", "user_id"))
        for kind in under:
            add_filter(here.kernel, kind, ApprovalFilter(ALLOW_ALL))
        await chat(here, history := _question())
        assert server.queries == []
        assert "meet under one name" in results(history)[0]


async def test_a_function_that_calls_such_an_operation_is_refused() -> None:
    """Also by ``kernel.invoke`` inside a function of a run."""

    class Outer:
        @kernel_function
        async def ask(self, kernel: Kernel) -> str:
            return str(
                await kernel.invoke(
                    plugin_name="api",
                    function_name="find",
                    arguments=_of({"user_id": "1"}),
                )
            )

    with api() as server:
        here = model(call("outer-ask"))
        server.add_to(here.kernel, in_query("user-id", "user_id"))
        here.kernel.add_plugin(Outer(), "outer")
        outcome = await Door("planner", False).ask(here)
        assert server.queries == []
        assert "meet under one name" in results(outcome.history)[0]


@each_of(
    ("named", "options"),
    [
        ("content_type", {"enable_dynamic_payload": False}),
        ("to_id", {"enable_payload_namespacing": True}),
    ],
)
async def test_a_parameter_that_meets_the_payload_is_refused(
    named: str, options: dict[str, Any]
) -> None:
    """Semantic Kernel has names of its own for a payload: for the whole of one, and for what is below a property."""
    to = {"type": "object", "properties": {"id": TEXT}}
    body = {
        "content": {
            "application/json": {"schema": {"type": "object", "properties": {"to": to}}}
        }
    }
    operation = {
        "parameters": [{"name": named, "in": "query", "schema": TEXT}],
        "requestBody": body,
    }
    with api() as server:
        here = model(call("api-find", {named: "x", "payload": {}}))
        server.add_to(here.kernel, operation, method="put", **options)
        outcome = await Door("planner", False).ask(here)
        assert server.queries == []
        assert f'meet under one name, "{named}"' in results(outcome.history)[0]


async def test_a_name_that_the_document_uses_twice_is_one_parameter() -> None:
    """An ``id`` in the path and in the body are one to Semantic Kernel and to the approver: both get the value."""
    body = {
        "content": {
            "application/json": {
                "schema": {"type": "object", "properties": {"id": TEXT, "name": TEXT}}
            }
        }
    }
    operation = {
        "parameters": [{"name": "id", "in": "path", "required": True, "schema": TEXT}],
        "requestBody": {"required": True, **body},
    }
    with api() as server:
        here = model(call("api-find", {"id": "7", "name": "Oslo"}))
        server.add_to(here.kernel, operation, "/find/{id}", "put")
        await Door("planner", False).ask(here)
        assert (server.paths, server.bodies) == (
            ["/find/7"],
            [{"id": "7", "name": "Oslo"}],
        )


# Functions of Python.


@three_doors
async def test_a_python_function_gets_what_its_signature_asks_for(door: Door) -> None:
    """Kernel, service, settings and arguments, by these names, as ever; the model is offered none of them."""
    got: list[Any] = []

    class Asks:
        @kernel_function
        async def all(
            self,
            city: str,
            kernel: Any,
            service: Any,
            execution_settings: Any,
            arguments: Any,
        ) -> str:
            got.extend(
                (
                    city,
                    kernel.plugins.keys(),
                    service.service_id,
                    execution_settings,
                    arguments["password"],
                )
            )
            return "fine"

    here = world([call("asks-all", {"city": "Oslo"}), DONE], asks=Asks())
    await door.ask(here, arguments=arguments())
    assert got[0] == "Oslo"
    assert "asks" in got[1]
    assert got[2] == here.service.service_id
    assert got[4] == SECRET
    assert "asks-all" in here.service.requests[0].tools


async def test_a_function_that_takes_keywords_gets_what_its_schema_says() -> None:
    """Any function whose parameters were given, not read from its signature, is one from a schema."""
    got: list[dict[str, Any]] = []

    @kernel_function(name="lookup")
    async def lookup(**given: Any) -> str:
        got.append(given)
        return "fine"

    parameters = [
        KernelParameterMetadata(name=name, type_="str", is_required=False)  # pyright: ignore[reportCallIssue]  # its fields have defaults
        for name in RESERVED
    ]
    here = model(call("any-lookup", {"kernel": "mine"}))
    here.kernel.add_function(
        "any",
        KernelFunctionFromMethod(lookup, plugin_name="any", parameters=parameters),
    )
    await Door("planner", False).ask(here, arguments=arguments())
    assert got == [{"kernel": "mine"}]


@three_doors
async def test_a_tool_may_name_its_parameters_as_its_plugin_names_its_own(
    door: Door,
) -> None:
    """``tool_name`` and ``self``, which the plugin's method takes itself, reach the server, too."""
    given = {"tool_name": "rain", "self": "mine", "name": "x"}
    async with mcp_tool(dict.fromkeys(given, TEXT)) as (plugin, called):
        here = model(call("weather-lookup", given))
        here.kernel.add_plugin(plugin, "weather")
        await door.ask(here)
        assert called == [given]


async def test_the_name_of_keywords_is_not_a_parameter() -> None:
    """``**arguments`` takes what a schema names; it does not ask for the application's arguments."""
    got: list[dict[str, Any]] = []

    async def call_tool(name: str, **arguments: Any) -> str:
        got.append({"name": name, **arguments})
        return "fine"

    here = model(call("mcp-fetch", {}))
    here.kernel.add_function(
        "mcp", kernel_function(name="fetch")(partial(call_tool, "fetch"))
    )
    await Door("planner", False).ask(here, arguments=arguments())
    assert got == [{"name": "fetch"}]
