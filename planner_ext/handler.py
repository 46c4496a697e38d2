"""``ToolCallHandler``: manual tool calling with an interception point, usable without the planner."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from copy import copy
from typing import Any, Unpack

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.contents import (
    ChatHistory,
    ChatMessageContent,
    StreamingChatMessageContent,
)
from semantic_kernel.functions import KernelArguments

from planner_ext import hitl_manager
from planner_ext.approval.decisions import Decision, ToolCall
from planner_ext.core.limits import Budget
from planner_ext.engine.concurrency import StopHandle, streams
from planner_ext.service import FunctionInvokingChatCompletion
from planner_ext.sk.chat.transport import select_service
from planner_ext.sk.checkpoint import Checkpoint
from planner_ext.sk.run.behavior import BoundedFunctionChoiceBehavior
from planner_ext.sk.run.options import RunOptions, takes_run_options
from planner_ext.sk.run.resume import Late

__all__ = ["ToolCallHandler"]


class ToolCallHandler:
    """Answers a history, and shows every function call to an interception point before it runs.

    The history gets every message. The last one that is yielded has the metadata of
    `FunctionInvokingChatCompletion`.
    """

    @takes_run_options
    def __init__(
        self,
        kernel: Kernel,
        *,
        arguments: KernelArguments | None = None,
        settings: PromptExecutionSettings | None = None,
        service_id: str | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        """Bind the handler to a kernel.

        Args:
            kernel: Its functions may be called.
            arguments: The application's arguments, for functions and service selection.
            settings: Of every request; None uses those of the arguments, or the
                service's defaults. Their function choice behaviour selects the
                functions that are offered; without one, all are.
            service_id: The service to use; None uses the kernel's selection.
            **options: See `planner_ext.iteration.RunOptions`; the budget is that of one
                invocation. Without ``check_for_intervention``,
                `planner_ext.hitl_manager.check_for_intervention` is looked up at each
                call.

        Raises:
            PlannerInvalidConfigurationError: If there is no such service, or an option
                cannot be used.
        """
        self._kernel = kernel
        self._arguments = KernelArguments() if arguments is None else copy(arguments)
        service, chosen = select_service(kernel, service_id, self._arguments, settings)
        self._settings = chosen.model_copy()
        if self._settings.function_choice_behavior is None:
            self._settings.function_choice_behavior = (
                BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=None)
            )
        options["check_for_intervention"] = (
            options.get("check_for_intervention") or _current_check
        )
        self._service = FunctionInvokingChatCompletion(service, **options)

    @streams
    async def invoke(
        self, history: ChatHistory, *, stop: StopHandle | None = None
    ) -> AsyncGenerator[ChatMessageContent]:
        """Answer a history, which gets every message of the run.

        Yields:
            The final message.
        """
        messages = await self._service.get_chat_message_contents(
            history, self._settings, **self._request(stop)
        )
        for message in messages:
            yield message

    @streams
    async def invoke_stream(
        self, history: ChatHistory, *, stop: StopHandle | None = None
    ) -> AsyncGenerator[StreamingChatMessageContent]:
        """Answer a history as a stream; the last chunk carries the final message's metadata.

        Closing the stream early cancels the run.
        """
        request = self._request(stop)
        async with aclosing(
            self._service.get_streaming_chat_message_contents(
                history, self._settings, **request
            )
        ) as groups:
            async for group in groups:
                for chunk in group:
                    yield chunk

    @streams
    async def resume(
        self,
        history: ChatHistory,
        checkpoint: Checkpoint | str,
        decisions: Mapping[str, Decision],
        *,
        budget: Budget | None = None,
        stop: StopHandle | None = None,
        late: Late = "refuse",
    ) -> AsyncGenerator[ChatMessageContent]:
        """Resume a paused run, once per decision; see `FunctionInvokingChatCompletion.resume`.

        Yields:
            The final message.
        """
        message = await self._service.resume(
            history,
            checkpoint,
            decisions,
            self._settings,
            budget=budget,
            late=late,
            **self._request(stop),
        )
        yield message

    @streams
    async def resume_stream(
        self,
        history: ChatHistory,
        checkpoint: Checkpoint | str,
        decisions: Mapping[str, Decision],
        *,
        budget: Budget | None = None,
        stop: StopHandle | None = None,
        late: Late = "refuse",
    ) -> AsyncGenerator[StreamingChatMessageContent]:
        """Resume as `resume` does, as a stream."""
        request = self._request(stop)
        async with aclosing(
            self._service.resume_streaming(
                history,
                checkpoint,
                decisions,
                self._settings,
                budget=budget,
                late=late,
                **request,
            )
        ) as chunks:
            async for chunk in chunks:
                yield chunk

    def _request(self, stop: StopHandle | None) -> dict[str, Any]:
        return {
            "kernel": self._kernel,
            "arguments": copy(self._arguments),
            "stop": stop,
            "store_final": True,
        }


def _current_check(call: ToolCall) -> Any:
    """Ask the module's current hook, which an application may have replaced."""
    return hitl_manager.check_for_intervention(call)
