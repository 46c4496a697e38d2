"""What ``FunctionInvokingChatCompletion`` reports and passes on; over real HTTP where the wire matters."""

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.completion_usage import CompletionUsage
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    TextContent,
)
from semantic_kernel.functions import kernel_function

from planner_ext import Budget, Deny, FunctionInvokingChatCompletion
from planner_ext.errors import InvalidReplyError, PlannerInvalidConfigurationError
from planner_ext.sk.run.behavior import BoundedFunctionChoiceBehavior
from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, call, calls, say
from support.served import Answer, Served, Tools, asked, question
from support.stock import every_call, first_result, scripted_by
from support.values import each_of

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]

ADD = call("t-add", {"a": 1, "b": 2})
AUTO = FunctionChoiceBehavior.Auto


async def test_a_direct_answer_is_one_iteration(ask: Ask, serve: Serve) -> None:
    """An answer without calls reports one iteration, no tool calls, status answered and no limit."""
    served = serve([say("Three.")])
    answer = await ask(FunctionInvokingChatCompletion(served.connector))
    assert answer.text == "Three."
    told = {
        key: answer.metadata[key]
        for key in ("iterations", "tool_calls", "status", "limit")
    }
    assert told == {
        "iterations": 1,
        "tool_calls": 0,
        "status": "answered",
        "limit": None,
    }
    assert "checkpoint" not in answer.metadata


async def test_what_was_spent_is_what_the_server_counted(
    ask: Ask, serve: Serve
) -> None:
    """Iterations are the requests, tool calls the functions started, and usage the tokens that the server billed."""
    served = serve([calls(ADD, call("t-fail")), call("t-nowhere"), ADD, say("Three.")])
    answer = await ask(FunctionInvokingChatCompletion(served.connector))
    usage = answer.metadata["usage"]
    assert type(usage) is CompletionUsage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        served.server.prompt_tokens,
        served.server.completion_tokens,
    )
    assert answer.metadata["iterations"] == len(served.server.requests) == 4
    assert answer.metadata["tool_calls"] == 3
    assert served.server.refused == []


async def test_every_key_of_the_connector_is_kept(ask: Ask, serve: Serve) -> None:
    """The final message has each metadata key that the connector gave, with the value of the last reply."""
    served = serve([ADD, say("Three.")])
    answer = await ask(FunctionInvokingChatCompletion(served.connector))
    assert answer.metadata.keys() >= {
        "logprobs",
        "id",
        "created",
        "system_fingerprint",
        "usage",
    }
    assert (answer.metadata["id"], answer.metadata["system_fingerprint"]) == (
        "chatcmpl-1",
        "fp_scripted",
    )


async def test_an_unknown_key_of_a_connector_is_kept(ask: Ask) -> None:
    """What a connector says beyond the usual keys is passed on, too."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([ADD, say("Three.")], metadata={"region": "eu"})
    )
    assert (await ask(service)).metadata["region"] == "eu"


class OwnUsage(CompletionUsage):
    """A connector's own kind of usage, with a number of its own."""

    cached_tokens: int = 0


class NumberedUsage:
    """A connector's own type of usage, not a pydantic model."""

    def __init__(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens

    def __add__(self, other: "NumberedUsage") -> "NumberedUsage":
        return NumberedUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


@each_of(
    ("usage", "expected"),
    [
        (CompletionUsage(prompt_tokens=10, completion_tokens=1), (20, 2)),
        (OwnUsage(prompt_tokens=10, completion_tokens=1, cached_tokens=4), (20, 2)),
        (NumberedUsage(10, 1), (20, 2)),
        ({"prompt_tokens": 10, "completion_tokens": 1}, (20, 2)),
    ],
    ids=["stock", "subclass", "own-class", "mapping"],
)
async def test_usage_is_summed_in_the_connectors_own_type(
    ask: Ask, usage: Any, expected: tuple[int, int]
) -> None:
    """The sum over all requests is of the class in which the connector reports usage."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([ADD, say("3")], metadata={"usage": usage})
    )
    total = (await ask(service, to=question())).metadata["usage"]
    assert type(total) is type(usage)
    read = total.get if isinstance(total, dict) else lambda name: getattr(total, name)
    assert (read("prompt_tokens"), read("completion_tokens")) == expected
    assert read("cached_tokens") == 8 if isinstance(usage, OwnUsage) else True


@each_of("usage", [None, {"prompt_tokens": "many"}, "free", 7, {}], ids=repr)
async def test_missing_usage_is_accepted(ask: Ask, usage: Any) -> None:
    """A connector that reports no usage, or nonsense, costs nothing but the numbers."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([ADD, say("3")], metadata={"usage": usage})
    )
    answer = await ask(service, to=question())
    assert answer.text == "3"
    assert answer.metadata["iterations"] == 2


class ManualOnly(ScriptedChatCompletion):
    """A connector that cannot call functions."""

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = False


@pytest.mark.parametrize(
    "behavior", [AUTO(), AUTO(auto_invoke=False)], ids=["auto", "manual"]
)
async def test_a_connector_without_function_calling_is_refused_by_name(
    ask: Ask, behavior: FunctionChoiceBehavior
) -> None:
    """Offering functions to a connector that would silently ignore them is an error that names it; nothing is sent."""
    inner = scripted_by(ManualOnly, [say("I see no functions.")])
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=r"ManualOnly .*does not support function calling",
    ):
        await ask(FunctionInvokingChatCompletion(inner), behavior)
    assert inner.requests == []


async def test_a_connector_without_function_calling_may_answer(ask: Ask) -> None:
    """Without functions to offer, such a connector serves like any other."""
    service = FunctionInvokingChatCompletion(scripted_by(ManualOnly, [say("Hello.")]))
    answer = await ask(service, kernel=Kernel())
    assert answer.text == "Hello."
    assert answer.metadata["status"] == "answered"
    assert answer.metadata["limit"] is None


async def test_without_a_behaviour_a_request_passes_through(
    ask: Ask, serve: Serve, history: ChatHistory
) -> None:
    """No behaviour: one request without functions, with metadata, and the history as it was."""
    served = serve([say("Hello.")])
    answer = await ask(
        FunctionInvokingChatCompletion(served.connector),
        settings=PromptExecutionSettings(),
    )
    assert answer.text == "Hello."
    assert answer.metadata["iterations"] == 1
    assert answer.metadata["tool_calls"] == 0
    assert answer.metadata["usage"].completion_tokens == served.server.completion_tokens
    assert served.server.requests[0].tools == ()
    assert len(history.messages) == 1


@pytest.mark.parametrize(
    "manual",
    [AUTO(auto_invoke=False), BoundedFunctionChoiceBehavior.Auto(auto_invoke=False)],
    ids=["stock", "bounded"],
)
async def test_a_manual_behaviour_returns_the_calls(
    ask: Ask,
    serve: Serve,
    tools: Tools,
    history: ChatHistory,
    manual: FunctionChoiceBehavior,
) -> None:
    """``auto_invoke=False``: functions are offered, the calls come back, none runs, and the history is as it was."""
    served = serve([calls(ADD, text="Let me see.")])
    answer = await ask(FunctionInvokingChatCompletion(served.connector), manual)
    assert (answer.text, answer.calls) == ("Let me see.", [("t-add", '{"a":1,"b":2}')])
    assert answer.metadata["iterations"] == 1
    assert served.server.requests[0].tools == ("t-add", "t-echo", "t-fail", "t-hang")
    assert (tools.seen, len(history.messages)) == ([], 1)


@pytest.mark.parametrize(
    "none",
    [FunctionChoiceBehavior.NoneInvoke(), BoundedFunctionChoiceBehavior.NoneInvoke()],
    ids=["stock", "bounded"],
)
async def test_functions_may_be_shown_without_being_called(
    ask: Ask, serve: Serve, none: FunctionChoiceBehavior
) -> None:
    """``NoneInvoke`` sends the functions with tool choice none, and does not count as a limit."""
    served = serve([say("I would add.")])
    answer = await ask(FunctionInvokingChatCompletion(served.connector), none)
    assert (answer.text, answer.metadata.get("limit")) == ("I would add.", None)
    assert (
        served.server.requests[0].tool_choice,
        served.server.requests[0].tools[0],
    ) == ("none", "t-add")


class Choosy(ScriptedChatCompletion):
    """A connector that answers with as many choices as were asked for."""

    async def _inner_get_chat_message_contents(
        self, chat_history: ChatHistory, settings: Any
    ) -> Any:
        (first,) = await super()._inner_get_chat_message_contents(
            chat_history, settings
        )
        return [
            ChatMessageContent(
                role=AuthorRole.ASSISTANT,
                items=[TextContent(text=f"{first.content} {n}")],
                metadata={"n": n},
            )
            for n in range(settings.number_of_responses or 1)
        ]


@pytest.mark.parametrize(
    "behavior", [None, AUTO()], ids=["no behaviour", "no functions"]
)
async def test_several_answers_without_functions_are_all_returned(
    history: ChatHistory, behavior: FunctionChoiceBehavior | None
) -> None:
    """Where no function is offered, several choices may be asked for: each comes back by itself, none is merged."""
    service = FunctionInvokingChatCompletion(scripted_by(Choosy, [say("Answer")]))
    settings = PromptExecutionSettings(
        number_of_responses=2, function_choice_behavior=behavior
    )
    messages = await service.get_chat_message_contents(
        history, settings, kernel=Kernel()
    )
    assert [message.content for message in messages] == ["Answer 0", "Answer 1"]
    assert [message.metadata["iterations"] for message in messages] == [1, 1]


async def test_several_answers_with_functions_are_refused_by_name(
    ask: Ask, serve: Serve
) -> None:
    """``number_of_responses`` 2 beside functions is refused, naming field and way out; nothing is sent."""
    served = serve([say("Never sent.")])
    settings = OpenAIChatPromptExecutionSettings(
        number_of_responses=2, function_choice_behavior=AUTO()
    )
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=r"number_of_responses must be 1 .*; got 2",
    ):
        await ask(FunctionInvokingChatCompletion(served.connector), settings=settings)
    assert served.server.requests == []


async def test_a_behaviour_without_a_kernel_is_refused(ask: Ask) -> None:
    """Functions need a kernel: without one the error says so, and nothing is sent."""
    inner = ScriptedChatCompletion([say("Never sent.")])
    with pytest.raises(PlannerInvalidConfigurationError, match="kernel= is needed"):
        await ask(FunctionInvokingChatCompletion(inner), kernel=None)
    assert inner.requests == []


async def test_several_messages_of_one_reply_are_one_batch(
    tools: Tools, history: ChatHistory
) -> None:
    """A connector that answers with several messages made one ordered batch of calls."""

    class Several(ScriptedChatCompletion):
        async def _inner_get_chat_message_contents(
            self, chat_history: ChatHistory, settings: Any
        ) -> Any:
            messages = await super()._inner_get_chat_message_contents(
                chat_history, settings
            )
            if len(self.requests) == 1:
                messages += await super()._inner_get_chat_message_contents(
                    chat_history, settings
                )
            return messages

    inner = scripted_by(
        Several,
        [
            call("t-echo", {"text": "a"}, id="same"),
            call("t-echo", {"text": "b"}, id="same"),
            say("Done."),
        ],
    )
    settings = PromptExecutionSettings(function_choice_behavior=AUTO())
    answer = await asked(
        FunctionInvokingChatCompletion(inner),
        history,
        tools.kernel(),
        settings,
        streamed=False,
    )
    assert (answer.text, answer.metadata["tool_calls"]) == ("Done.", 2)
    assert [message.role for message in history.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    assert [first_result(message).result for message in history.messages[2:]] == [
        "a",
        "b",
    ]
    assert len({item.id for item in every_call(history.messages[1])}) == 2


@each_of(
    ("option", "value"),
    [
        ("budget", {"max_iterations": 3}),
        ("execution", "fast"),
        ("min_iteration_time_ms", -1),
        ("min_iteration_time_ms", True),
        ("on_invalid_history", "ignore"),
        ("observers", print),
    ],
)
def test_an_option_that_means_nothing_is_refused_by_name(
    option: str, value: Any
) -> None:
    """The error names the option and shows what was seen."""
    with pytest.raises(
        PlannerInvalidConfigurationError, match=rf"{option} must be .*; got "
    ):
        FunctionInvokingChatCompletion(ScriptedChatCompletion([]), **{option: value})


def test_only_a_chat_completion_service_can_be_wrapped() -> None:
    """Something else as ``inner`` is refused by name."""
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match="inner must be a chat completion service",
    ):
        FunctionInvokingChatCompletion("gpt-4o")  # pyright: ignore[reportArgumentType]  # junk, on purpose


def test_the_wrapper_looks_like_the_connector(serve: Serve) -> None:
    """Model id, service id, settings class and URL are those of the connector; a service id of its own may be given."""
    inner = serve([]).connector
    service = FunctionInvokingChatCompletion(inner)
    assert service.ai_model_id == inner.ai_model_id
    assert service.service_id == inner.service_id
    assert service.service_url() == inner.service_url()
    assert (
        service.get_prompt_execution_settings_class()
        is OpenAIChatPromptExecutionSettings
    )
    assert (
        FunctionInvokingChatCompletion(inner, service_id="bounded").service_id
        == "bounded"
    )


async def test_a_wrapped_wrapper_counts_once(
    ask: Ask, serve: Serve, tools: Tools
) -> None:
    """Of two wrappers around each other only the outer one loops: calls run once and requests are charged once."""
    served = serve([ADD, say("Three.")])
    answer = await ask(
        FunctionInvokingChatCompletion(FunctionInvokingChatCompletion(served.connector))
    )
    assert answer.text == "Three."
    assert answer.metadata["iterations"] == 2
    assert answer.metadata["tool_calls"] == 1
    assert tools.seen == [(1, 2)]
    assert answer.metadata["usage"].prompt_tokens == served.server.prompt_tokens


async def test_what_guards_a_wrapped_wrapper_still_guards(
    ask: Ask, tools: Tools
) -> None:
    """Wrapping a service once more loosens nothing: its interceptors are asked, and its budget holds."""

    async def never(tool: Any) -> Deny:
        return Deny("Not here.")

    connector = ScriptedChatCompletion(
        lambda request: ADD if request.tools else say("Enough.")
    )
    inner = FunctionInvokingChatCompletion(
        connector, interceptors=[never], budget=Budget(max_iterations=2)
    )
    answer = await ask(FunctionInvokingChatCompletion(inner))
    assert tools.seen == []
    assert answer.metadata["iterations"] == 2
    assert answer.metadata["limit"] == "max_iterations"


async def test_strict_finish_reasons_are_checked(ask: Ask) -> None:
    """With ``strict_finish_reason`` a reason that contradicts the reply is an error; without, content decides."""
    odd = ScriptedReply(calls=ADD.calls, finish_reason="stop")
    assert (
        await ask(
            FunctionInvokingChatCompletion(ScriptedChatCompletion([odd, say("3")]))
        )
    ).text == "3"
    strict = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([odd]), strict_finish_reason=True
    )
    with pytest.raises(
        InvalidReplyError,
        match=r"Expected finish_reason tool_calls .* got 'stop' with 1",
    ):
        await ask(strict)


async def test_functions_known_by_schema_only_go_back_to_the_caller(
    ask: Ask, tools: Tools, history: ChatHistory
) -> None:
    """A tool of the caller's own is offered beside the kernel's, and a call to it is returned, not run."""
    schema = {
        "type": "function",
        "function": {"name": "mine-open", "parameters": {"type": "object"}},
    }
    inner = ScriptedChatCompletion([call("mine-open", {"x": 1})])
    settings = PromptExecutionSettings(
        tools=[schema], tool_choice="auto", function_choice_behavior=AUTO()
    )
    answer = await ask(FunctionInvokingChatCompletion(inner), settings=settings)
    assert answer.calls == [("mine-open", '{"x":1}')]
    assert "mine-open" in inner.requests[0].tools
    assert len(history.messages) == 1


class Extra:
    @kernel_function
    async def late(self) -> str:
        return "here now"


async def test_a_function_that_a_call_adds_is_offered_next(ask: Ask) -> None:
    """Functions are read from the kernel for each request, so one that loads a plugin makes it usable at once."""
    kernel = Kernel()

    class Loader:
        @kernel_function
        async def load(self) -> str:
            kernel.add_plugin(Extra(), "extra")
            return "loaded"

    kernel.add_plugin(Loader(), "l")
    inner = ScriptedChatCompletion([call("l-load"), call("extra-late"), say("Done.")])
    answer = await ask(FunctionInvokingChatCompletion(inner), kernel=kernel)
    assert [request.tools for request in inner.requests] == [
        ("l-load",),
        *[("l-load", "extra-late")] * 2,
    ]
    assert inner.requests[2].messages[-1]["content"] == "here now"
    assert answer.metadata["tool_calls"] == 2
