"""A service that reports no usage, and limits that need it: estimated and said so, or refused; never 0."""

import json
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.completion_usage import CompletionUsage
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerResult,
    FunctionInvokingChatCompletion,
)
from planner_ext import FunctionCallingStepwisePlannerOptions as Options
from planner_ext.errors import InvalidPriceError, PlannerInvalidConfigurationError
from planner_ext.events import ResultReady
from planner_ext.hitl_manager import ApprovalSettings, Checkpoint
from planner_ext.iteration import Usage
from planner_ext.sk.chat.prices import RequestMeter
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.narrow import present
from support.values import each_of


class Echo:
    @kernel_function
    def say(self, text: str) -> str:
        return text


def never_stops(request: ScriptedRequest) -> ScriptedReply:
    return (
        call("echo-say", {"text": "x"})
        if request.tools
        else say("That is enough of it.")
    )


def silent(usage: Any = None) -> tuple[Kernel, ScriptedChatCompletion]:
    """A kernel whose service reports this usage in place of its own, by default none."""
    kernel, service = (
        Kernel(),
        ScriptedChatCompletion(never_stops, metadata={"usage": usage}),
    )
    kernel.add_service(service)
    kernel.add_plugin(Echo(), "echo")
    return kernel, service


async def run(
    kernel: Kernel, *, streamed: bool, **options: Any
) -> FunctionCallingStepwisePlannerResult:
    planner = FunctionCallingStepwisePlanner(None, Options(plan=False, **options))
    if not streamed:
        return await planner.invoke(kernel, "go on")
    *_, last = [event async for event in planner.invoke_stream(kernel, "go on")]
    assert isinstance(last, ResultReady)
    return last.result


def a_cent_a_token(model: str, usage: Usage) -> float:
    return usage.total_tokens / 100


LIMITS: dict[str, dict[str, Any]] = {
    "max_total_tokens": {"budget": Budget(max_iterations=50, max_total_tokens=300)},
    "max_cost": {
        "budget": Budget(max_iterations=50, max_cost=3.0),
        "price": a_cent_a_token,
    },
}
REPORTS = {
    "nothing": None,
    "an empty object": CompletionUsage(),
    "zeros": CompletionUsage(prompt_tokens=0, completion_tokens=0),
    "nonsense": {"prompt_tokens": "many", "completion_tokens": float("nan")},
    "a tuple of nothing": (CompletionUsage(),),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@each_of("report", REPORTS)
@each_of("limit", LIMITS)
async def test_a_limit_holds_where_no_usage_is_reported(
    limit: str, report: str, streamed: bool
) -> None:
    """Tokens that are not reported are estimated, so that the limit ends the run, and the usage says so."""
    kernel, service = silent(REPORTS[report])
    result = await run(kernel, streamed=streamed, **LIMITS[limit])
    assert (result.status, result.limit) == ("limit_reached", limit)
    assert 2 < len(service.requests) < 15
    assert result.usage.estimated_tokens == result.usage.total_tokens >= 300
    assert result.final_answer == "That is enough of it."


@pytest.mark.parametrize(
    "half",
    [CompletionUsage(prompt_tokens=40), CompletionUsage(completion_tokens=40)],
    ids=["prompt", "completion"],
)
async def test_the_half_that_is_not_reported_is_estimated(
    half: CompletionUsage,
) -> None:
    """What was reported is kept as it is; the other half is an estimate, and only that is called one."""
    kernel, service = silent(half)
    result = await run(
        kernel, streamed=False, budget=Budget(max_iterations=3, max_total_tokens=10_000)
    )
    trips = len(service.requests)
    kept = (
        result.usage.prompt_tokens
        if half.prompt_tokens
        else result.usage.completion_tokens
    )
    assert (trips, kept) == (3, 120)
    assert result.usage.estimated_tokens == result.usage.total_tokens - 120 > 0


async def test_an_estimate_survives_a_checkpoint_and_its_json() -> None:
    """What was estimated before a pause is called an estimate after it, in usage, facts and metadata."""
    kernel, _ = silent()
    limits = Budget(max_iterations=4, max_total_tokens=5_000)
    paused = await run(
        kernel,
        streamed=False,
        budget=limits,
        approval=ApprovalSettings(unmatched="defer"),
    )
    assert paused.checkpoint is not None
    assert paused.usage.estimated_tokens == paused.usage.total_tokens > 0
    planner = FunctionCallingStepwisePlanner(None, Options(plan=False))
    checkpoint = Checkpoint.from_json(paused.checkpoint.to_json())
    again = await planner.resume(kernel, checkpoint, {})
    assert again.usage.estimated_tokens == paused.usage.estimated_tokens
    message = present(again.chat_history).messages[-1]
    assert json.loads(message.model_dump_json())


async def test_the_metadata_of_a_service_says_what_was_estimated() -> None:
    """The summed usage of a service has the estimated tokens beside the others, before and after a pause."""
    kernel, inner = silent()
    budget = Budget(max_iterations=2, max_total_tokens=5_000)
    service = FunctionInvokingChatCompletion(
        inner, budget=budget, check_for_intervention=lambda call: True
    )
    settings = service.instantiate_prompt_execution_settings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )
    history = ChatHistory()
    history.add_user_message("go on")
    paused = await service.get_chat_message_content(history, settings, kernel=kernel)
    assert paused is not None
    before = paused.metadata["usage"].estimated_tokens
    pending = {call["id"]: Approve() for call in paused.metadata["pending"]}
    last = await service.resume(
        history, paused.metadata["checkpoint"], pending, settings, kernel=kernel
    )
    usage = last.metadata["usage"]
    assert (
        usage.estimated_tokens
        == usage.prompt_tokens + usage.completion_tokens
        > before
        > 0
    )


async def test_nothing_is_estimated_where_no_limit_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a limit on tokens or cost, and without a price, no token is counted: the usage stays unknown."""
    monkeypatch.setattr(
        RequestMeter, "_prompt_tokens", lambda *_: pytest.fail("an estimate was made")
    )
    kernel, _ = silent()
    result = await run(kernel, streamed=False, budget=Budget(max_iterations=3))
    assert result.usage.total_tokens == 0
    assert result.usage.estimated_tokens == 0
    assert result.usage.cost is None


PRICES: dict[str, Any] = {
    "none": lambda model, usage: None,
    "nan": lambda model, usage: float("nan"),
    "infinite": lambda model, usage: float("inf"),
    "negative": lambda model, usage: -1.0,
    "negative by the token": lambda model, usage: -0.01 * usage.total_tokens,
    "text": lambda model, usage: "0.01",
    "boolean": lambda model, usage: True,
    "too large": lambda model, usage: 10**400,
    "missing": lambda model, usage: {"other": 0.01}[model],
    "missing by the token": lambda model, usage: (
        {"other": 0.01}.get(model) * usage.total_tokens
    ),
}


async def later(model: str, usage: Usage) -> float:
    return 0.01


@each_of("price", [*PRICES.values(), later], ids=[*PRICES, "async"])
async def test_a_price_that_gives_no_amount_is_refused_before_the_first_request(
    price: Any,
) -> None:
    """A price is asked before anything is sent, and the error says what it gave and what is expected."""
    kernel, service = silent()
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=r"price must return US dollars.*Nothing was sent",
    ):
        await run(kernel, streamed=False, budget=Budget(max_cost=1.0), price=price)
    assert service.requests == []


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@each_of("price", [price for name, price in PRICES.items() if "token" not in name])
async def test_a_price_that_fails_later_ends_the_run_by_name(
    price: Any, streamed: bool
) -> None:
    """A reply with an invalid price is the last one: neither 0 nor NaN is charged, and no function starts."""
    kernel, service = silent(CompletionUsage(prompt_tokens=5, completion_tokens=5))

    def fails_later(model: str, usage: Usage) -> float:
        return price(model, usage) if usage.total_tokens > 2 else 0.0

    with pytest.raises(
        InvalidPriceError, match="price must return US dollars"
    ) as caught:
        await run(
            kernel, streamed=streamed, budget=Budget(max_cost=1.0), price=fails_later
        )
    assert len(service.requests) == 1
    assert caught.value.checkpoint is not None
    assert caught.value.chat_history is not None


async def test_a_price_for_tokens_alone_may_refuse_none() -> None:
    """A price that raises for no tokens at all is asked for one of each, and used if it prices that."""
    kernel, service = silent(CompletionUsage(prompt_tokens=5, completion_tokens=5))

    def average(model: str, usage: Usage) -> float:
        return 0.1 * usage.total_tokens / usage.total_tokens

    result = await run(
        kernel, streamed=False, budget=Budget(max_cost=0.15), price=average
    )
    assert (result.limit, len(service.requests)) == ("max_cost", 3)
