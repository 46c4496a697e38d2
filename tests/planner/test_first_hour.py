"""Mistakes of the first hour: each error says what to do instead, at every door where the mistake can be made."""

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import (
    DEFAULT_CONNECTION_LIMITS,
    AsyncOpenAI,
    DefaultAsyncHttpxClient,
)
from semantic_kernel import Kernel
from semantic_kernel.agents import (
    AgentResponseItem,
    ChatCompletionAgent,
    ChatHistoryAgentThread,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent

from planner_ext import (
    ApprovalFilter,
    ApprovalPolicy,
    ApprovalSettings,
    Approve,
    BoundedFunctionChoiceBehavior,
    Budget,
    Defer,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    PlannerPlugin,
    Runs,
    ToolCallHandler,
    ToolExecution,
    ToolUseSession,
)
from planner_ext.agent import resume_agent
from planner_ext.errors import (
    DecisionRefusedError,
    InvalidPolicyError,
    PlannerExtError,
    ServiceCallError,
)
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedFault,
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.planner import scripted
from support.values import each_of

Wrong = Callable[[], Any]
KERNEL = Kernel()
SERVICE = ScriptedChatCompletion([])
PLANNER = FunctionCallingStepwisePlanner()
OPTIONS = FunctionCallingStepwisePlannerOptions()
MESSAGE = ChatMessageContent(role=AuthorRole.ASSISTANT, content="")
THREAD = ChatHistoryAgentThread()
AGENT = ChatCompletionAgent(name="clerk", service=SERVICE)

MADE_WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "planner(kernel)": (
        lambda: FunctionCallingStepwisePlanner(as_any(KERNEL)),
        "planner.invoke(kernel, goal)",
    ),
    "planner(options)": (
        lambda: FunctionCallingStepwisePlanner(as_any(OPTIONS)),
        "options=...",
    ),
    "planner(service)": (
        lambda: FunctionCallingStepwisePlanner(as_any(SERVICE)),
        "service_id",
    ),
    "planner(options=kernel)": (
        lambda: FunctionCallingStepwisePlanner(options=as_any(KERNEL)),
        "planner.invoke(kernel, goal)",
    ),
    "planner(options=budget)": (
        lambda: FunctionCallingStepwisePlanner(options=as_any(Budget())),
        "FunctionCallingStepwisePlannerOptions(budget=...)",
    ),
    "service(kernel)": (
        lambda: FunctionInvokingChatCompletion(as_any(KERNEL)),
        "kernel.get_service",
    ),
    "handler(service)": (
        lambda: ToolCallHandler(as_any(SERVICE)),
        "kernel.add_service(service)",
    ),
    "session(service)": (
        lambda: ToolUseSession(as_any(SERVICE)),
        "kernel.add_service(service)",
    ),
    "plugin(kernel)": (
        lambda: PlannerPlugin(as_any(KERNEL)),
        "The planner comes first",
    ),
    "filter(path)": (
        lambda: ApprovalFilter(as_any("policy.yaml")),
        "ApprovalPolicy.from_yaml(path)",
    ),
    "from_yaml(data)": (
        lambda: ApprovalPolicy.from_yaml(as_any({"default": "ask"})),
        "from_dict",
    ),
    "invoke_sync(goal, kernel)": (
        lambda: PLANNER.invoke_sync(as_any("goal"), as_any(KERNEL)),
        "The kernel comes first",
    ),
    "resume_sync(checkpoint, kernel)": (
        lambda: PLANNER.resume_sync(as_any("{}"), as_any(KERNEL)),
        "kernel comes first",
    ),
    "resume_sync(kernel, None)": (
        lambda: PLANNER.resume_sync(KERNEL, as_any(None)),
        "result.checkpoint",
    ),
    "resume_sync(kernel, response)": (
        lambda: PLANNER.resume_sync(
            KERNEL, as_any(AgentResponseItem(message=MESSAGE, thread=THREAD))
        ),
        "response.metadata['checkpoint']",
    ),
    "resume_sync(kernel, metadata)": (
        lambda: PLANNER.resume_sync(KERNEL, as_any({})),
        "the entry 'checkpoint'",
    ),
    "resume_sync(kernel, file name)": (
        lambda: PLANNER.resume_sync(KERNEL, "run.json"),
        "Path(name).read_text()",
    ),
    "resume_agent(thread, agent)": (
        lambda: resumed(THREAD, AGENT),
        "The agent comes first",
    ),
    "resume_agent(service)": (lambda: resumed(SERVICE, THREAD), "Give the agent"),
    "resume_agent(agent, response)": (
        lambda: resumed(AGENT, AgentResponseItem(message=MESSAGE, thread=THREAD)),
        "response.thread",
    ),
    "resume_agent(agent, history)": (
        lambda: resumed(AGENT, ChatHistory()),
        "ChatHistoryAgentThread(history)",
    ),
    "invoke_sync(kernel, history)": (
        lambda: PLANNER.invoke_sync(KERNEL, as_any(ChatHistory())),
        "chat_history=...",
    ),
    "invoke_sync(kernel, goal, history)": (
        lambda: PLANNER.invoke_sync(KERNEL, "goal", as_any(ChatHistory())),
        "chat_history=...",
    ),
    "invoke_sync(kernel, goal, dict)": (
        lambda: PLANNER.invoke_sync(KERNEL, "goal", as_any({"city": "Oslo"})),
        "KernelArguments(**arguments)",
    ),
    "service(budget=5)": (
        lambda: FunctionInvokingChatCompletion(SERVICE, budget=as_any(5)),
        "Budget(max_iterations=...)",
    ),
    "options(policy=)": (
        lambda: FunctionCallingStepwisePlannerOptions(**as_any({"policy": 1})),
        "interceptors=[ApprovalPolicy.from_yaml(path)]",
    ),
    "cancel(None)": (lambda: PLANNER.cancel(as_any(None)), "result.checkpoint"),
}


def as_any(value: object) -> Any:
    return value


def resumed(agent: object, thread: object) -> None:
    asyncio.run(resume_agent(as_any(agent), as_any(thread), "{}", {}))


@each_of("mistake", MADE_WRONG)
def test_a_value_in_the_wrong_place_gets_an_error_that_says_where_it_belongs(
    mistake: str,
) -> None:
    """A value that is right elsewhere: the error says where."""
    make, way_out = MADE_WRONG[mistake]
    with pytest.raises(PlannerExtError, match=re.escape(way_out)):
        make()


@pytest.mark.parametrize(
    "door", [FunctionInvokingChatCompletion, ToolCallHandler, ToolUseSession]
)
@pytest.mark.parametrize("name", ["policy", "authorize"])
def test_a_part_of_an_option_gets_an_error_that_names_its_option(
    door: Any, name: str
) -> None:
    """At every door that takes the options by keyword."""
    given = {
        "policy": "ApprovalPolicy.from_yaml",
        "authorize": "ApprovalSettings(authorize=...)",
    }[name]
    with pytest.raises(TypeError, match=re.escape(given)):
        door(
            SERVICE
            if door is FunctionInvokingChatCompletion
            else Kernel(services=[SERVICE]),
            **{name: 1},
        )


@each_of(
    ("decisions", "way_out"),
    [
        (None, "Without decisions give {}"),
        (Approve(), "pending has the ids"),
        ([Approve()], "pending has the ids"),
        ({"call_1": True}, "Approve(by=...)"),
        ({"call_1": "approve"}, "Approve(by=...)"),
        ({"call_1": Approve}, "Make one of the class"),
    ],
)
async def test_an_invalid_decision_gets_an_error_that_says_how_to_decide(
    decisions: Any, way_out: str
) -> None:
    """Where a paused turn is resumed; the call waits, and the right decision takes it."""

    async def waits(_: object) -> Defer:
        return Defer("Add?")

    kernel, model = scripted(
        [call("math-add", {"a": 1, "b": 2}, id="call_1"), say("3.")]
    )
    kernel.add_service(
        FunctionInvokingChatCompletion(model, interceptors=[waits]), overwrite=True
    )
    agent = ChatCompletionAgent(name="clerk", kernel=kernel)
    response = await agent.get_response("Add 1 and 2.")
    checkpoint = response.metadata["checkpoint"]
    with pytest.raises(DecisionRefusedError, match=re.escape(way_out)):
        await resume_agent(agent, response.thread, checkpoint, decisions)
    response = await resume_agent(
        agent, response.thread, checkpoint, {"call_1": Approve()}
    )
    assert str(response) == "3."


def test_one_client_on_two_event_loops_gets_an_error_with_the_way_out() -> None:
    """``invoke_sync`` and ``asyncio.run`` take turns on a connection that is kept alive."""
    planner = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(plan=False)
    )
    refused = threading.Event()

    def reply(request: ScriptedRequest) -> ScriptedReply:
        if request.index:  # an answer that is there at once needs no event loop
            refused.wait(60)
        return say("4.5")

    with ScriptedOpenAIServer(reply) as server:
        limits = type(DEFAULT_CONNECTION_LIMITS)(keepalive_expiry=300)
        keeps = DefaultAsyncHttpxClient(limits=limits)
        client = AsyncOpenAI(
            api_key="none", base_url=server.url, max_retries=0, http_client=keeps
        )
        kernel = Kernel(
            services=[OpenAIChatCompletion(ai_model_id="scripted", async_client=client)]
        )
        assert planner.invoke_sync(kernel, "How warm is it?").final_answer == "4.5"
        with pytest.raises(ServiceCallError, match="another event loop before"):
            asyncio.run(planner.invoke(kernel, "How warm is it?"))
        refused.set()


async def swapped_plain(_: Path) -> None:
    await PLANNER.invoke(as_any("goal"), as_any(KERNEL))


async def swapped_streamed(_: Path) -> None:
    await drained(PLANNER.invoke_stream(as_any("goal"), as_any(KERNEL)))


async def swapped_kept(folder: Path) -> None:
    async with Runs.sqlite(folder / "runs.db") as runs:
        await runs.start(PLANNER, as_any("goal"), as_any(KERNEL))


@pytest.mark.parametrize("door", [swapped_plain, swapped_streamed, swapped_kept])
async def test_kernel_and_goal_are_not_swapped(door: Any, tmp_path: Path) -> None:
    """The kernel comes first, at every door that takes both."""
    with pytest.raises(PlannerExtError, match="kernel comes first"):
        await door(tmp_path)


def history() -> ChatHistory:
    asked = ChatHistory()
    asked.add_user_message("Hello.")
    return asked


SETTINGS = PromptExecutionSettings(
    function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
)


def kernel_with(service: Any) -> Kernel:
    return Kernel(services=[service])


async def drained(stream: Any) -> None:
    async for _ in stream:
        pass


RESUMED: dict[str, Callable[[], Any]] = {
    "planner": lambda: PLANNER.resume(KERNEL, as_any(None)),
    "planner, streamed": lambda: drained(PLANNER.resume_stream(KERNEL, as_any(None))),
    "service": lambda: FunctionInvokingChatCompletion(SERVICE).resume(
        history(), as_any(None), {}, SETTINGS, kernel=KERNEL
    ),
    "service, streamed": lambda: drained(
        FunctionInvokingChatCompletion(SERVICE).resume_streaming(
            history(), as_any(None), {}, SETTINGS, kernel=KERNEL
        )
    ),
    "handler": lambda: drained(
        ToolCallHandler(kernel_with(SERVICE)).resume(history(), as_any(None), {})
    ),
    "handler, streamed": lambda: drained(
        ToolCallHandler(kernel_with(SERVICE)).resume_stream(history(), as_any(None), {})
    ),
}


@pytest.mark.parametrize("door", RESUMED)
async def test_resuming_without_a_checkpoint_is_refused(door: str) -> None:
    """``resume(None)``, as with the metadata of a message that was answered, says where checkpoints come from."""
    with pytest.raises(PlannerExtError, match="was answered has none"):
        await RESUMED[door]()


MISSPELT: dict[str, tuple[Callable[[], object], str]] = {
    "Budget": (lambda: Budget(**as_any({"max_iteration": 3})), "max_iterations"),
    "ToolExecution": (lambda: ToolExecution(**as_any({"timeouts": 3})), "timeout"),
    "ApprovalSettings": (
        lambda: ApprovalSettings(**as_any({"unmached": "deny"})),
        "unmatched",
    ),
    "Approve": (lambda: Approve(**as_any({"argument": {}})), "arguments"),
    "options": (
        lambda: FunctionCallingStepwisePlannerOptions(**as_any({"max_iteration": 3})),
        "max_iterations",
    ),
    "service": (
        lambda: FunctionInvokingChatCompletion(SERVICE, **as_any({"interceptor": ()})),
        "interceptors",
    ),
    "handler": (
        lambda: ToolCallHandler(kernel_with(SERVICE), **as_any({"interceptor": ()})),
        "interceptors",
    ),
    "session": (
        lambda: ToolUseSession(kernel_with(SERVICE), **as_any({"interceptor": ()})),
        "interceptors",
    ),
}


@each_of("place", MISSPELT)
def test_a_misspelt_name_gets_an_error_with_the_nearest(place: str) -> None:
    """Limits, settings, decisions and the options of every door."""
    make, meant = MISSPELT[place]
    with pytest.raises((TypeError, PlannerExtError), match=f"Did you mean '{meant}'"):
        make()


STREAMS: dict[str, Callable[[], Any]] = {
    "invoke_stream": lambda: PLANNER.invoke_stream(KERNEL, "goal"),
    "resume_stream": lambda: PLANNER.resume_stream(KERNEL, "{}"),
    "resume_streaming": lambda: FunctionInvokingChatCompletion(
        SERVICE
    ).resume_streaming(history(), "{}", {}, SETTINGS, kernel=KERNEL),
    "prompt_streaming": lambda: ToolUseSession(kernel_with(SERVICE)).prompt_streaming(
        "Hello."
    ),
    "invoke": lambda: ToolCallHandler(kernel_with(SERVICE)).invoke(history()),
    "resume": lambda: ToolCallHandler(kernel_with(SERVICE)).resume(history(), "{}", {}),
}


@each_of("method", STREAMS)
async def test_a_stream_is_not_awaited(method: str) -> None:
    """The error of ``await planner.invoke_stream(...)`` shows the loop that reads it."""
    with pytest.raises(TypeError, match=rf"async for event in {method}\("):
        await STREAMS[method]()


BROKEN: dict[str, tuple[str, str]] = {
    "key of a rule": (
        "default: ask\nrules:\n- {plugin: a, action: ask}\n- {acton: deny}",
        r"rule 2, .*'action'",
    ),
    "key of a predicate": (
        "default: ask\nrules:\n- {action: deny, arguments: {a: {gte: 3}}}",
        "rule 1, .*equals",
    ),
    "action": (
        "default: ask\nrules:\n- {action: refuse}",
        "rule 1, .*'allow', 'deny' or 'ask'",
    ),
    "key of the policy": ("defualt: ask", "'default'"),
}


@pytest.mark.parametrize("part", BROKEN)
def test_a_policy_file_is_named_with_rule_and_key(part: str, tmp_path: Path) -> None:
    """Rules by their number, as in decisions; the keys that there are, and the nearest; and the file."""
    text, named = BROKEN[part]
    file = tmp_path / "policy.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidPolicyError, match=rf"(?s){named}.*policy\.yaml"):
        ApprovalPolicy.from_yaml(file)


def test_a_missing_policy_file_is_named(tmp_path: Path) -> None:
    """With the folder in which it was looked for."""
    with pytest.raises(
        FileNotFoundError, match="No such policy file, looked for in"
    ) as raised:
        ApprovalPolicy.from_yaml("polcy.yaml")
    assert str(Path.cwd()) in str(raised.value)
    assert "polcy.yaml" in str(raised.value)


KEY = "sk-this-is-secret"


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[OpenAIChatCompletion]:
    async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield OpenAIChatCompletion("gpt-x", service_id="chat", async_client=client)


async def by_planner(service: Any) -> None:
    await FunctionCallingStepwisePlanner().invoke(kernel_with(service), "Hello.")


async def by_planner_streamed(service: Any) -> None:
    await drained(
        FunctionCallingStepwisePlanner().invoke_stream(kernel_with(service), "Hello.")
    )


async def by_service(service: Any) -> None:
    await FunctionInvokingChatCompletion(service).get_chat_message_content(
        history(), SETTINGS, kernel=KERNEL
    )


async def without_a_loop(service: Any) -> None:
    await FunctionInvokingChatCompletion(service).get_chat_message_content(
        history(), PromptExecutionSettings()
    )


async def by_session(service: Any) -> None:
    await ToolUseSession(kernel_with(service)).prompt("Hello.")


every_request = each_of(
    "ask", [by_planner, by_planner_streamed, by_service, without_a_loop, by_session]
)


@every_request
async def test_a_refused_key_names_the_address_and_no_secret(ask: Any) -> None:
    """401: which endpoint, the status, and what to check; a key that the endpoint repeats is hidden."""
    body = {
        "error": {
            "message": f"Incorrect API key provided: {KEY}.",
            "type": "invalid_request_error",
        }
    }
    with ScriptedOpenAIServer(lambda _: ScriptedFault(status=401, body=body)) as server:
        async with connected(server.url) as service:
            with pytest.raises(ServiceCallError, match=r"401.*check api_key") as raised:
                await ask(service)
        assert server.url in str(raised.value)
    assert KEY not in str(raised.value)


@every_request
async def test_a_refused_connection_names_the_address(ask: Any) -> None:
    """No server listens there: which host and port, and what to check."""
    with ScriptedOpenAIServer([say("Hi.")]) as server:
        url = server.url
    async with connected(url) as service:
        with pytest.raises(
            ServiceCallError, match="check base_url, its host and port"
        ) as raised:
            await ask(service)
    assert url in str(raised.value)
