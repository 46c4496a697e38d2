"""What a run costs, and that it may not cost more."""

import pytest
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import BoundedFunctionChoiceBehavior, Budget, FunctionCallingStepwisePlanner
from planner_ext import FunctionCallingStepwisePlannerOptions as Options
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.iteration import Usage
from planner_ext.kernel.service import FunctionInvokingChatCompletion
from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, ScriptedRequest, call, say


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
    options = Options(plan=False, budget=Budget(max_cost=0.025, price=a_cent_a_request))
    result = await FunctionCallingStepwisePlanner("scripted", options).invoke(kernel(), "go on")
    assert (result.status, result.limit, result.iterations) == ("limit_reached", "max_cost", 4)
    assert result.usage.cost == pytest.approx(0.04)


async def test_a_service_counts_cost_too() -> None:
    """The wrapper ends its run by the same limit."""
    inner = ScriptedChatCompletion(never_stops)
    service = FunctionInvokingChatCompletion(inner, budget=Budget(max_cost=0.015, price=a_cent_a_request))
    settings = service.instantiate_prompt_execution_settings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )
    message = await service.get_chat_message_content(ChatHistory(), settings, kernel=kernel())
    assert message is not None
    assert (message.metadata["limit"], len(inner.requests)) == ("max_cost", 3)


@pytest.mark.parametrize("price", ["free", 0.5])
def test_a_price_is_a_function(price: object) -> None:
    """Anything else is refused, naming the field, what it takes and what it got."""
    with pytest.raises(PlannerInvalidConfigurationError, match="price must be a function") as caught:
        Budget(max_cost=1.0, price=price)  # type: ignore[arg-type]
    assert repr(price) in str(caught.value)
