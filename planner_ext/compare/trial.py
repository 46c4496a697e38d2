"""``run_comparison``: runs every option in every scenario in turn, and counts independently of the option.

The endpoint counts requests to a scripted model, the connector counts those to a real one, the kernel counts functions.
"""

import json
import platform
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.function_call_choice_configuration import FunctionCallChoiceConfiguration
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent, StreamingChatMessageContent
from semantic_kernel.filters import FunctionInvocationContext
from semantic_kernel.functions import KernelArguments, KernelPlugin

from planner_ext.compare.history import find_violations, shown_messages
from planner_ext.compare.report import Comparison, Run, ScriptInfo
from planner_ext.compare.scenarios import SCRIPTS, OrderDeskPlugin, Scenario
from planner_ext.compare.strategies import OPTIONS, Option, Trial
from planner_ext.core.limits import Budget
from planner_ext.core.values import Usage
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
        backend = _backend(live, client)
        for scenario, option in product(scenarios, chosen):
            if progress is not None:
                progress(len(runs), len(scenarios) * len(chosen), f"{scenario.info.name}: {option.info.name}")
            runs.append(await _run(backend, option, scenario, max_iterations))
            if live is not None and (first := runs[0]).status == "failed" and first.trips == 0:
                # Every later run would meet the same fault.
                raise PlannerInvalidConfigurationError(
                    f"{backend.name} did not answer the first request: {first.error}"
                )
    return Comparison(
        max_iterations=max_iterations,
        endpoint=backend.name,
        live=live is not None,
        versions=(
            *((name, version(name)) for name in ("semantic-kernel", "openai")),
            ("python", platform.python_version()),
        ),
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
    requests = _Requests()
    functions = _FunctionCounter(requests, budget)
    with backend.connected(scenario, requests) as service:
        kernel = kernel_with_service(backend.kernel, service)
        # Semantic Kernel keeps the innermost filter first.
        kernel.function_invocation_filters.insert(0, (id(functions), functions))  # pyright: ignore[reportUnknownMemberType]
        trial = _trial(kernel, service, scenario, budget)
        error = ""
        began = time.perf_counter()
        try:
            await option.strategy(trial)
        except Exception as raised:  # any fault that an endpoint causes is a finding about the option
            trial.status, trial.answer, error = "failed", "", _cause(raised)
        seconds = time.perf_counter() - began
    messages = shown_messages(trial.history.messages)
    return Run(
        option=option.info.key,
        script=scenario.info.key,
        budget=budget,
        trips=len(requests.tokens),
        charged=trial.charged,
        tools_run=functions.started,
        tools_past_budget=functions.past_budget,
        tokens_summed=sum(requests.tokens),
        tokens_past_budget=sum(requests.tokens[budget:]),
        tokens_told=(trial.usage or _last_usage(trial.history)).total_tokens or None,
        status=trial.status,
        answer=trial.answer,
        error=error,
        refused=tuple(requests.refused),
        violations=find_violations(messages),
        wall_seconds=seconds,
        messages=messages,
    )


def _cause(error: BaseException) -> str:
    """Describe the root cause of an error: the client's own, before it was wrapped."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _last_usage(history: ChatHistory) -> Usage:
    replies = [message for message in history.messages if message.role == AuthorRole.ASSISTANT]
    return read_usage(replies[-1].metadata.get("usage")) if replies else Usage()


def _trial(kernel: Kernel, service: ChatCompletionClientBase, scenario: Scenario, budget: int) -> Trial:
    selected, settings = select_service(kernel, service.service_id, KernelArguments())
    if selected is not service:
        raise PlannerInvalidConfigurationError(
            f"The kernel's own service selector takes {selected.service_id!r} whatever it is asked for; expected "
            f"{service.service_id!r}. Compare with a kernel whose selector takes the service that it is asked for."
        )
    settings = service.get_prompt_execution_settings_from_settings(settings)
    return Trial(kernel=kernel, service=service, settings=settings, scenario=scenario, max_iterations=budget)


@dataclass(slots=True)
class _Requests:
    """The requests of one run: the tokens of each answered one, and why OpenAI would refuse others."""

    tokens: list[int] = field(default_factory=list[int])
    refused: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class _Backend:
    """Answers the requests of the runs.

    Attributes:
        name: A description of the endpoint.
        kernel: Holds the functions; copied for each run.
        service: A real connector, at which round trips are counted. None starts a scripted server for each run, which
            counts them.
        client: Points at each scripted server in turn.
    """

    name: str
    kernel: Kernel
    service: ChatCompletionClientBase | None
    client: AsyncOpenAI

    @contextmanager
    def connected(self, scenario: Scenario, requests: _Requests) -> Generator[ChatCompletionClientBase]:
        """Yield the connector of one run."""
        with ExitStack() as stack:
            inner = self.service
            if inner is None:
                server = stack.enter_context(_ForgivingServer(scenario.model, requests))
                client = self.client.with_options(base_url=server.url)
                inner = OpenAIChatCompletion(ai_model_id="scripted", service_id="scripted", async_client=client)
            yield _CountingChatCompletion(
                ai_model_id=inner.ai_model_id,
                service_id=inner.service_id,
                instruction_role=inner.instruction_role,
                inner=inner,
                requests=requests if self.service is not None else None,
                reports=scenario.reports,
            )


def _backend(live: Live | None, client: AsyncOpenAI) -> _Backend:
    kernel = live.kernel if live is not None else None
    kernel = kernel or Kernel(plugins={"desk": KernelPlugin.from_object("desk", OrderDeskPlugin())})
    if live is None:
        return _Backend("a scripted model behind real HTTP on this machine", kernel, None, client)
    service = live.service or select_service(kernel, None, KernelArguments())[0]
    while isinstance(service, FunctionInvokingChatCompletion):
        service = service.inner  # loops are compared, so a service with its own loop is unwrapped
    name = f"{service.ai_model_id} at {service.service_url() or type(service).__name__}"
    return _Backend(name, kernel, service, client)


class _ForgivingServer(ScriptedOpenAIServer):
    """A scripted OpenAI server that lists in ``refused`` the requests that OpenAI would refuse, and answers them.

    Several OpenAI-compatible endpoints answer a history whose calls have no results. With one of them an option
    continues and spends, while OpenAI would end it with an error. The comparison shows both. Only that fault is
    accepted; a request that breaks another rule is refused.
    """

    def __init__(self, script: Script, requests: _Requests) -> None:
        super().__init__(script)
        self._counted = requests

    def _complete(self, raw: bytes) -> HttpResponse:
        requests, tokens = len(self.requests), self.total_tokens
        body = cast("dict[str, Any]", json.loads(raw))
        if (violation := find_violation(body)) is not None:
            body = {**body, "messages": list(_with_results(body["messages"]))}
            if find_violation(body) is None:
                self._refused.append(violation.message)
        response = super()._complete(json.dumps(body).encode())
        if len(self.requests) > requests:
            self._counted.tokens.append(self.total_tokens - tokens)
        self._counted.refused = self.refused
        return response


def _with_results(messages: list[dict[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Insert a result for each call that has none."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            waiting = [call for call in waiting if call != message["tool_call_id"]]
        else:
            yield from map(_missing_result, waiting)
            waiting = [call["id"] for call in message.get("tool_calls") or ()]
        yield message
    yield from map(_missing_result, waiting)


def _missing_result(call_id: str) -> Mapping[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "(no result)"}


@dataclass(slots=True)
class _FunctionCounter:
    """Counts the functions that a model calls, without those that a function calls in turn.

    Attributes:
        requests: The requests of the run.
        budget: Round trips allowed.
        started: Functions started.
        past_budget: Functions started when no round trip was left.
    """

    requests: _Requests
    budget: int
    started: int = 0
    past_budget: int = 0
    _inside: ContextVar[bool] = field(default_factory=lambda: ContextVar("inside", default=False))

    async def __call__(
        self, context: FunctionInvocationContext, next: Callable[[FunctionInvocationContext], Awaitable[None]]
    ) -> None:
        """Count a function that is about to start; a function invocation filter of Semantic Kernel."""
        if not self._inside.get():
            self.started += 1
            self.past_budget += len(self.requests.tokens) >= self.budget
        token = self._inside.set(True)
        try:
            await next(context)
        finally:
            self._inside.reset(token)


class _CountingChatCompletion(ChatCompletionClientBase):
    """A connector that counts its round trips, those of Semantic Kernel's own loop included, and delegates the rest.

    It overrides what every connector overrides: the one request at the bottom of Semantic Kernel's loop.

    Attributes:
        inner: The connector that makes the requests.
        requests: Counts the requests; None does not count them.
        reports: Whether replies keep their metadata.
    """

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True

    inner: ChatCompletionClientBase
    requests: _Requests | None
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
        self._count(messages[0].metadata if messages else {})
        for message in messages:
            self._silence(message)
        return messages

    async def _inner_get_streaming_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings, function_invoke_attempt: int = 0
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        reported: dict[str, Any] = {}
        stream = self.inner._inner_get_streaming_chat_message_contents(chat_history, settings, function_invoke_attempt)
        async for chunks in stream:
            for chunk in chunks:
                reported |= {key: value for key, value in chunk.metadata.items() if value is not None}
                self._silence(chunk)
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

    def _count(self, metadata: dict[str, Any]) -> None:
        if self.requests is not None:
            self.requests.tokens.append(read_usage(metadata.get("usage")).total_tokens)

    def _silence(self, message: ChatMessageContent) -> None:
        if not self.reports:
            message.metadata = {}
