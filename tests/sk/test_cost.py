"""What a run costs, and that it may not cost more."""

import sys
from typing import Any

import pytest
from openai.types.completion_usage import PromptTokensDetails
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.completion_usage import CompletionUsage
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionCallingStepwisePlanner,
)
from planner_ext import FunctionCallingStepwisePlannerOptions as Options
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import ResultReady
from planner_ext.hitl_manager import ApprovalSettings
from planner_ext.iteration import Usage
from planner_ext.service import FunctionInvokingChatCompletion
from planner_ext.sk.chat.prices import price_of
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)


class Echo:
    @kernel_function
    def say(self, text: str) -> str:
        return text


def never_stops(request: ScriptedRequest) -> ScriptedReply:
    return call("echo-say", {"text": "x"}) if request.tools else say("enough")


def a_cent_a_request(model: str, usage: Usage) -> float:
    assert model == "scripted"
    assert usage.total_tokens > 0
    return 0.01


def kernel() -> Kernel:
    made = Kernel()
    made.add_service(ScriptedChatCompletion(never_stops))
    made.add_plugin(Echo(), "echo")
    return made


async def test_a_run_ends_when_its_cost_is_spent() -> None:
    """Cost is checked before each request; only the forced answer passes it, and the usage says what was paid."""
    options = Options(plan=False, budget=Budget(max_cost=0.025), price=a_cent_a_request)
    result = await FunctionCallingStepwisePlanner("scripted", options).invoke(
        kernel(), "go on"
    )
    assert result.status == "limit_reached"
    assert result.limit == "max_cost"
    assert result.iterations == 4
    assert result.usage.cost == pytest.approx(0.04)


async def test_a_service_counts_cost() -> None:
    """The wrapper ends its run by the same limit."""
    inner = ScriptedChatCompletion(never_stops)
    service = FunctionInvokingChatCompletion(
        inner, budget=Budget(max_cost=0.015), price=a_cent_a_request
    )
    settings = service.instantiate_prompt_execution_settings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )
    message = await service.get_chat_message_content(
        ChatHistory(), settings, kernel=kernel()
    )
    assert message is not None
    assert (message.metadata["limit"], len(inner.requests)) == ("max_cost", 3)


PRICED: dict[str, Any] = {"ai_model_id": "gpt-4.1", "service_id": "scripted"}


def listed(usage: Usage) -> float:
    """What gpt-4.1 costs by the price list: US dollars for a million tokens sent, read from the cache, received."""
    fresh = usage.prompt_tokens - usage.cached_tokens
    return (
        2.0 * fresh + 0.5 * usage.cached_tokens + 8.0 * usage.completion_tokens
    ) / 1e6


def priced_kernel(**more: Any) -> tuple[Kernel, ScriptedChatCompletion]:
    made, service = Kernel(), ScriptedChatCompletion(never_stops, **PRICED, **more)
    made.add_service(service)
    made.add_plugin(Echo(), "echo")
    return made, service


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_known_model_is_priced_by_the_list(streamed: bool) -> None:
    """With max_cost and no price of its own, a run is priced by genai-prices, cached tokens by their own price."""
    details = PromptTokensDetails(cached_tokens=400)
    tokens = CompletionUsage(
        prompt_tokens=1000, completion_tokens=100, prompt_tokens_details=details
    )
    kernel, service = priced_kernel(metadata={"usage": tokens})
    options = Options(plan=False, budget=Budget(max_cost=0.005))
    planner = FunctionCallingStepwisePlanner("scripted", options)
    if streamed:
        *_, last = [event async for event in planner.invoke_stream(kernel, "go on")]
        assert isinstance(last, ResultReady)
        result = last.result
    else:
        result = await planner.invoke(kernel, "go on")
    assert result.status == "limit_reached"
    assert result.limit == "max_cost"
    assert len(service.requests) == 4
    assert result.usage.cached_tokens == 1600
    assert (
        result.usage.cost
        == pytest.approx(listed(result.usage))
        == pytest.approx(4 * 0.0022)
    )


async def test_a_price_of_ones_own_replaces_the_list() -> None:
    """Where price= is given, the list is not asked, known model or not."""
    kernel, service = priced_kernel()
    options = Options(
        plan=False, budget=Budget(max_cost=1.5), price=lambda model, usage: 1.0
    )
    result = await FunctionCallingStepwisePlanner("scripted", options).invoke(
        kernel, "go on"
    )
    assert result.limit == "max_cost"
    assert result.usage.cost == 3.0
    assert len(service.requests) == 3


async def test_a_model_named_in_the_settings_is_the_one_priced() -> None:
    """Settings that ask for another model than the connector's are priced by that model."""
    seen: list[str] = []
    connector = OpenAIChatCompletion(ai_model_id="gpt-4.1", api_key="any")
    settings = OpenAIChatPromptExecutionSettings(ai_model_id="gpt-4.1-mini")
    price = price_of(
        connector, settings, lambda model, usage: seen.append(model) or 0.0, 1.0
    )
    of_list = price_of(connector, settings, None, 1.0)
    assert price is not None
    assert of_list is not None
    price("whatever the reply says", Usage())
    assert seen == ["gpt-4.1-mini"]
    assert of_list("gpt-4.1", Usage(prompt_tokens=1_000_000)) == pytest.approx(0.4)
    await connector.client.close()


@pytest.mark.parametrize("door", ["planner", "service"])
async def test_an_unknown_model_is_refused_before_the_first_request(door: str) -> None:
    """A limit on an unknown cost cannot be kept: nothing is sent, and the error names model, limit and ways out."""
    inner = ScriptedChatCompletion(never_stops)
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match="max_cost=1 needs a price for the model 'scripted'",
    ) as e:
        if door == "planner":
            await FunctionCallingStepwisePlanner(
                None, Options(budget=Budget(max_cost=1))
            ).invoke(kernel_of(inner), "go")
        else:
            service = FunctionInvokingChatCompletion(inner, budget=Budget(max_cost=1))
            settings = service.instantiate_prompt_execution_settings(
                function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
            )
            await service.get_chat_message_content(
                ChatHistory(), settings, kernel=kernel_of(inner)
            )
    assert "price=" in str(e.value)
    assert inner.requests == []


def kernel_of(
    service: ScriptedChatCompletion | FunctionInvokingChatCompletion,
) -> Kernel:
    made = Kernel()
    made.add_service(service)
    made.add_plugin(Echo(), "echo")
    return made


async def test_a_missing_price_list_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without genai-prices the error says how to install it, and what else to do."""
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    kernel, service = priced_kernel()
    planner = FunctionCallingStepwisePlanner(
        "scripted", Options(budget=Budget(max_cost=1))
    )
    with pytest.raises(
        PlannerInvalidConfigurationError, match=r"planner-ext\[prices\].*price="
    ):
        await planner.invoke(kernel, "go on")
    assert service.requests == []


async def test_the_list_is_loaded_for_a_cost_limit_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without max_cost nothing is priced, and genai-prices is not even looked for: the cost is unknown."""
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    kernel, _ = priced_kernel()
    planner = FunctionCallingStepwisePlanner("scripted", Options(max_iterations=2))
    assert (await planner.invoke(kernel, "go on")).usage.cost is None


async def test_a_resumed_run_is_priced_by_the_planner_that_resumes_it() -> None:
    """The price is an option of the planner: no checkpoint holds it, and a new budget leaves it as it is."""
    kernel, _ = priced_kernel()
    first = FunctionCallingStepwisePlanner(
        "scripted", Options(max_iterations=2, plan=False)
    )
    limited = await first.invoke(kernel, "go on")
    assert limited.usage.cost is None
    assert limited.checkpoint is not None
    dear = FunctionCallingStepwisePlanner(
        "scripted", Options(price=lambda model, usage: 2.0)
    )
    larger = Budget(max_iterations=9, max_cost=4.0)
    result = await dear.resume(kernel, limited.checkpoint, budget=larger)
    assert result.limit == "max_cost"
    assert result.usage.cost == 6.0
    assert result.iterations == 5
    assert result.checkpoint is not None
    cheap = FunctionCallingStepwisePlanner(
        "scripted", Options(price=lambda model, usage: 0.5)
    )
    again = await cheap.resume(
        kernel, result.checkpoint, budget=Budget(max_iterations=7)
    )
    assert (again.limit, again.usage.cost) == ("max_iterations", 7.0)


async def test_a_checkpoint_with_a_cost_limit_is_priced_wherever_it_is_resumed() -> (
    None
):
    """A limit in the checkpoint needs a price even where the options that it is resumed with know of none."""
    inner = ScriptedChatCompletion([call("echo-say", {"text": "x"}), say("done")])
    options = Options(
        plan=False,
        budget=Budget(max_cost=1.0),
        price=a_cent_a_request,
        approval=deferring(),
    )
    paused = await FunctionCallingStepwisePlanner("scripted", options).invoke(
        kernel_of(inner), "go on"
    )
    assert paused.status == "paused"
    assert paused.checkpoint is not None
    with pytest.raises(PlannerInvalidConfigurationError, match="needs a price"):
        await FunctionCallingStepwisePlanner("scripted").resume(
            kernel_of(inner), paused.checkpoint
        )
    assert len(inner.requests) == 1


def deferring() -> ApprovalSettings:
    return ApprovalSettings(unmatched="defer")


@pytest.mark.parametrize("price", ["free", 0.5])
def test_a_price_is_a_function(price: Any) -> None:
    """Anything else is refused, naming the field, what it takes and what it got."""
    with pytest.raises(
        PlannerInvalidConfigurationError, match="price must be a function"
    ) as caught:
        Options(budget=Budget(max_cost=1.0), price=price)
    assert repr(price) in str(caught.value)


def test_a_budget_has_no_price() -> None:
    """A budget is limits alone; the refusal says where the price belongs."""
    given: dict[str, Any] = {"max_cost": 1.0, "price": a_cent_a_request}
    with pytest.raises(
        TypeError, match=r"no field 'price'\. Write price=\.\.\. beside budget="
    ):
        Budget(**given)


async def test_the_price_of_a_wrapped_service_is_used_where_the_door_has_none() -> None:
    """A planner prices by its own price, or by that of the service whose loop it replaces."""
    inner = ScriptedChatCompletion(never_stops)
    service = FunctionInvokingChatCompletion(inner, price=lambda model, usage: 0.5)
    costs: list[float | None] = []
    for price in (None, lambda model, usage: 2.0):
        planner = FunctionCallingStepwisePlanner(
            "scripted", Options(plan=False, max_iterations=2, price=price)
        )
        costs.append((await planner.invoke(kernel_of(service), "go on")).usage.cost)
    assert costs == [1.0, 4.0]
