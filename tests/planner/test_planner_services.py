"""Which service a run uses, with which settings, and what of them reaches every request."""

from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.functions import KernelArguments, kernel_function
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase
from semantic_kernel.services.ai_service_selector import AIServiceSelector

from planner_ext import BoundedFunctionChoiceBehavior
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedPromptExecutionSettings,
    call,
    say,
)
from support.planner import (
    ADD,
    GOAL,
    PLAN,
    both_ways,
    final,
    invoke,
    kernel_of,
    never_stops,
    openai_kernel,
    planner_with,
    scripted,
)
from support.stock import scripted_by
from support.values import each_of

PATIENT = {"temperature": 0.3, "seed": 7}


def asked_with(server: Any) -> list[dict[str, object]]:
    return [
        {name: request.body.get(name) for name in PATIENT}
        for request in server.requests
    ]


@both_ways
@pytest.mark.parametrize("own", [False, True], ids=["base", "openai"])
async def test_execution_settings_reach_every_request(
    own: bool, streamed: bool
) -> None:
    """Settings of the options are those of the plan request, of the steps and of the last request."""
    settings = (OpenAIChatPromptExecutionSettings if own else PromptExecutionSettings)(
        **PATIENT
    )
    async with openai_kernel(never_stops) as (kernel, server):
        await invoke(
            planner_with("chat", execution_settings=settings, max_iterations=3),
            kernel,
            streamed=streamed,
        )

    assert asked_with(server) == [PATIENT] * 3


@pytest.mark.parametrize("service_id", [None, "chat"], ids=["any-service", "by-id"])
@pytest.mark.parametrize("settings_id", [None, "chat"], ids=["for-any", "for-this"])
async def test_the_arguments_settings_reach_every_request(
    service_id: str | None, settings_id: str | None
) -> None:
    """Settings in the arguments do the same, whether or not they name the service that the planner names."""
    arguments = KernelArguments(
        settings=OpenAIChatPromptExecutionSettings(service_id=settings_id, **PATIENT)
    )
    async with openai_kernel(never_stops) as (kernel, server):
        planner = planner_with(service_id, max_iterations=3)
        await invoke(planner, kernel, arguments=arguments)

    assert asked_with(server) == [PATIENT] * 3


async def test_the_options_settings_override_the_arguments() -> None:
    """Where both are given, the options' settings hold."""
    arguments = KernelArguments(
        settings=OpenAIChatPromptExecutionSettings(temperature=1.0, seed=1)
    )
    settings = OpenAIChatPromptExecutionSettings(**PATIENT)
    async with openai_kernel([PLAN, final()]) as (kernel, server):
        await invoke(
            planner_with(execution_settings=settings),
            kernel,
            arguments=arguments,
        )

    assert asked_with(server) == [PATIENT] * 2


@both_ways
async def test_max_completion_tokens_reaches_every_request(streamed: bool) -> None:
    """The option is max_tokens of each request, over the settings' own, which stay as they are."""
    settings = OpenAIChatPromptExecutionSettings(max_tokens=9)
    async with openai_kernel(never_stops) as (kernel, server):
        planner = planner_with(
            execution_settings=settings, max_completion_tokens=55, max_iterations=3
        )
        await invoke(planner, kernel, streamed=streamed)

    assert [request.body.get("max_tokens") for request in server.requests] == [55] * 3
    assert settings.max_tokens == 9


async def test_a_share_of_no_tokens_is_not_asked_for() -> None:
    """Where max_tokens is so small that no token is left to the completion, no request asks for 0 tokens."""
    async with openai_kernel([PLAN, final()]) as (kernel, server):
        await invoke(
            planner_with(max_tokens=5, max_prompt_tokens=None),
            kernel,
        )

    assert all(request.body.get("max_tokens") != 0 for request in server.requests)


async def test_arguments_reach_the_functions() -> None:
    """The application's arguments, given as such or by name, reach a function's injected parameters."""
    seen: list[tuple[object, object]] = []

    class Who:
        @kernel_function
        async def asks(self, arguments: Any) -> str:
            seen.append((arguments["user"], arguments["role"]))
            return ""

    kernel = kernel_of(
        ScriptedChatCompletion([call("who-asks"), say("Ann.")]), who=Who()
    )
    planner = planner_with(plan=False)
    await invoke(
        planner,
        kernel,
        arguments=KernelArguments(user="ann", role="guest"),
        role="admin",
    )

    assert seen == [("ann", "admin")]


def two_services() -> tuple[Kernel, ScriptedChatCompletion, ScriptedChatCompletion]:
    first = ScriptedChatCompletion([say("first")], service_id="first")
    second = ScriptedChatCompletion([say("second")], service_id="second")
    return kernel_of(first, second), first, second


@each_of(
    ("planner", "answer"),
    [
        ({}, "first"),
        ({"service_id": "second"}, "second"),
        (
            {"execution_settings": PromptExecutionSettings(service_id="second")},
            "second",
        ),
    ],
    ids=["none", "id", "settings"],
)
async def test_the_service_is_the_one_that_was_named(
    planner: dict[str, Any], answer: str
) -> None:
    """service_id names the service; without one, the settings do, and without those it is the kernel's first."""
    kernel, *_ = two_services()
    result = await invoke(planner_with(plan=False, **planner), kernel)

    assert result.final_answer == answer


async def test_the_kernels_own_selector_decides_where_no_service_is_named() -> None:
    """A kernel with a selector of its own is asked for the service, and its settings are used."""

    class Last(AIServiceSelector):
        def select_ai_service(
            self,
            kernel: Any,
            function: Any = None,
            arguments: Any = None,
            type_: Any = None,
        ) -> Any:
            return kernel.services["second"], ScriptedPromptExecutionSettings(
                temperature=0.5
            )

    given, *_ = two_services()
    kernel = Kernel(services=dict(given.services), ai_service_selector=Last())
    result = await invoke(planner_with(plan=False), kernel)

    assert result.final_answer == "second"


class Embeddings(AIServiceClientBase):
    """A service without chat completion."""


@both_ways
@each_of(
    ("service_id", "services", "named"),
    [
        (None, [], "no service"),
        ("chat", [], "'chat'"),
        ("chat", [ScriptedChatCompletion([], service_id="other")], "'other'"),
        (None, [Embeddings(ai_model_id="m", service_id="vectors")], "'vectors'"),
        ("vectors", [Embeddings(ai_model_id="m", service_id="vectors")], "Embeddings"),
        ("", [ScriptedChatCompletion([], service_id="other")], "'other'"),
        (
            5,
            [ScriptedChatCompletion([], service_id="other")],
            "service_id must be of the class str; got 5",
        ),
    ],
    ids=[
        "none-at-all",
        "none-by-id",
        "wrong-id",
        "no-chat",
        "no-chat-by-id",
        "empty-id",
        "number",
    ],
)
async def test_a_service_that_is_not_there_is_named(
    service_id: Any, services: list[AIServiceClientBase], named: str, streamed: bool
) -> None:
    """No service, another id, or one without chat completion: the error says what is there and what to do."""
    kernel = Kernel()
    for service in services:
        kernel.add_service(service)
    with pytest.raises(PlannerInvalidConfigurationError, match=named) as raised:
        await invoke(planner_with(service_id), kernel, streamed=streamed)
    assert not isinstance(raised.value, ValueError)


async def test_a_connector_without_function_calling_is_refused_by_name() -> None:
    """A connector that cannot call functions is refused where functions are offered, and serves where none are."""

    class Talker(ScriptedChatCompletion):
        SUPPORTS_FUNCTION_CALLING = False

    talker = scripted_by(Talker, [say("Hello.")])
    with pytest.raises(
        PlannerInvalidConfigurationError, match=r"Talker.*function calling"
    ):
        await invoke(planner_with(), kernel_of(talker))
    assert talker.requests == []

    kernel = Kernel()
    kernel.add_service(talker)
    result = await invoke(planner_with(plan=False), kernel)
    assert result.final_answer == "Hello."


async def test_several_answers_and_functions_do_not_go_together() -> None:
    """number_of_responses above 1 is refused by name where functions are offered."""
    kernel, service = scripted(never_stops)
    settings = ScriptedPromptExecutionSettings(number_of_responses=2)
    with pytest.raises(PlannerInvalidConfigurationError, match="number_of_responses"):
        await invoke(planner_with(execution_settings=settings), kernel)
    assert service.requests == []


def behaving(behavior: FunctionChoiceBehavior, **more: Any) -> Any:
    settings = ScriptedPromptExecutionSettings(function_choice_behavior=behavior)
    return planner_with(
        plan=False, execution_settings=settings, max_iterations=6, **more
    )


async def test_the_behaviours_attempts_bound_the_tool_rounds() -> None:
    """maximum_use_attempts=2 is two tool rounds and one reply without functions; the result names that limit."""
    kernel, service = scripted(never_stops)
    result = await invoke(
        behaving(BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=2)),
        kernel,
    )

    assert [bool(request.tools) for request in service.requests] == [True, True, False]
    assert result.status == "limit_reached"
    assert result.limit == "maximum_use_attempts"
    assert result.final_answer == "Enough."


@pytest.mark.parametrize(
    "of",
    [FunctionChoiceBehavior, BoundedFunctionChoiceBehavior],
    ids=["stock", "bounded"],
)
async def test_an_automatic_behaviour_without_attempts_leaves_it_to_the_budget(
    of: Any,
) -> None:
    """``Auto(auto_invoke=False)``, which the removed planner used itself, leaves the calls to the planner's loop."""
    kernel, service = scripted(never_stops)
    result = await invoke(behaving(of.Auto(auto_invoke=False)), kernel)

    assert (result.limit, len(service.requests)) == ("max_iterations", 6)
    assert service.requests[0].tools == ("math-add", "math-fail")


@pytest.mark.parametrize(
    "of",
    [FunctionChoiceBehavior, BoundedFunctionChoiceBehavior],
    ids=["stock", "bounded"],
)
async def test_a_behaviour_without_calls_reaches_no_limit(of: Any) -> None:
    """``NoneInvoke`` lets nothing be called: the reply is the answer, and no limit was reached."""
    kernel, service = scripted(
        [
            lambda r: ADD if r.tool_choice == "auto" else say("I would add."),
            say("1 + 2 is 3."),
        ]
    )
    result = await invoke(behaving(of.NoneInvoke()), kernel)

    assert result.status == "answered"
    assert result.final_answer == "I would add."
    assert result.limit is None
    assert (result.tool_calls, len(service.requests)) == (0, 1)


@pytest.mark.parametrize(
    "of",
    [FunctionChoiceBehavior, BoundedFunctionChoiceBehavior],
    ids=["stock", "bounded"],
)
async def test_a_required_behaviour_forces_its_calls(of: Any) -> None:
    """``Required`` sends tool choice "required" for its one attempt; using that up does not count as a limit."""
    kernel, service = scripted(
        lambda r: ADD if r.tool_choice == "required" else say("It is 3.")
    )
    result = await invoke(behaving(of.Required()), kernel)

    assert service.requests[0].tool_choice == "required"
    assert result.status == "answered"
    assert result.final_answer == "It is 3."
    assert result.tool_calls == 1


async def test_the_behaviours_filters_reduce_what_is_offered() -> None:
    """Filters of a behaviour in the settings hold beside the planner's exclusions."""
    kernel, service = scripted([say("It is 3.")])
    behavior = FunctionChoiceBehavior.Auto(filters={"included_functions": ["math-add"]})
    await invoke(behaving(behavior), kernel, GOAL)

    assert service.requests[0].tools == ("math-add",)


async def test_functions_are_read_again_for_each_request() -> None:
    """A plugin that a function adds to the kernel is offered with the next request."""
    kernel, service = scripted([call("shop-open"), say("Open.")])

    class Shop:
        @kernel_function
        async def open(self) -> str:
            kernel.add_plugin(Shop(), "annex")
            return "open"

    kernel.add_plugin(Shop(), "shop")
    await invoke(planner_with(plan=False), kernel)

    assert [("annex-open" in request.tools) for request in service.requests] == [
        False,
        True,
    ]


def test_the_planner_needs_no_kernel_and_no_service_to_be_made() -> None:
    """A planner without anything has the defaults of its options."""
    planner = planner_with()
    assert (planner.service_id, planner.options.max_iterations) == (None, 15)
    assert issubclass(ScriptedChatCompletion, ChatCompletionClientBase)
