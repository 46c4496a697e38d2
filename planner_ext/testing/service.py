"""A chat completion connector whose model is a script: no network, no waiting.

To Semantic Kernel it behaves like ``OpenAIChatCompletion``: settings protocol, items,
metadata keys and chunks.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast

from pydantic import PrivateAttr
from semantic_kernel.connectors.ai import CompletionUsage, PromptExecutionSettings
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_call_choice_configuration import (
    FunctionCallChoiceConfiguration,
)
from semantic_kernel.connectors.ai.function_calling_utils import (
    update_settings_from_function_call_configuration,
)
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FinishReason,
    FunctionCallContent,
    StreamingChatMessageContent,
    StreamingTextContent,
    TextContent,
)
from semantic_kernel.exceptions import ServiceInvalidExecutionSettingsError

from planner_ext.testing.script import (
    Script,
    ScriptedFault,
    ScriptedReply,
    ScriptedRequest,
    ScriptReader,
    count_tokens,
    deltas,
    reply_metadata,
)

_Message = TypeVar("_Message", ChatMessageContent, StreamingChatMessageContent)


class ScriptedPromptExecutionSettings(PromptExecutionSettings):
    """OpenAI's settings that an agent loop sets; they do not affect the replies.

    Attributes:
        tools: The functions offered, as OpenAI's JSON; set by the function choice
            behavior.
        tool_choice: ``"auto"``, ``"required"`` or ``"none"``; set by the function
            choice behavior.
        number_of_responses: With a function choice behavior, more than 1 is refused as
            by the OpenAI connector; a reply has one choice.
        response_format: Accepted.
        temperature: Accepted.
    """

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    number_of_responses: int | None = None
    response_format: Any | None = None
    temperature: float | None = None


class ScriptedChatCompletion(ChatCompletionClientBase):
    """A chat completion service that answers from a script, plain or streamed.

    Use it in one event loop. A request is recorded, waits for ``before_reply``, then
    takes the next item; cancelled while it waits, it takes none.

    Args:
        script: A list of replies and exceptions (raised), or a function of the request.
        ai_model_id: The model's name in every message.
        service_id: The id by which a kernel finds the service.
        chunk_size: Characters per streamed piece of text or arguments, at least 1.
        metadata: Merged over every reply's metadata (a stream's last chunk's); a
            function of the request gives each reply its own.
        before_reply: Awaited with each request; a test blocks, cancels or raises in it.

    Raises:
        TypeError: If ``script`` is not a script.
        ValueError: If ``chunk_size`` is less than 1.
    """

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True

    _reader: ScriptReader = PrivateAttr()
    _metadata: (
        Mapping[str, object] | Callable[[ScriptedRequest], Mapping[str, object]]
    ) = PrivateAttr()
    _before_reply: Callable[[ScriptedRequest], Awaitable[None]] | None = PrivateAttr()
    _requests: list[ScriptedRequest] = PrivateAttr(
        default_factory=list[ScriptedRequest]
    )

    def __init__(
        self,
        script: Script,
        *,
        ai_model_id: str = "scripted",
        service_id: str = "scripted",
        chunk_size: int = 8,
        metadata: Mapping[str, object]
        | Callable[[ScriptedRequest], Mapping[str, object]]
        | None = None,
        before_reply: Callable[[ScriptedRequest], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(ai_model_id=ai_model_id, service_id=service_id)
        self._reader = ScriptReader(script, chunk_size)
        self._metadata = metadata or {}
        self._before_reply = before_reply

    @property
    def requests(self) -> list[ScriptedRequest]:
        """Every request made, in order, the unanswered ones included."""
        return self._requests

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        """Return ``ScriptedPromptExecutionSettings``."""
        return ScriptedPromptExecutionSettings

    async def _inner_get_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings
    ) -> list[ChatMessageContent]:
        reply, _, metadata = await self._answer(chat_history, settings, stream=False)
        # The OpenAI connector, too, puts the calls first.
        items: list[Any] = [
            FunctionCallContent(
                id=item.id, name=item.name, arguments=item.arguments_text
            )
            for item in reply.calls
        ]
        if text := reply.text or reply.refusal:
            items.append(TextContent(text=text))
        metadata = {"logprobs": None, **metadata}
        own = _response("message", reply.refusal)
        return [
            self._message(
                ChatMessageContent,
                reply.ended_by,
                items=items,
                metadata=metadata,
                inner_content=own,
            )
        ]

    async def _inner_get_streaming_chat_message_contents(
        self,
        chat_history: ChatHistory,
        settings: PromptExecutionSettings,
        function_invoke_attempt: int = 0,
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        reply, base, metadata = await self._answer(chat_history, settings, stream=True)
        base = {"logprobs": None, **base}
        place = {"choice_index": 0, "function_invoke_attempt": function_invoke_attempt}
        chunk_size = self._reader.chunk_size
        for delta, finish_reason in deltas(reply, chunk_size=chunk_size):
            items: list[Any] = [
                FunctionCallContent(
                    id=call.get("id"), index=call["index"], **call["function"]
                )
                for call in delta.get("tool_calls", ())
            ]
            text = delta.get("content")
            if text is not None:
                items.append(StreamingTextContent(choice_index=0, text=text))
            response = _response("delta", delta.get("refusal"))
            own = {**place, "inner_content": response}
            yield [
                self._message(
                    StreamingChatMessageContent,
                    finish_reason,
                    items=items,
                    metadata=base,
                    **own,
                )
            ]
        yield [
            self._message(
                StreamingChatMessageContent, None, items=[], metadata=metadata, **place
            )
        ]

    def _message(
        self, kind: type[_Message], finish_reason: str | None, **fields: Any
    ) -> _Message:
        reason = FinishReason(finish_reason) if finish_reason else None
        return kind(
            role=AuthorRole.ASSISTANT,
            ai_model_id=self.ai_model_id,
            finish_reason=reason,
            **fields,
        )

    def _verify_function_choice_settings(
        self, settings: PromptExecutionSettings
    ) -> None:
        if (self._scripted(settings).number_of_responses or 1) > 1:
            problem = "Functions may only be invoked with number_of_responses 1, as with the OpenAI connector."
            raise ServiceInvalidExecutionSettingsError(problem)

    def _update_function_choice_settings_callback(
        self,
    ) -> Callable[
        [FunctionCallChoiceConfiguration, PromptExecutionSettings, FunctionChoiceType],
        None,
    ]:
        return update_settings_from_function_call_configuration

    def _reset_function_choice_settings(
        self, settings: PromptExecutionSettings
    ) -> None:
        scripted = self._scripted(settings)
        scripted.tool_choice = scripted.tools = None

    def _scripted(
        self, settings: PromptExecutionSettings
    ) -> ScriptedPromptExecutionSettings:
        return cast(
            "ScriptedPromptExecutionSettings",
            self.get_prompt_execution_settings_from_settings(settings),
        )

    async def _answer(
        self, history: ChatHistory, settings: PromptExecutionSettings, *, stream: bool
    ) -> tuple[ScriptedReply, dict[str, Any], dict[str, Any]]:
        scripted = self._scripted(settings)
        request = ScriptedRequest(
            index=len(self._requests),
            messages=[message.to_dict() for message in history.messages],
            tools=tuple(tool["function"]["name"] for tool in scripted.tools or ()),
            tool_choice=scripted.tool_choice,
            stream=stream,
            history=list(history.messages),
        )
        self._requests.append(request)
        if self._before_reply is not None:
            await self._before_reply(request)
        answer = self._reader.answer(request)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, ScriptedFault):
            raise TypeError(
                f"Request {request.index} met {answer!r}, which only ScriptedOpenAIServer can send; "
                "put the exception into the script that the connector would raise."
            )
        tokens = count_tokens(answer, messages=request.messages, tools=scripted.tools)
        usage = CompletionUsage(
            prompt_tokens=tokens.prompt_tokens,
            completion_tokens=tokens.completion_tokens,
        )
        base = {**reply_metadata(request.index), "usage": None}
        own = self._metadata
        added = own(request) if callable(own) else own
        return answer, base, {**base, "usage": usage, **added}


def _response(part: str, refusal: str | None) -> dict[str, Any] | None:
    if refusal:
        return {"choices": [{"index": 0, part: {"refusal": refusal}}]}
    return None
