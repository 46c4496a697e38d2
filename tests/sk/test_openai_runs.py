"""Whole runs over HTTP: every request is the one that Semantic Kernel's own way would have sent."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory

from planner_ext import (
    Approve,
    BoundedFunctionChoiceBehavior,
    Budget,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
)
from planner_ext.hitl_manager import Checkpoint, Defer
from planner_ext.iteration import FunctionInvocationIterationContext
from planner_ext.sk.chat import openai as openai_members
from planner_ext.testing import ScriptedReply, call, calls, say
from support.served import Answer, Served, Tools, asked
from support.values import each_of

Serve = Callable[..., Served]
Bodies = list[dict[str, Any]]

ADD = call("t-add", {"a": 1, "b": 2})
BOTH = calls(call("t-add", {"a": 3, "b": 4}), call("t-echo", {"text": "é"}))
TALK = calls(call("t-echo", {"text": "x"}), text="Looking.")
AUTO = FunctionChoiceBehavior.Auto


@dataclass
class Run:
    """One run's world: what drives it, and what it asks."""

    served: Served
    tools: Tools
    streamed: bool
    history: ChatHistory

    async def ask(
        self, behavior: FunctionChoiceBehavior | None = None, **options: Any
    ) -> Answer:
        settings = OpenAIChatPromptExecutionSettings(
            function_choice_behavior=behavior or AUTO(), temperature=0.5
        )
        service = FunctionInvokingChatCompletion(self.served.connector, **options)
        return await asked(
            service, self.history, self.tools.kernel(), settings, streamed=self.streamed
        )


async def chained(run: Run) -> None:
    await run.ask()


async def at_its_limit(run: Run) -> None:
    await run.ask(budget=Budget(max_iterations=3))


async def required(run: Run) -> None:
    await run.ask(BoundedFunctionChoiceBehavior.Required(maximum_use_attempts=2))


async def never(run: Run) -> None:
    await run.ask(FunctionChoiceBehavior.NoneInvoke())


async def compacted(run: Run) -> None:
    def compact(context: FunctionInvocationIterationContext) -> None:
        if context.iteration == 1:
            del context.messages[2:4]

    await run.ask(iteration_completed=compact)


async def edited(run: Run) -> None:
    async def edit(seen: Any) -> Any:
        return (
            Approve(arguments={"a": 5, "b": 6})
            if seen.function_name == "add"
            else Deny("No echo.")
        )

    await run.ask(interceptors=[edit])


async def resumed(run: Run) -> None:
    async def later(_: Any) -> Defer:
        return Defer()

    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=AUTO())
    service = FunctionInvokingChatCompletion(run.served.connector, interceptors=[later])
    kernel = run.tools.kernel()
    answer = await asked(service, run.history, kernel, settings, streamed=run.streamed)
    while (checkpoint := answer.metadata.get("checkpoint")) is not None:
        decisions = {each["id"]: Approve() for each in answer.metadata["pending"]}
        held = Checkpoint.from_json(checkpoint)
        message = await service.resume(
            run.history, held, decisions, settings, kernel=kernel
        )
        answer = Answer(message, message.metadata, [])


async def planned(run: Run) -> None:
    kernel = run.tools.kernel()
    kernel.add_service(run.served.connector)
    options = FunctionCallingStepwisePlannerOptions(max_iterations=6, max_tokens=500)
    planner = FunctionCallingStepwisePlanner(service_id="served", options=options)
    if run.streamed:
        _ = [event async for event in planner.invoke_stream(kernel, "Add.")]
    else:
        await planner.invoke(kernel, "Add.")


RUNS: dict[Callable[[Run], Awaitable[None]], list[ScriptedReply]] = {
    chained: [ADD, BOTH, TALK, say("Done.")],
    at_its_limit: [ADD, TALK, say("Enough.")],
    required: [ADD, BOTH, say("Done.")],
    never: [say("I would add.")],
    compacted: [ADD, BOTH, TALK, say("Done.")],
    edited: [ADD, BOTH, say("Done.")],
    resumed: [ADD, BOTH, say("Done.")],
    planned: [
        say("1. Add."),
        ADD,
        TALK,
        call("UserInteraction-SendFinalAnswer", {"answer": "3"}),
    ],
}


@pytest.fixture
def bodies(
    serve: Serve, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Awaitable[Bodies]]:
    """Make a run and bring the bodies of its requests, encoded by us or by the connector itself."""

    async def bodies(
        drive: Callable[[Run], Awaitable[None]],
        script: list[ScriptedReply],
        *,
        ours: bool,
    ) -> Bodies:
        history = ChatHistory(system_message="Be brief.")
        history.add_user_message("What is 1 + 2?")
        run = Run(serve(script), Tools(), streamed, history)
        with monkeypatch.context() as patched:
            if not ours:
                patched.setattr(openai_members, "REPLACED", {"_send_request": ""})
            await drive(run)
        assert run.served.server.refused == []
        return [request.body for request in run.served.server.requests]

    return bodies


@each_of("drive", RUNS, ids=lambda drive: drive.__name__)
async def test_a_run_sends_what_the_connectors_own_way_would(
    drive: Any, bodies: Callable[..., Awaitable[Any]]
) -> None:
    """Chained, limited, required, compacted, edited, resumed, planned: request for request the same."""
    script = [
        reply if not reply.calls else _with_ids(reply, at)
        for at, reply in enumerate(RUNS[drive])
    ]
    ours = await bodies(drive, script, ours=True)
    assert ours == await bodies(drive, script, ours=False)
    assert len(ours) == len(script)


def _with_ids(reply: ScriptedReply, at: int) -> ScriptedReply:
    named = [
        call(each.name, each.arguments, id=f"call_{at}_{index}")
        for index, each in enumerate(reply.calls)
    ]
    return calls(*named, text=reply.text)


async def test_a_run_sends_what_semantic_kernels_loop_sends(
    bodies: Callable[..., Awaitable[Any]],
) -> None:
    """But for the text beside calls, which that loop leaves out, the requests of both loops are equal."""

    async def stock(run: Run) -> None:
        settings = OpenAIChatPromptExecutionSettings(
            function_choice_behavior=AUTO(), temperature=0.5
        )
        await asked(
            run.served.connector,
            run.history,
            run.tools.kernel(),
            settings,
            streamed=run.streamed,
        )

    script = [_with_ids(ADD, 0), _with_ids(BOTH, 1), _with_ids(TALK, 2), say("Done.")]
    ours, theirs = (
        await bodies(chained, script, ours=True),
        await bodies(stock, script, ours=True),
    )
    assert ours[-1]["messages"][-2].pop("content") == "Looking."
    assert ours == theirs
