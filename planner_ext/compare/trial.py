"""``run_comparison``: runs every option in every scenario in turn, and counts independently of the option.

The endpoint counts requests to a scripted model, the connector counts those to a real one, the kernel counts functions.
"""

import json
import platform
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from typing import Any, ClassVar, TypeAlias, TypeVar

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.function_call_choice_configuration import FunctionCallChoiceConfiguration
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent, StreamingChatMessageContent
from semantic_kernel.filters import FunctionInvocationContext
from semantic_kernel.functions import KernelArguments, KernelPlugin

from planner_ext.compare.report import Comparison, Run, ScriptInfo, find_violations, shown_messages
from planner_ext.compare.scenarios import SCRIPTS, OrderDeskPlugin, Scenario
from planner_ext.compare.strategies import OPTIONS, Option, Trial
from planner_ext.core.limits import Budget
from planner_ext.service import FunctionInvokingChatCompletion
from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.sk.messages import read_usage
from planner_ext.sk.transport import kernel_with_service, select_service
from planner_ext.testing import Script, ScriptedOpenAIServer, say
from planner_ext.testing.rules import find_violation
from planner_ext.testing.server import HttpResponse

__all__ = ["Live", "Progress", "run_comparison"]

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called before each run with the number of runs done, the number of all, and the name of the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A real model instead of the scripted one. Functions really run, once for each option.

    Attributes:
        kernel: The user's own, with its service; None uses the scripts' functions, and requires ``service``.
        service: The connector; None uses the one that the kernel selects.
        goal: The goal, given to each option once; None uses the goals of the scripts.
    """

    kernel: Kernel | None = None
    service: ChatCompletionClientBase | None = None
    goal: str | None = None


async def run_comparison(
    *,
    max_iterations: int = 5,
    options: Sequence[str] = (),
    scripts: Sequence[str] = (),
    live: Live | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the options.

    Args:
        max_iterations: Round trips allowed per run, 1 or more.
        options: Keys of the options to compare; the default is all.
        scripts: Keys of the scenarios; the default is all.
        live: A real model; None uses a scripted one, behind real HTTP on this machine.
        progress: Called before each run.

    Raises:
        PlannerInvalidConfigurationError: If there is no such option or script, ``max_iterations`` is not 1 or more, the
            kernel has no service, or a real model does not answer the first request.
    """
    Budget(max_iterations=max_iterations)
    chosen, scenarios = _chosen("option", options, OPTIONS), _scenarios(scripts, live)
    runs: list[Run] = []
    began = time.perf_counter()
    async with AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0) as client:
        backend = _Backend(live, client)
        for scenario, option in product(scenarios, chosen):
            if progress is not None:
                progress(len(runs), len(scenarios) * len(chosen), f"{scenario.info.name}: {option.info.name}")
            runs.append(await _run(backend, option, scenario, max_iterations))
            if live is not None and (first := runs[0]).status == "failed" and first.trips == 0:
                # Every later run would meet the same fault.
                problem = f"{backend.name} did not answer the first request: {first.error}"
                raise PlannerInvalidConfigurationError(problem)
    packages = [(name, version(name)) for name in ("semantic-kernel", "openai")]
    return Comparison(
        max_iterations=max_iterations,
        endpoint=backend.name,
        live=live is not None,
        versions=(*packages, ("python", platform.python_version())),
        options=tuple(option.info for option in chosen),
        scripts=tuple(scenario.info for scenario in scenarios),
        runs=tuple(runs),
        wall_seconds=time.perf_counter() - began,
    )


def _scenarios(scripts: Sequence[str], live: Live | None) -> Sequence[Scenario]:
    if live is None or live.goal is None:
        return _chosen("script", scripts, SCRIPTS)
    if scripts:
        raise PlannerInvalidConfigurationError(f"A goal takes the place of the scripts; got both, {scripts[0]!r}.")
    about = "A real model, and functions that are really run."
    info = ScriptInfo(key="goal", name="your goal", short="your\ngoal", about=about, goal=live.goal)
    return (Scenario(info=info, model=lambda _: say("")),)


_Known = TypeVar("_Known")


def _chosen(kind: str, keys: Sequence[str], known: Mapping[str, _Known]) -> Sequence[_Known]:
    for key in keys:
        if key not in known:
            raise PlannerInvalidConfigurationError(f"There is no {kind} {key!r}; there are {', '.join(known)}.")
    return tuple(item for key, item in known.items() if not keys or key in keys)


async def _run(backend: "_Backend", option: Option, scenario: Scenario, budget: int) -> Run:
    counters = _Counters(budget)
    with backend.connected(scenario, counters) as service:
        kernel = kernel_with_service(backend.kernel, service)
        # Semantic Kernel keeps the innermost filter first.
        kernel.function_invocation_filters.insert(0, (id(counters), counters.count_function))  # pyright: ignore[reportUnknownMemberType]
        trial = _trial(kernel, service, scenario, budget)
        error = ""
        began = time.perf_counter()
        try:
            await option.strategy(trial)
        except Exception as raised:  # any fault that an endpoint causes is a finding about the option
            trial.status, trial.answer, error = "failed", "", _cause(raised)
        seconds = time.perf_counter() - began
    messages = shown_messages(trial.history.messages)
    replies = [message for message in trial.history.messages if message.role == AuthorRole.ASSISTANT]
    usage = trial.usage or read_usage(replies[-1].metadata.get("usage") if replies else None)
    return Run(
        option=option.info.key,
        script=scenario.info.key,
        budget=budget,
        trips=len(counters.tokens),
        charged=trial.charged,
        tools_run=counters.functions,
        tools_past_budget=counters.functions_past_budget,
        tokens_summed=sum(counters.tokens),
        tokens_past_budget=sum(counters.tokens[budget:]),
        tokens_told=usage.total_tokens or None,
        status=trial.status,
        answer=trial.answer,
        error=error,
        refused=tuple(counters.refused),
        violations=find_violations(messages),
        wall_seconds=seconds,
        messages=messages,
    )


def _cause(error: BaseException) -> str:
    """Describe the root cause of an error: the client's own, before it was wrapped."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _trial(kernel: Kernel, service: ChatCompletionClientBase, scenario: Scenario, budget: int) -> Trial:
    selected, settings = select_service(kernel, service.service_id, KernelArguments())
    if selected is not service:
        raise PlannerInvalidConfigurationError(
            f"The kernel's own service selector takes {selected.service_id!r} whatever it is asked for; expected "
            f"{service.service_id!r}. Compare with a kernel whose selector takes the service that it is asked for."
        )
    settings = service.get_prompt_execution_settings_from_settings(settings)
    return Trial(kernel=kernel, service=service, settings=settings, scenario=scenario, max_iterations=budget)


_inside_function: ContextVar[bool] = ContextVar("inside_function", default=False)


@dataclass(slots=True)
class _Counters:
    """What one run really does.

    Attributes:
        budget: Round trips allowed.
        tokens: The tokens of each answered request.
        refused: Why OpenAI would refuse requests.
        functions: Functions started that the model calls, without those that a function calls in turn.
        functions_past_budget: The number of them that started when no round trip was left.
    """

    budget: int
    tokens: list[int] = field(default_factory=list[int])
    refused: list[str] = field(default_factory=list[str])
    functions: int = 0
    functions_past_budget: int = 0

    async def count_function(
        self, context: FunctionInvocationContext, next: Callable[[FunctionInvocationContext], Awaitable[None]]
    ) -> None:
        """Count a function that is about to start; a function invocation filter of Semantic Kernel."""
        if not _inside_function.get():
            self.functions += 1
            self.functions_past_budget += len(self.tokens) >= self.budget
        token = _inside_function.set(True)
        try:
            await next(context)
        finally:
            _inside_function.reset(token)


class _Backend:
    """Answers the requests of the runs: a real connector or, without `Live`, a scripted server for each run.

    The server counts the requests that it gets; at a real connector, `_CountingChatCompletion` counts them.

    Args:
        live: The real model.
        client: Points at each scripted server in turn.
    """

    def __init__(self, live: Live | None, client: AsyncOpenAI) -> None:
        own = live.kernel if live is not None else None
        self.kernel = own or Kernel(plugins={"desk": KernelPlugin.from_object("desk", OrderDeskPlugin())})
        self.name = "a scripted model behind real HTTP on this machine"
        self._client = client
        self._service: ChatCompletionClientBase | None = None
        if live is not None:
            service = live.service or select_service(self.kernel, None, KernelArguments())[0]
            while isinstance(service, FunctionInvokingChatCompletion):
                service = service.inner  # loops are compared, so a service with its own loop is unwrapped
            self.name = f"{service.ai_model_id} at {service.service_url() or type(service).__name__}"
            self._service = service

    @contextmanager
    def connected(self, scenario: Scenario, counters: _Counters) -> Generator[ChatCompletionClientBase]:
        """Yield the connector of one run."""
        inner, server = self._service, _ForgivingServer(scenario.model, counters)
        with server if inner is None else nullcontext():
            if inner is None:
                client = self._client.with_options(base_url=server.url)
                inner = OpenAIChatCompletion(ai_model_id="scripted", service_id="scripted", async_client=client)
            yield _CountingChatCompletion(
                ai_model_id=inner.ai_model_id,
                service_id=inner.service_id,
                instruction_role=inner.instruction_role,
                inner=inner,
                counters=counters if self._service is not None else None,
                reports=scenario.reports,
            )


class _ForgivingServer(ScriptedOpenAIServer):
    """A scripted OpenAI server that lists in ``refused`` the requests that OpenAI would refuse, and answers them.

    Several OpenAI-compatible endpoints answer a history whose calls have no results. With one of them an option
    continues and spends, while OpenAI would end it with an error. The comparison shows both. Only that fault is
    accepted; a request that breaks another rule is refused.
    """

    def __init__(self, script: Script, counters: _Counters) -> None:
        super().__init__(script)
        self._refused, self._counters = counters.refused, counters

    def _complete(self, raw: bytes) -> HttpResponse:
        body, before = json.loads(raw), self.total_tokens
        if (violation := find_violation(body)) is not None:
            body = {**body, "messages": list(_with_results(body["messages"]))}
            if find_violation(body) is None:
                self._refused.append(violation.message)
        response = super()._complete(json.dumps(body).encode())
        if spent := self.total_tokens - before:
            self._counters.tokens.append(spent)
        return response


def _with_results(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Insert a result after each call that has none; the ids of a script's calls are unique."""
    answered = {message.get("tool_call_id") for message in messages}
    for message in messages:
        yield message
        for call in message.get("tool_calls") or ():
            if call["id"] not in answered:
                yield {"role": "tool", "tool_call_id": call["id"], "content": "(no result)"}


class _CountingChatCompletion(ChatCompletionClientBase):
    """A connector that counts its round trips, those of Semantic Kernel's own loop included, and delegates the rest.

    It overrides what every connector overrides: the one request at the bottom of Semantic Kernel's loop.

    Attributes:
        inner: The connector that makes the requests.
        counters: Gets the tokens of each request; None does not count.
        reports: Whether replies keep their metadata.
    """

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True

    inner: ChatCompletionClientBase
    counters: _Counters | None
    reports: bool

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        """Return the inner connector's settings class."""
        return self.inner.get_prompt_execution_settings_class()

    def service_url(self) -> str | None:
        """Return the inner connector's URL."""
        return self.inner.service_url()

    async def _inner_get_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings
    ) -> list[ChatMessageContent]:
        messages = await self.inner._inner_get_chat_message_contents(chat_history, settings)
        self._count(self._taken_metadata(messages))
        return messages

    async def _inner_get_streaming_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings, function_invoke_attempt: int = 0
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        reported: dict[str, Any] = {}
        stream = self.inner._inner_get_streaming_chat_message_contents(chat_history, settings, function_invoke_attempt)
        async for chunks in stream:
            reported |= self._taken_metadata(chunks)
            yield chunks
        self._count(reported)

    def _verify_function_choice_settings(self, settings: PromptExecutionSettings) -> None:
        self.inner._verify_function_choice_settings(settings)

    def _update_function_choice_settings_callback(
        self,
    ) -> Callable[[FunctionCallChoiceConfiguration, PromptExecutionSettings, FunctionChoiceType], None]:
        return self.inner._update_function_choice_settings_callback()

    def _reset_function_choice_settings(self, settings: PromptExecutionSettings) -> None:
        self.inner._reset_function_choice_settings(settings)

    def _count(self, metadata: Mapping[str, Any]) -> None:
        if self.counters is not None:
            self.counters.tokens.append(read_usage(metadata.get("usage")).total_tokens)

    def _taken_metadata(self, messages: Iterable[ChatMessageContent]) -> dict[str, Any]:
        """Merge the metadata of a reply, and remove them from it if they are not to be reported."""
        taken: dict[str, Any] = {}
        for message in messages:
            taken |= {key: value for key, value in message.metadata.items() if value is not None}
            message.metadata = message.metadata if self.reports else {}
        return taken
