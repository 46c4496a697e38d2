"""Semantic Kernel's known defects, by number: our loop has none of them, and, where that is cheap, its own has."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import FunctionInvokingChatCompletion
from planner_ext.errors import InvalidReplyError
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedFault,
    ScriptedReply,
    call,
    calls,
    say,
)
from support.served import Answer, Served, asked
from support.stock import add_filter, sent_calls

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]

DONE = say("Done.")


@dataclass
class Ran:
    """The outcome of one script: the answer, the history, and what the model was sent."""

    answer: Answer
    history: ChatHistory
    inner: ScriptedChatCompletion

    @property
    def read(self) -> list[Any]:
        """What the model read as results before its last reply."""
        return [
            message["content"]
            for message in self.inner.requests[-1].messages
            if message["role"] == "tool"
        ]


Run = Callable[..., Awaitable[Ran]]


@pytest.fixture
def run(streamed: bool) -> Run:
    """Run a script over a plugin ``p``, in our loop or in Semantic Kernel's."""

    async def run(
        plugin: object,
        *script: Any,
        stock: bool = False,
        arguments: KernelArguments | None = None,
        kernel: Kernel | None = None,
        chunk_size: int = 8,
        **filters: list[str],
    ) -> Ran:
        kernel = Kernel() if kernel is None else kernel
        kernel.add_plugin(plugin, "p")
        inner = ScriptedChatCompletion(script, chunk_size=chunk_size)
        service: ChatCompletionClientBase = (
            inner if stock else FunctionInvokingChatCompletion(inner)
        )
        history = ChatHistory()
        history.add_user_message("Go.")
        given: Any = filters or None
        behavior = FunctionChoiceBehavior.Auto(filters=given)
        settings = PromptExecutionSettings(function_choice_behavior=behavior)
        answer = await asked(
            service, history, kernel, settings, streamed=streamed, arguments=arguments
        )
        return Ran(answer, history, inner)

    return run


class Plugin:
    """Functions that the defects need."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @kernel_function
    async def echo(self, text: str) -> str:
        self.seen.append(text)
        return text

    @kernel_function
    async def nothing(self) -> None:
        self.seen.append(None)

    @kernel_function
    async def table(self) -> dict[str, Any]:
        return {"ok": True, "none": None}

    @kernel_function
    async def guarded(
        self,
        tenant: Annotated[
            str, "hidden", {"include_in_function_choices": False}
        ] = "none",
    ) -> str:
        self.seen.append(tenant)
        return tenant

    @kernel_function
    async def fail(self) -> str:
        raise RuntimeError("password=hunter2")


async def test_defect_1_a_delta_of_empty_braces_is_kept(
    run: Run, streamed: bool
) -> None:
    """An argument delta equal to ``{}`` reaches the function; in the stock stream it is lost."""
    script = call("p-echo", {"text": "hell {} world"}), DONE
    ours, stock = Plugin(), Plugin()
    await run(ours, *script, chunk_size=2)
    await run(stock, *script, chunk_size=2, stock=True)
    assert ours.seen == ["hell {} world"]
    assert stock.seen == (["hell  world"] if streamed else ours.seen)


def event(**delta: Any) -> str:
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps({**head, 'choices': [{'index': 0, 'delta': delta, 'finish_reason': None}]})}\n\n"


def tool_event(
    index: int,
    id: str | None = None,
    name: str | None = None,
    arguments: str | None = None,
) -> str:
    function = {
        key: value
        for key, value in (("name", name), ("arguments", arguments))
        if value is not None
    }
    return event(
        tool_calls=[
            {"index": index, "function": function}
            | ({"id": id, "type": "function"} if id else {})
        ]
    )


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
async def test_defect_2_calls_at_one_index_and_names_in_pieces(
    serve: Serve, kernel: Kernel, history: ChatHistory, stock: bool
) -> None:
    """Two calls streamed at index 0, their names in pieces, are two calls; the stock loop mixes or loses them."""
    plugin = Plugin()
    kernel.add_plugin(plugin, "p")
    pieces = [
        tool_event(0, "a", "p-"),
        tool_event(0, None, "echo"),
        tool_event(0, None, None, '{"text":'),
        tool_event(0, None, None, '"one"}'),
        tool_event(0, "b", "p-echo"),
        tool_event(0, None, None, '{"text":"two"}'),
    ]
    body = "".join([*pieces, "data: [DONE]\n\n"])
    served = serve(
        [ScriptedFault(status=200, body=body, content_type="text/event-stream"), DONE]
    )
    service = (
        served.connector if stock else FunctionInvokingChatCompletion(served.connector)
    )
    settings = PromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    if stock:
        try:
            await asked(service, history, kernel, settings, streamed=True)
        except Exception:
            assert plugin.seen == []
        assert sorted(plugin.seen) != ["one", "two"]
        return
    await asked(service, history, kernel, settings, streamed=True)
    assert sorted(plugin.seen) == ["one", "two"]


async def test_defect_3_text_beside_calls_is_sent_again(run: Run) -> None:
    """What the model said beside its calls is in later requests; the stock loop leaves it out."""
    script = calls(call("p-echo", {"text": "x"}), text="First I look."), DONE
    ours, stock = await run(Plugin(), *script), await run(Plugin(), *script, stock=True)
    assert ours.inner.requests[1].messages[1]["content"] == "First I look."
    assert "content" not in stock.inner.requests[1].messages[1]


async def test_defect_4_results_are_json(run: Run) -> None:
    """Dicts go to the model as JSON, None as nothing; the stock loop sends Python's own spelling."""
    script = calls(call("p-table"), call("p-nothing")), DONE
    ours, stock = await run(Plugin(), *script), await run(Plugin(), *script, stock=True)
    assert ours.read == ['{"ok":true,"none":null}', ""]
    assert sorted(map(str, stock.read)) == sorted(
        ["{'ok': True, 'none': None}", "None"]
    )


async def test_defect_5_a_result_that_cannot_be_copied_is_not_lost(run: Run) -> None:
    """A function whose result cannot be deep-copied has its effect and its result; the stock loop raises after it."""

    class Held:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __str__(self) -> str:
            return "held"

    class Holding:
        def __init__(self) -> None:
            self.ran = 0

        @kernel_function
        async def hold(self) -> Any:
            self.ran += 1
            return Held()

    ours = await run(Holding(), call("p-hold"), DONE)
    assert (ours.answer.text, ours.read) == ("Done.", ['"held"'])
    stock = Holding()
    with pytest.raises(TypeError, match="lock"):
        await run(stock, call("p-hold"), DONE, stock=True)
    assert stock.ran == 1


async def test_defect_6_a_bare_name_runs_nothing(run: Run) -> None:
    """``echo`` is not ``p-echo``: a name that a policy would not know runs nothing; in the stock loop it runs."""
    script = call("echo", {"text": "x"}), DONE
    ours, stock = Plugin(), Plugin()
    ran = await run(ours, *script)
    await run(stock, *script, stock=True)
    assert (ours.seen, stock.seen) == ([], ["x"])
    assert "p-echo" in ran.read[0]


async def test_defect_7_a_hidden_parameter_is_the_applications(run: Run) -> None:
    """The model cannot give a parameter that is hidden from it; in the stock loop it overrides the application's."""
    script = call("p-guarded", {"tenant": "evil"}), DONE
    ours, stock = Plugin(), Plugin()
    ran = await run(ours, *script, arguments=KernelArguments(tenant="acme"))
    await run(stock, *script, arguments=KernelArguments(tenant="acme"), stock=True)
    assert (ours.seen, stock.seen) == ([], ["evil"])
    assert "tenant" in ran.read[0] and "acme" not in ran.read[0]
    await run(ours, call("p-guarded"), DONE, arguments=KernelArguments(tenant="acme"))
    assert ours.seen == ["acme"]


async def test_defect_8_exceptions_stay_inside(run: Run) -> None:
    """The model reads that a function failed, not what it raised; the stock loop sends the exception's text."""
    ours, stock = (
        await run(Plugin(), call("p-fail"), DONE),
        await run(Plugin(), call("p-fail"), DONE, stock=True),
    )
    assert ours.read == ["The function p-fail failed."]
    assert "hunter2" in stock.read[0]
    assert "hunter2" not in ours.history.model_dump_json()


async def test_defect_9_an_empty_list_offers_nothing(run: Run) -> None:
    """``included_functions=[]`` offers no function, and none can be called; the stock loop offers them all."""
    script = call("p-echo", {"text": "x"}), DONE
    ours, stock = Plugin(), Plugin()
    ran = await run(ours, *script[1:], included_functions=[])
    other = await run(stock, *script, included_functions=[], stock=True)
    assert (ran.inner.requests[0].tools, ours.seen) == ((), [])
    assert "p-echo" in other.inner.requests[0].tools


async def test_defect_9_what_is_not_offered_cannot_be_called(run: Run) -> None:
    """A function that the filters, or a narrowed ``get_config``, leave out is unknown at call time, too."""

    class Narrow(FunctionChoiceBehavior):
        def get_config(self, kernel: Kernel) -> Any:
            return self._check_and_get_config(
                kernel, {"excluded_functions": ["p-echo"]}
            )

    ours = Plugin()
    ran = await run(
        ours, call("p-echo", {"text": "x"}), DONE, excluded_functions=["p-echo"]
    )
    assert ours.seen == [] and "There is no function" in ran.read[0]
    inner = ScriptedChatCompletion([call("p-echo", {"text": "x"}), DONE])
    kernel, history = Kernel(plugins={}), ChatHistory()
    kernel.add_plugin(ours, "p")
    settings = PromptExecutionSettings(
        function_choice_behavior=Narrow(maximum_auto_invoke_attempts=5)
    )
    await asked(
        FunctionInvokingChatCompletion(inner), history, kernel, settings, streamed=False
    )
    assert ours.seen == []


async def test_defect_10_parameters_may_have_any_name(run: Run) -> None:
    """Parameters named ``settings`` and an unannotated ``kernel`` work; the stock loop crashes or refuses."""

    class Named:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        @kernel_function
        async def tune(self, settings: str) -> str:
            self.seen.append(settings)
            return settings

        @kernel_function
        async def look(self, kernel) -> str:
            self.seen.append(type(kernel))
            return "seen"

    named = Named()
    ran = await run(
        named, calls(call("p-tune", {"settings": "loud"}), call("p-look")), DONE
    )
    assert sorted(map(str, named.seen)) == sorted(map(str, ["loud", Kernel]))
    assert ran.read == ["loud", "seen"]
    with pytest.raises(Exception, match=r"settings|str"):
        await run(Named(), call("p-tune", {"settings": "loud"}), DONE, stock=True)


async def test_defect_11_a_call_without_an_id_gets_one(run: Run) -> None:
    """Call and result go by the same, fresh id; the stock loop answers under "unknown"."""
    script = call("p-echo", {"text": "x"}, id=""), DONE
    ours, stock = await run(Plugin(), *script), await run(Plugin(), *script, stock=True)
    called, answered = ours.inner.requests[1].messages[1:3]
    assert sent_calls(called)[0]["id"] == answered["tool_call_id"] != ""
    called, answered = stock.inner.requests[1].messages[1:3]
    assert sent_calls(called)[0]["id"] != answered["tool_call_id"]


@pytest.mark.parametrize("choices", ["[]", "null"])
async def test_defect_12_an_odd_response_is_named(
    ask: Ask, serve: Serve, streamed: bool, choices: str
) -> None:
    """Empty and null choices are an error of ours with a way out; the stock loop raises a bare one, or says nothing."""
    body = f'{{"id":"x","object":"o","created":1,"model":"m","choices":{choices}}}'
    body, kind = (
        (f"data: {body}\n\ndata: [DONE]\n\n", "text/event-stream")
        if streamed
        else (body, "application/json")
    )
    served = serve([ScriptedFault(status=200, body=body, content_type=kind)] * 2)
    with pytest.raises(InvalidReplyError, match="can be made again"):
        await ask(FunctionInvokingChatCompletion(served.connector))
    with pytest.raises((IndexError, TypeError)):
        await ask(served.connector)


async def test_defect_13_half_a_call_does_not_run(run: Run) -> None:
    """A call in a reply cut by length is not run, not even where its half is whole JSON; the stock loop runs it."""
    cut = ScriptedReply(
        calls=call("p-echo", {"text": "rm -rf /"}).calls, finish_reason="length"
    )
    ours, stock = Plugin(), Plugin()
    ran = await run(ours, cut)
    await run(stock, cut, DONE, stock=True)
    assert (ours.seen, stock.seen) == ([], ["rm -rf /"])
    assert (ran.answer.metadata["status"], len(ran.history.messages)) == (
        "incomplete",
        1,
    )


async def test_defect_13_an_empty_reply_can_be_sent_again(
    run: Run, serve: Serve, ask: Ask
) -> None:
    """The message returned for an empty reply is one that OpenAI takes; the stock loop's is ``content: []``."""
    ours = await run(Plugin(), ScriptedReply())
    assert ours.answer.metadata["status"] == "incomplete"
    ours.history.add_message(ours.answer.message)
    ours.history.add_user_message("Hello?")
    served = serve([DONE])
    assert (
        await ask(FunctionInvokingChatCompletion(served.connector), to=ours.history)
    ).text == "Done."
    assert served.server.refused == []


async def test_defect_14_the_applications_arguments_are_not_stored(run: Run) -> None:
    """A secret, or an argument that is no JSON, is nowhere in the history; in the stock loop's it is, and breaks it."""
    arguments = KernelArguments(secret="s3cret", connection=threading.Lock())
    ours = await run(Plugin(), call("p-echo", {"text": "x"}), DONE, arguments=arguments)
    assert "s3cret" not in ours.history.model_dump_json()
    stock = await run(
        Plugin(), call("p-echo", {"text": "x"}), DONE, arguments=arguments, stock=True
    )
    with pytest.raises(Exception, match="serialize"):
        stock.history.model_dump_json()


async def test_defect_15_the_kernel_and_its_filters_are_the_applications(
    run: Run,
) -> None:
    """A filter that is a method of an audit log writes into that log, and is not copied; nor is the kernel."""

    class Audit:
        def __init__(self) -> None:
            self.seen: list[str] = []
            self.kernels: list[Kernel] = []

        async def watch(self, context: Any, next: Any) -> None:
            self.seen.append(context.function.fully_qualified_name)
            self.kernels.append(context.kernel)
            await next(context)

    audit, kernel = Audit(), Kernel()
    add_filter(kernel, "auto_function_invocation", audit.watch)
    add_filter(kernel, "function_invocation", audit.watch)
    await run(Plugin(), call("p-echo", {"text": "x"}), DONE, kernel=kernel)
    assert audit.seen == ["p-echo", "p-echo"]
    assert all(seen is kernel for seen in audit.kernels)


async def test_defect_18_calls_on_the_last_request_do_not_dangle(run: Run) -> None:
    """A model that calls once more on the last, tool-free request: nothing runs and nothing is left unanswered."""
    plugin = Plugin()
    ran = await run(plugin, *[call("p-echo", {"text": "x"})] * 6)
    assert (len(plugin.seen), ran.answer.calls) == (5, [])
    assert ran.answer.metadata["status"] == "limit_reached"
    assert ran.answer.message.role == "assistant"


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
async def test_synchronous_functions_do_not_block_the_loop(
    run: Run, stock: bool
) -> None:
    """A synchronous function may wait for the event loop; in the stock loop that waits for ever."""
    loop = asyncio.get_running_loop()

    class Waiting:
        @kernel_function
        def ask(self) -> str:
            future = asyncio.run_coroutine_threadsafe(
                asyncio.sleep(0, "answered"), loop
            )
            return future.result(timeout=0.05 if stock else 30)

    ran = await run(Waiting(), call("p-ask"), DONE, stock=stock)
    assert (ran.read == ["answered"]) is not stock
