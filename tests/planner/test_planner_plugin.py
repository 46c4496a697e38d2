"""A planner as a plugin: its function, what it is given of the budget around it, what it costs, and what is refused."""

from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import (
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionInvokingChatCompletion,
    requires_approval,
)
from planner_ext.core.facts import HappenedInside, ModelReplied, unwrapped
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import CallFinished
from planner_ext.iteration import ToolExecution
from planner_ext.plugin import PlannerPlugin
from planner_ext.sk.run.behavior import BoundedFunctionChoiceBehavior
from planner_ext.testing import (
    Script,
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.planner import ADD, GOAL, Math, both_ways, invoke, kernel_of, planner_with
from support.values import each_of

DELEGATE = call("expert-reach_goal", {"goal": "Add 1 and 2."})


def delegate(times: int) -> ScriptedReply:
    """Ask the expert several times at once."""
    return calls(
        *[
            call("expert-reach_goal", {"goal": f"Part {number}."})
            for number in range(times)
        ]
    )


def expert_of(**options: Any) -> FunctionCallingStepwisePlanner:
    """Make the planner that is called as a function; it asks the service named ``expert``."""
    return planner_with("expert", **{"plan": False, **options})


def around(
    script: Script,
    expert: Script,
    planner: FunctionCallingStepwisePlanner | None = None,
    **plugins: object,
) -> tuple[Kernel, ScriptedChatCompletion]:
    """Make a kernel with the model of the run around, ``chat``, and that of its expert; give the expert's service."""
    inner = ScriptedChatCompletion(expert, service_id="expert")
    kernel = kernel_of(
        ScriptedChatCompletion(script, service_id="chat"), inner, **plugins
    )
    kernel.add_plugin(PlannerPlugin(planner or expert_of()), "expert")
    return kernel, inner


def results_read(result: Any) -> list[str]:
    """List what the model around read."""
    return [fact.result for fact in result.facts if isinstance(fact, CallFinished)]


def never_ends(request: ScriptedRequest) -> ScriptedReply:
    """Call a function as long as there is one."""
    return ADD if request.tools else say("As far as I came.")


@both_ways
async def test_the_nested_answer_is_what_the_model_around_reads(streamed: bool) -> None:
    """The function's result is the nested final answer; both runs are charged to the run around."""
    kernel, expert = around([DELEGATE, say("It is 3.")], [ADD, say("3")])
    result = await invoke(
        planner_with("chat", plan=False, max_iterations=9), kernel, streamed=streamed
    )
    assert result.status == "answered"
    assert result.final_answer == "It is 3."
    assert results_read(result) == ["3"]
    assert (result.iterations, result.tool_calls) == (4, 2)
    assert expert.requests[0].messages[-1]["content"] == "Add 1 and 2."


async def test_nested_runs_race_for_what_is_left_less_the_reserved_trip() -> None:
    """Of 12 trips the run around takes one and keeps one; the others are made inside: each answers or says why not."""
    kernel, expert = around([delegate(3), say("done")], never_ends)
    planner = planner_with(
        "chat", plan=False, max_iterations=12, budget=Budget(max_tool_calls=11)
    )
    result = await invoke(planner, kernel)
    assert len(expert.requests) == 12 - 2
    assert result.iterations == 12
    assert result.tool_calls <= 11
    nothing_left = "There is no answer: The limit max_iterations of the run"
    assert all(
        text.startswith(("As far as I came.", nothing_left))
        for text in results_read(result)
    )
    assert result.status == "limit_reached"
    assert result.limit == "max_iterations"
    assert result.final_answer == "done"


async def test_one_nested_run_may_take_all_that_is_left() -> None:
    """Of runs one after the other, the first may leave nothing: the others say so, and the run around answers."""
    kernel, expert = around([delegate(2), say("done")], never_ends)
    planner = planner_with(
        "chat", plan=False, max_iterations=6, execution=ToolExecution(max_concurrency=1)
    )
    result = await invoke(planner, kernel, streamed=False)
    assert len(expert.requests) == 4
    assert result.iterations == 6
    assert result.final_answer == "done"
    assert results_read(result)[0].startswith("As far as I came.")
    assert results_read(result)[1].startswith(
        "There is no answer: The limit max_iterations of the run leaves nothing"
    )


async def test_what_a_nested_run_leaves_is_there_for_the_next() -> None:
    """Only what was spent is charged."""
    kernel, _ = around([DELEGATE, DELEGATE, say("done")], lambda request: say("3"))
    result = await invoke(
        planner_with("chat", plan=False, max_iterations=7), kernel, streamed=False
    )
    assert results_read(result) == ["3", "3"]
    assert result.status == "answered"
    assert result.iterations == 5
    assert result.limit is None


async def test_nested_runs_may_spend_a_larger_budget_of_the_outer_run() -> None:
    """A resumed run with a new budget gives its nested runs what is left of that, not of the old one."""
    kernel, expert = around([DELEGATE, say("done"), DELEGATE, say("more")], never_ends)
    planner = planner_with("chat", plan=False, max_iterations=4)
    first = await invoke(planner, kernel, streamed=False)
    assert len(expert.requests) == 2
    assert first.final_answer == "done"
    assert first.limit == "max_iterations"
    again = await planner.resume(
        kernel, first.checkpoint, budget=Budget(max_iterations=13)
    )
    assert again.final_answer == "more"
    assert again.iterations == 13
    assert len(expert.requests) == 2 + 7


async def test_tokens_and_cost_are_shared_and_charged() -> None:
    """Tokens and cost of a nested run are the run's; a planner without a price is priced as the run around it."""
    kernel, expert = around([DELEGATE, say("done")], [say("3")])
    budget = Budget(max_total_tokens=10_000, max_cost=5.0)
    planner = planner_with(
        "chat", plan=False, budget=budget, price=lambda model, usage: 0.1
    )
    result = await invoke(planner, kernel, streamed=False)
    replies = [
        unwrapped(fact) for fact in result.facts if isinstance(fact, HappenedInside)
    ]
    (inside,) = (fact for fact in replies if isinstance(fact, ModelReplied))
    assert inside.usage.cost == 0.1
    assert result.usage.cost == pytest.approx(0.3)
    assert inside.usage.total_tokens > 0
    assert expert.requests


async def test_a_nested_run_that_fails_is_charged_what_it_has_spent() -> None:
    """The request that failed was made, and is charged; nothing else is."""
    kernel, _ = around([DELEGATE, say("sorry")], [RuntimeError("no line")])
    result = await invoke(
        planner_with("chat", plan=False, max_iterations=10), kernel, streamed=False
    )
    assert results_read(result) == ["The function expert-reach_goal failed."]
    assert result.iterations == 1 + 1 + 1
    assert result.status == "answered"
    assert result.limit is None


async def test_each_of_more_nested_runs_than_trips_answers_or_says_that_nothing_is_left() -> (
    None
):
    """With one trip more than the answer needs, one nested run is made; the outer run continues with what it reads."""
    kernel, expert = around([delegate(3), say("done")], lambda request: say("3"))
    result = await invoke(
        planner_with("chat", plan=False, max_iterations=3), kernel, streamed=False
    )
    assert len(expert.requests) == 1
    assert result.iterations == 3
    assert result.final_answer == "done"
    answered, *others = sorted(results_read(result))
    assert answered.startswith("3")
    assert len(others) == 2
    assert all(
        text.startswith("There is no answer: The limit max_iterations of the run")
        for text in others
    )


async def test_the_nested_planners_own_budget_holds_besides() -> None:
    """Its own limit ends a nested run before that around; what it came to is read, and that it was cut short."""
    kernel, expert = around(
        [DELEGATE, say("done")], never_ends, expert_of(max_iterations=2)
    )
    result = await invoke(
        planner_with("chat", plan=False, max_iterations=9), kernel, streamed=False
    )
    assert len(expert.requests) == 2
    assert results_read(result) == [
        "As far as I came.\n\n(This was cut short. The limit max_iterations=2 was reached.)"
    ]
    assert (result.status, result.iterations) == ("answered", 4)


@each_of("on_limit", ["raise", "stop", "return_calls"])
async def test_a_nested_limit_without_an_answer_is_read_and_charged(
    on_limit: Any,
) -> None:
    """Under every ``on_limit`` of a nested planner, the model around reads it, and the trips are charged."""
    budget = Budget(max_iterations=2, on_limit=on_limit)
    kernel, _ = around([DELEGATE, say("done")], never_ends, expert_of(budget=budget))
    result = await invoke(
        planner_with("chat", plan=False, max_iterations=9), kernel, streamed=False
    )
    assert results_read(result) == [
        "There is no answer: The limit max_iterations=2 was reached."
    ]
    assert (result.status, result.iterations) == ("answered", 4)


async def test_the_plan_of_a_nested_run_is_charged_under_all_options() -> None:
    """An uncharged plan request would be a request past the budget around."""
    kernel, expert = around(
        [DELEGATE, say("done")],
        [say("1. Say 3."), say("3")],
        expert_of(plan=True, charge_plan=False),
    )
    result = await invoke(
        planner_with("chat", plan=False, max_iterations=9), kernel, streamed=False
    )
    assert (len(expert.requests), result.iterations) == (2, 4)


async def test_a_deferral_inside_code_of_the_application_is_denied_by_name() -> None:
    """A run in a function that may not be called again does not wait: the model reads which call is refused."""
    paid: list[int] = []

    class Bank:
        @requires_approval
        @kernel_function(description="Pays.")
        def pay(self) -> str:
            paid.append(1)
            return "paid"

    class Desk:
        @kernel_function(description="Asks the expert.")
        async def ask(self, kernel: Kernel) -> str:
            return (await expert_of().invoke(kernel, "Pay.")).final_answer

    kernel, expert = around(
        [call("desk-ask"), say("done")],
        [call("bank-pay"), say("not paid")],
        bank=Bank(),
        desk=Desk(),
    )
    result = await invoke(planner_with("chat", plan=False), kernel)
    assert result.status == "answered"
    assert results_read(result) == ["not paid"]
    assert paid == []
    assert "bank-pay needs a person's decision" in str(
        expert.requests[1].messages[-1]["content"]
    )


async def test_a_planner_is_not_offered_inside_its_own_run() -> None:
    """The function of a planner is for others: neither its own run nor one nested in it can call it."""
    inner, outer = expert_of(), planner_with("chat", plan=False)
    kernel, expert = around(
        [DELEGATE, say("done")],
        [call("me-reach_goal", {"goal": "again"}), say("3")],
        inner,
    )
    kernel.add_plugin(PlannerPlugin(outer), "me")
    result = await invoke(outer, kernel, streamed=False)
    chat: Any = kernel.get_service("chat")
    assert chat.requests[0].tools == ("math-add", "math-fail", "expert-reach_goal")
    assert expert.requests[0].tools == ("math-add", "math-fail")
    assert "There is no function" in str(expert.requests[1].messages[-1]["content"])
    assert result.status == "answered"


async def test_a_planner_that_a_function_calls_spends_the_runs_budget() -> None:
    """Called by an ordinary function, and not by the model, its run has what is left as well, and is charged."""

    class Sly:
        @kernel_function(description="Calls the planner itself.")
        async def call(self, kernel: Kernel) -> str:
            return str(
                await kernel.invoke(
                    plugin_name="expert", function_name="reach_goal", goal="sly"
                )
            )

    kernel, expert = around(
        [call("sly-call"), say("done")], never_ends, math=Math(), sly=Sly()
    )
    result = await invoke(
        planner_with("chat", plan=False, max_iterations=6), kernel, streamed=False
    )
    assert len(expert.requests) == 4
    assert result.iterations == 6
    assert result.tool_calls == 1 + 1 + 3
    assert results_read(result)[0].startswith("As far as I came.")


async def test_outside_of_a_run_the_planners_own_budget_holds() -> None:
    """Called by the application, or by a stock loop, the function runs on the planner's own budget."""
    kernel, expert = around([], never_ends, expert_of(max_iterations=3))
    answer = await kernel.invoke(
        plugin_name="expert", function_name="reach_goal", goal=GOAL
    )
    assert str(answer).startswith("As far as I came.")
    assert len(expert.requests) == 3


async def test_nested_runs_of_a_service_spend_what_is_left() -> None:
    """The budget around may be that of a chat completion service."""
    inner = ScriptedChatCompletion(never_ends, service_id="expert")
    chat = ScriptedChatCompletion([DELEGATE, say("done")], service_id="chat")
    kernel = kernel_of(
        inner,
        FunctionInvokingChatCompletion(
            chat, service_id="bounded", budget=Budget(max_iterations=6)
        ),
    )
    kernel.add_plugin(PlannerPlugin(expert_of()), "expert")
    service = kernel.get_service("bounded", type=ChatCompletionClientBase)
    settings = service.get_prompt_execution_settings_class()(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )
    answer = await kernel.invoke_prompt(
        "go", arguments=KernelArguments(settings={"bounded": settings})
    )
    assert answer is not None
    message: Any = answer.value[0]
    assert (len(inner.requests), message.metadata["iterations"]) == (4, 6)


async def test_arguments_of_the_application_reach_the_nested_functions_and_the_goal_does_not() -> (
    None
):
    """A nested function gets what the application gave, and not the goal that a model wrote."""
    seen: list[tuple[str, str]] = []

    class Who:
        @kernel_function(description="Says who asks.")
        def ask(self, user: str = "", goal: str = "") -> str:
            seen.append((user, goal))
            return user

    kernel, _ = around(
        [DELEGATE, say("done")], [call("who-ask"), say("ann")], who=Who()
    )
    given = KernelArguments(user="ann")
    await invoke(
        planner_with("chat", plan=False), kernel, streamed=False, arguments=given
    )
    assert seen == [("ann", "")]
    assert dict(given) == {"user": "ann"}


async def test_the_plugin_can_have_a_kernel_a_name_and_a_description_of_its_own() -> (
    None
):
    """What the model around sees is the application's to say; the nested run may work on another kernel."""
    expert = ScriptedChatCompletion([say("3")], service_id="expert")
    plugin = PlannerPlugin(
        expert_of(),
        kernel=kernel_of(expert),
        function_name="research",
        description="Finds things.",
    )
    chat = ScriptedChatCompletion(
        [call("desk-research", {"goal": "1"}), say("done")], service_id="chat"
    )
    kernel = kernel_of(chat)
    kernel.add_plugin(plugin, "desk")
    function = kernel.get_function("desk", "research")
    assert function.description == "Finds things."
    assert [
        (p.name, p.is_required)
        for p in function.parameters
        if p.include_in_function_choices
    ] == [("goal", True)]
    result = await invoke(planner_with("chat", plan=False), kernel, streamed=False)
    assert (results_read(result), expert.requests[0].tools) == (
        ["3"],
        ("math-add", "math-fail"),
    )


@each_of(
    ("given", "named"),
    [
        ({"planner": "no"}, "planner"),
        ({"kernel": "no"}, "kernel"),
        ({"function_name": "no-such"}, "function_name"),
        ({"function_name": 7}, "function_name"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    given: dict[str, Any], named: str
) -> None:
    """A bad option of the plugin is a configuration error that names it."""
    with pytest.raises(PlannerInvalidConfigurationError, match=named):
        PlannerPlugin(given.pop("planner", expert_of()), **given)
