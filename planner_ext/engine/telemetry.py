"""The OpenTelemetry spans and metrics of a run, named by the GenAI conventions; ``adr/0015`` lists them.

They hold no goal, argument, result, answer or message unless the application allows
sensitive data. Spans of connectors and functions are children of a request's or a
call's. Only the API is used: the application configures SDK and exporters.
"""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from time import perf_counter
from typing import Any, Final, TypeAlias

from opentelemetry.context import Context
from opentelemetry.metrics import get_meter, get_meter_provider
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    StatusCode,
    get_current_span,
    get_tracer,
    set_span_in_context,
    use_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from planner_ext.approval.waiting import (
    present_status,
    waiting_calls,
    waiting_everywhere,
)
from planner_ext.core import facts, machine
from planner_ext.core.state import State
from planner_ext.core.values import Usage
from planner_ext.engine.engine import Engine
from planner_ext.engine.log import is_set
from planner_ext.engine.ports import Emit, Event, Perform, TextDelta

_SCOPE: Final = ("planner_ext", version("planner-ext"))
_CONVENTIONS: Final = "https://opentelemetry.io/schemas/1.44.0"
_TRACER: Final = get_tracer(*_SCOPE, schema_url=_CONVENTIONS)
_TRACEPARENT: Final = TraceContextTextMapPropagator()

_Attributes: TypeAlias = dict[str, Any]
_Follow: TypeAlias = Callable[[State, facts.Fact], None]


# The metrics. Instruments work from when the application sets its provider.

_METER: Final = get_meter(*_SCOPE, schema_url=_CONVENTIONS)
_CALLS: Final = [2.0**n for n in range(8)]
_SECONDS: Final = [0.01 * 2**n for n in range(14)]
_TOKENS: Final = [4.0**n for n in range(14)]
_WAITS: Final = [1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, 604800.0]

_HISTOGRAMS: Final = {
    name: _METER.create_histogram(
        name, unit, description, explicit_bucket_boundaries_advisory=boundaries
    )
    for name, unit, description, boundaries in (
        (
            "gen_ai.invoke_agent.duration",
            "s",
            "Duration of an invocation of an agent.",
            [10 * s for s in _SECONDS],
        ),
        (
            "gen_ai.invoke_agent.inference_calls",
            "{inference_call}",
            "Requests of an invocation to a model.",
            _CALLS,
        ),
        (
            "gen_ai.invoke_agent.tool_calls",
            "{tool_call}",
            "Functions that an invocation started.",
            _CALLS,
        ),
        (
            "gen_ai.client.operation.duration",
            "s",
            "Duration of a request to a model.",
            _SECONDS,
        ),
        (
            "gen_ai.client.operation.time_to_first_chunk",
            "s",
            "Time from a streamed request to its first chunk.",
            _SECONDS,
        ),
        (
            "gen_ai.execute_tool.duration",
            "s",
            "Duration of a function.",
            _SECONDS,
        ),
        (
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens of a request, by type.",
            _TOKENS,
        ),
        (
            "planner_ext.run.iterations",
            "{iteration}",
            "Round trips of a run that has ended, by status.",
            _CALLS,
        ),
        (
            "planner_ext.decision.wait",
            "s",
            "Time from a question to the decision of a person.",
            _WAITS,
        ),
    )
}
_COST: Final = _METER.create_counter(
    "planner_ext.cost", "USD", "Price of the requests to models."
)


def _record(name: str, value: float, attributes: _Attributes) -> None:
    _HISTOGRAMS[name].record(value, _given(attributes))


# The attributes and events.


def _given(attributes: _Attributes) -> _Attributes:
    return {
        name: value for name, value in attributes.items() if value not in (None, "")
    }


def _message(role: str, text: str) -> str:
    return json.dumps(
        [{"role": role, "parts": [{"type": "text", "content": text}]}],
        ensure_ascii=False,
    )


def _tokens(usage: Usage) -> _Attributes:
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens or None,
    }


def _links_to(journal: Sequence[facts.Fact]) -> list[Link]:
    known = (facts.RunStarted, facts.Resumed, facts.Paused)
    trace = next(
        (
            fact.trace
            for fact in reversed(journal)
            if isinstance(fact, known) and fact.trace
        ),
        "",
    )
    earlier = get_current_span(
        _TRACEPARENT.extract({"traceparent": trace}, Context())
    ).get_span_context()
    return [Link(earlier)] if earlier.is_valid else []


def _event_of(fact: facts.Fact, *, sensitive: bool) -> tuple[str, _Attributes] | None:
    """Return name and attributes of a fact's event; None for most facts."""
    match fact:
        case facts.CallDecided() if (
            fact.verdict in ("answer", "deny", "defer") or fact.binds
        ):
            # The name of an unknown function is the model's text, which no span holds.
            return "planner_ext.decision", {
                "gen_ai.tool.name": None if fact.kind == "unknown" else fact.function,
                "gen_ai.tool.call.id": fact.call_id,
                "planner_ext.iteration": fact.iteration,
                "planner_ext.decision.verdict": fact.verdict,
                "planner_ext.decision.person": fact.person,
                "planner_ext.decision.edited": fact.edited is not None,
                "planner_ext.decision.by": fact.by,
                "planner_ext.decision.reason": fact.reason if sensitive else None,
            }
        case facts.Clarified(answer=str()):
            return "planner_ext.decision", {
                "planner_ext.iteration": fact.iteration,
                "planner_ext.decision.verdict": "answer"
                if fact.denied is None
                else "deny",
                "planner_ext.decision.person": not fact.usage.iterations,
                "planner_ext.decision.by": fact.by,
            }
        case facts.CallsWithheld():
            return "planner_ext.withheld", {
                "planner_ext.iteration": fact.iteration,
                "planner_ext.calls": len(fact.indexes),
                "planner_ext.limit": fact.limit,
            }
        case facts.StopRequested():
            return "planner_ext.stop", {
                "planner_ext.stop.reason": fact.reason if sensitive else None
            }
        case _:
            return None


# The spans.

_SPENDS: Final = (
    facts.Planned,
    facts.ModelReplied,
    facts.RequestFailed,
    facts.Clarified,
)


class Invocation:
    """The spans and metrics of one activation; a `planner_ext.engine.ports.Tracing`.

    Attributes:
        trace: The ``traceparent`` of the activation's span, or "".
    """

    trace: str = ""

    def __init__(
        self,
        agent: str,
        *,
        agent_id: str | None,
        provider: str,
        model: str,
        chats: bool,
        answered_by: Callable[[Any], str | None],
        sensitive: bool,
    ) -> None:
        """Describe the agent that is invoked.

        Args:
            agent: ``gen_ai.agent.name``.
            agent_id: ``gen_ai.agent.id``.
            provider: ``gen_ai.provider.name``.
            model: ``gen_ai.request.model``.
            chats: Whether a request has a ``chat`` span here.
            answered_by: Returns the model that sent a reply or a chunk.
            sensitive: Whether spans may hold goals, answers, reasons and the messages
                of errors.
        """
        self._agent = _given(
            {"gen_ai.agent.name": agent, "gen_ai.agent.id": agent_id or ""}
        )
        self._model = {"gen_ai.provider.name": provider, "gen_ai.request.model": model}
        self._sensitive = sensitive
        self._span: Span
        self._iteration: Span | None = None
        self._chats = chats
        self._answered_by = answered_by
        self._answered: str | None = None
        self._chat: Span | None = None
        self._streams = False
        self._sent = 0.0
        self._first_chunk: float | None = None
        self._started: dict[tuple[int, int], float] = {}
        self._run: _Attributes = {}
        self._asked: dict[int | None, float] = {}
        self._limit: str | None = None
        self._error = ""
        self._performs = False
        self._records = False

    def stamped(self, first: Sequence[facts.Fact]) -> Sequence[facts.Fact]:
        """Write the span into the fact that begins an activation."""
        begins = (facts.RunStarted, facts.Resumed)
        return [
            replace(fact, trace=self.trace) if isinstance(fact, begins) else fact
            for fact in first
        ]

    @contextmanager
    def of(self, engine: Engine) -> Generator[None]:
        """Surround an activation with its span, and measure it."""
        before = engine.state
        began = perf_counter()
        self._asked = {
            index: before.at if call.started else call.decided_fact.at
            for index, call in waiting_calls(before).items()
        }
        self._span = self._start("invoke_agent", self._model, _links_to(engine.facts))
        self._records = self._span.is_recording() or is_set(get_meter_provider())
        failure: BaseException | None = None
        with use_span(
            self._span,
            end_on_exit=True,
            record_exception=False,
            set_status_on_exception=False,
        ):
            carrier: dict[str, str] = {}
            _TRACEPARENT.inject(carrier)
            self.trace = carrier.get("traceparent", "")
            self._name_run(before)
            try:
                yield
            except BaseException as error:
                failure = error
                self._fail(self._span, error)
                raise
            finally:
                self._end_iteration()
                self._finish(before, engine.state, perf_counter() - began, failure)

    def following(self, follow: _Follow | None) -> _Follow:
        """Return a function that gives each fact to ``follow``, then to the spans."""

        def take(state: State, fact: facts.Fact) -> None:
            if follow is not None:
                follow(state, fact)
            if self._records:
                self._take(state, fact)

        return take

    def timing(self, emit: Emit | None) -> Emit | None:
        """Return a function that passes events on, and notes when a reply's first chunk comes."""
        if emit is None:
            return None
        self._streams = True

        async def pass_on(event: Event) -> None:
            if self._first_chunk is None and isinstance(event, TextDelta):
                self._first_chunk = perf_counter() - self._sent
                self._answered = self._answered_by(event.chunk)
            await emit(event)

        return pass_on

    def around(self, perform: Perform) -> Perform:
        """Surround each action with the span of its iteration."""
        self._performs = True

        async def performed(action: machine.Action) -> None:
            asks = isinstance(action, machine.AskPlan | machine.AskModel)
            handles_calls = isinstance(action, machine.ReviewCalls | machine.RunCalls)
            if asks or (handles_calls and self._iteration is None):
                self._begin_iteration(action)
            with self._inside(self._iteration or self._span, asks=asks):
                await perform(action)
            if isinstance(action, machine.AskPlan | machine.CompleteIteration):
                self._end_iteration()

        return performed

    def _start(
        self, operation: str, attributes: _Attributes, links: Sequence[Link] = ()
    ) -> Span:
        name = f"{operation} {self._agent['gen_ai.agent.name']}"
        own = {"gen_ai.operation.name": operation, **self._agent, **attributes}
        return _TRACER.start_span(name, attributes=own, links=links)

    @contextmanager
    def _inside(self, around: Span, *, asks: bool) -> Generator[None]:
        """Surround an action with the span that it belongs to, or with that of its request."""
        if asks and self._chats:
            self._chat = self._start_chat(around)
        span = self._chat or around
        spans = dict.fromkeys((span, around))
        self._error = ""
        self._first_chunk = None
        self._answered = None
        self._sent = perf_counter()
        try:
            with use_span(span, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:
            for one in spans:
                self._fail(one, error)
            raise
        finally:
            if self._error:
                for one in spans:
                    one.set_attribute("error.type", self._error)
            if asks:
                self._end_chat(perf_counter() - self._sent)

    def _start_chat(self, around: Span) -> Span:
        return _TRACER.start_span(
            f"chat {self._model['gen_ai.request.model']}",
            set_span_in_context(around),
            SpanKind.CLIENT,
            _given(
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.request.stream": self._streams or None,
                    **self._model,
                    **self._run,
                }
            ),
        )

    def _end_chat(self, seconds: float) -> None:
        chat = {
            "gen_ai.operation.name": "chat",
            "error.type": self._error,
            **self._model,
        }
        _record("gen_ai.client.operation.duration", seconds, chat)
        first = self._first_chunk
        if first is not None:
            _record("gen_ai.client.operation.time_to_first_chunk", first, chat)
        if self._chat is not None:
            if first is not None:
                self._chat.set_attribute("gen_ai.response.time_to_first_chunk", first)
            self._chat.end()
        self._chat = None

    def _begin_iteration(self, action: machine.Action) -> None:
        self._end_iteration()
        if isinstance(action, machine.AskPlan):
            self._iteration = self._start("plan", self._run)
        else:
            attributes = {
                "planner_ext.iteration": getattr(action, "iteration", 0),
                **self._run,
            }
            self._iteration = _TRACER.start_span(
                "planner_ext.iteration", attributes=attributes
            )

    def _end_iteration(self) -> None:
        if self._iteration is not None:
            self._iteration.end()
        self._iteration = None

    def _take(self, state: State, fact: facts.Fact) -> None:
        match fact:
            case facts.RunStarted():
                self._name_run(state)
            case facts.RequestFailed() if self._performs:
                self._error = self._error or "timeout"
            case facts.RequestFailed():
                self._span.add_event(
                    "planner_ext.crash", {"planner_ext.iteration": fact.iteration}
                )
            case facts.Paused():
                self._span.add_event(
                    "planner_ext.pause",
                    {"planner_ext.calls": len(waiting_everywhere(state))},
                )
            case _:
                self._note(fact)
                self._add_event(fact)
        if isinstance(fact, _SPENDS):
            self._spend(fact.usage)
        limit = (
            state.limit
            or getattr(fact, "limit", None)
            or getattr(fact, "withheld", None)
        )
        if limit is not None and limit != self._limit:
            self._limit = limit
            self._span.add_event("planner_ext.limit", {"planner_ext.limit": limit})

    def _note(self, fact: facts.Fact) -> None:
        """Describe a reply in the span of its request, and measure a function."""
        match fact:
            case facts.ModelReplied() if self._iteration is not None:
                self._iteration.set_attribute("planner_ext.calls", len(fact.calls))
                reasons = [fact.finish_reason] if fact.finish_reason else None
                reply = {
                    **_tokens(fact.usage),
                    "gen_ai.response.model": self._answered
                    or self._answered_by(fact.message),
                    "gen_ai.response.finish_reasons": reasons,
                }
                (self._chat or self._iteration).set_attributes(_given(reply))
            case facts.Planned() if self._chat is not None:
                self._chat.set_attributes(_given(_tokens(fact.usage)))
            case facts.CallStarted():
                self._started[fact.iteration, fact.index] = fact.at
            case facts.CallFinished():
                self._measure(fact)
            case _:
                pass

    def _measure(self, fact: facts.CallFinished) -> None:
        started = self._started.pop((fact.iteration, fact.index), None)
        if started is None:  # in another process
            return
        tool = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": fact.function,
            "error.type": None if fact.outcome == "ok" else fact.outcome,
        }
        _record("gen_ai.execute_tool.duration", max(fact.at - started, 0.0), tool)

    def _add_event(self, fact: facts.Fact) -> None:
        event = _event_of(fact, sensitive=self._sensitive)
        if event is None:
            return
        name, attributes = event
        asked = (
            self._asked.pop(fact.index, None)
            if isinstance(fact, facts.CallDecided | facts.Clarified)
            else None
        )
        if asked is not None and attributes["planner_ext.decision.person"]:
            waited = max(fact.at - asked, 0.0)
            attributes["planner_ext.decision.wait"] = waited
            verdict = {
                "planner_ext.decision.verdict": attributes[
                    "planner_ext.decision.verdict"
                ]
            }
            _record("planner_ext.decision.wait", waited, verdict)
        self._span.add_event(name, _given(attributes))

    def _name_run(self, state: State) -> None:
        if not state.run_id:
            return
        self._run = {"gen_ai.conversation.id": state.run_id}
        self._span.set_attributes(self._run)
        if self._sensitive:
            self._span.set_attribute(
                "gen_ai.input.messages", _message("user", state.goal)
            )

    def _fail(self, span: Span, error: BaseException) -> None:
        """Mark a span; a cancellation is not an error."""
        self._error = type(error).__qualname__
        if isinstance(error, Exception):
            span.set_status(StatusCode.ERROR, str(error) if self._sensitive else None)
            if self._sensitive:
                span.record_exception(error)
            else:
                span.add_event("exception", {"exception.type": self._error})

    def _spend(self, usage: Usage) -> None:
        for kind, tokens in (
            ("input", usage.prompt_tokens),
            ("output", usage.completion_tokens),
        ):
            if tokens:
                chat = {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.token.type": kind,
                    **self._model,
                }
                _record("gen_ai.client.token.usage", tokens, chat)
        if usage.cost:
            _COST.add(usage.cost, self._model)

    def _finish(
        self, before: State, state: State, seconds: float, failure: BaseException | None
    ) -> None:
        used = state.usage
        earlier = before.usage
        agent = self._agent
        answer = ""
        if state.ended is not None and self._sensitive:
            answer = state.ended.answer
        error = {"error.type": None if failure is None else type(failure).__qualname__}
        ended = {
            "planner_ext.run.status": "failed"
            if isinstance(failure, Exception)
            else present_status(state)
        }
        attributes = {
            **ended,
            **error,
            **_tokens(used - earlier),
            "planner_ext.limit": self._limit,
            "planner_ext.run.iterations": used.iterations,
            "planner_ext.run.tool_calls": used.tool_calls,
            "planner_ext.run.cost": used.cost,
            "gen_ai.output.messages": answer and _message("assistant", answer),
        }
        self._span.set_attributes(_given(attributes))
        _record("gen_ai.invoke_agent.duration", seconds, {**agent, **ended, **error})
        _record(
            "gen_ai.invoke_agent.inference_calls",
            used.iterations - earlier.iterations,
            agent,
        )
        _record(
            "gen_ai.invoke_agent.tool_calls",
            used.tool_calls - earlier.tool_calls,
            agent,
        )
        if state.ended is not None:
            _record("planner_ext.run.iterations", used.iterations, {**agent, **ended})
