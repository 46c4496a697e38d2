"""Agent Framework's chat client in this package's loop: its budget, its approvals, its journal, its stores.

The loop reaches a framework through the ports of `planner_ext.engine.ports`. This module fills two of them, ``Chat``
and ``Functions``, without Semantic Kernel. It leaves out plans, clarifiers, edits by a person, runs inside functions.
Messages are kept as Semantic Kernel's adapter keeps them, so that each framework continues the other's runs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_framework import Content, FunctionTool, Message, SupportsChatGetResponse
from jsonschema import Draft202012Validator
from pydantic_core import to_json

from planner_ext.approval.decisions import ApprovalSettings, Approve, DecisionRequest, Defer, MadeDecision, ToolCall
from planner_ext.approval.decisions import InvalidDecisionError as RefusedError
from planner_ext.approval.guards import guard_name
from planner_ext.approval.waiting import pending_calls, waiting_calls
from planner_ext.core.errors import RunRefusedError
from planner_ext.core.facts import Fact, Failure, Guards, Resumed, Rules, RunStarted
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import AskModel
from planner_ext.core.state import Call, Phase, State
from planner_ext.core.values import CallResult, EditedReply, Reply, RequestedCall, ResolvedCall, TextMessage, Usage
from planner_ext.engine.activation import Activation, missing_guards
from planner_ext.engine.authorization import refusal_of
from planner_ext.engine.batch import apply_decision, is_as_decided
from planner_ext.engine.concurrency import SystemClock
from planner_ext.engine.engine import Engine
from planner_ext.engine.gate import InterceptorChain
from planner_ext.engine.ports import Emit, Finished, Ports, Reviewed, TextDelta
from planner_ext.engine.review import Review


@dataclass(frozen=True)
class Chat:
    """One round trip with a chat client of agent-framework, whose own loop is off."""

    client: SupportsChatGetResponse[Any]
    tools: Sequence[FunctionTool]

    async def ask(self, transcript: Sequence[Any], request: AskModel, emit: Emit | None) -> Reply:
        """Send the transcript; the functions go along unless the budget withholds them."""
        offered = {"tools": self.tools, "tool_choice": request.tool_choice} if request.tool_choice else {}
        messages = [sent(item) for item in transcript]
        if emit is None:
            response = await self.client.get_response(messages, options=offered)
        else:
            stream = self.client.get_response(messages, options=offered, stream=True)
            async for update in stream:
                await emit(TextDelta(text=update.text, iteration=request.iteration))
            response = await stream.get_final_response()
        parts = [part for message in response.messages for part in message.contents]
        requested = [part for part in parts if part.type == "function_call"]
        calls = tuple(
            RequestedCall(id=one.call_id or "", name=one.name or "", arguments=text_of(one)) for one in requested
        )
        used = response.usage_details or {}
        prompt, completion = used.get("input_token_count") or 0, used.get("output_token_count") or 0
        return Reply(
            message=message_of("assistant", response.text, calls),
            text=response.text,
            calls=calls,
            finish_reason=response.finish_reason,
            usage=Usage(iterations=1, prompt_tokens=prompt, completion_tokens=completion),
            functions_available=bool(self.tools),
        )

    def failure(self, error: BaseException) -> Failure:  # noqa: ARG002  (the port's)
        """Charge each request that fails: the server may have processed it."""
        return "processed"

    def estimated(self, transcript: Sequence[Any], request: AskModel) -> Usage:  # noqa: ARG002  (the port's)
        """Estimate nothing: these clients report their tokens."""
        return Usage()


def text_of(call: Content) -> str:
    """Write a call's arguments as the text that the model sent."""
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {})


def message_of(role: str, text: str, calls: Sequence[RequestedCall] = ()) -> dict[str, Any]:
    """Write a message as a journal has it."""
    items: list[dict[str, Any]] = [{"content_type": "text", "text": text}] if text or not calls else []
    for call in calls:
        plugin, _, function = call.name.rpartition("-")
        names = {"name": call.name, "plugin_name": plugin, "function_name": function}
        items.append({"content_type": "function_call", "id": call.id, "arguments": call.arguments, **names})
    return {"content_type": "message", "role": role, "items": items}


def sent(item: Any) -> Message:
    """Turn an item of a transcript into a message of agent-framework."""
    match item:
        case CallResult(call_id=call_id, text=text):
            return Message("tool", [Content.from_function_result(call_id, result=text)])
        case TextMessage(role=role, text=text):
            return Message(role, [text])
        case EditedReply(message=message, kept=kept, edited=edited):
            items = [one for one in message["items"] if one["content_type"] != "function_call" or one["id"] in kept]
            return message_sent({**message, "items": items}, dict(edited))
        case _:
            return message_sent(item, {})


def message_sent(message: Mapping[str, Any], edits: Mapping[str, str]) -> Message:
    """Turn a message of a journal into one of agent-framework."""
    contents: list[Content] = []
    for one in message["items"]:
        match one["content_type"]:
            case "text":
                contents.append(Content.from_text(one["text"]))
            case "function_call":
                arguments = edits.get(one["id"], one["arguments"])
                contents.append(Content.from_function_call(one["id"], one["name"], arguments=arguments))
            case "function_result":
                contents.append(Content.from_function_result(one["id"], result=one["result"]))
            case other:
                raise ValueError(f"This adapter sends texts, calls and results; the message has {other!r}.")
    return Message(message["role"], contents)


@dataclass(frozen=True)
class Functions:
    """Tools of agent-framework, by their names ``plugin-function``."""

    tools: Mapping[str, FunctionTool]

    def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
        """Resolve a call among the tools, and validate its arguments by the tool's schema."""
        tool = self.tools.get(call.name)
        if tool is None:
            answer = f"There is no function {call.name}. Call one of {', '.join(self.tools)}."
            return ResolvedCall(kind="unknown", function=call.name, arguments={}, answer=answer)
        try:
            given: Any = json.loads(edited or call.arguments or "{}")
            validator: Any = Draft202012Validator(tool.parameters())
            problems = [str(error.message) for error in validator.iter_errors(given)]
        except ValueError as error:
            given, problems = None, [str(error)]
        if problems:
            answer = f"It was not called: {'; '.join(problems)}. Correct the arguments."
            return ResolvedCall(kind="invalid", function=call.name, arguments={}, answer=answer)
        plugin, _, function = call.name.rpartition("-")
        return ResolvedCall(
            kind="function",
            function=call.name,
            plugin_name=plugin,
            function_name=function,
            arguments=given,
            parameters=json.dumps(tool.parameters()),
        )

    async def run(self, call: RequestedCall, checked: ResolvedCall, **_: Any) -> Finished:
        """Run a tool; what it raises is told to the model."""
        try:
            result = await self.tools[call.name].invoke(arguments=dict(checked.arguments), skip_parsing=True)
        except Exception as error:
            return Finished(outcome="failed", text="The function failed.", error=repr(error), exception=error)
        return Finished(outcome="ok", text=self.encode(result))

    def encode(self, result: Any) -> str:
        """Write a result as the model reads it."""
        return result if isinstance(result, str) else to_json(result, fallback=str).decode()


@dataclass(frozen=True)
class Gate:
    """The package's own rules: interceptors, policies, and tools that need approval."""

    chain: InterceptorChain

    def watches(self, function: str) -> bool:
        """Return whether anything could decide a call of this tool."""
        return self.chain.watches(function)

    async def review(self, calls: Sequence[ToolCall], state: State) -> Sequence[Reviewed]:
        """Decide each call of a batch."""
        return await Review(chains=(self.chain,), edit=no_edits).of(calls, state)


def no_edits(call: ToolCall, arguments: Mapping[str, Any]) -> str:  # noqa: ARG001  (as the gate calls it)
    """Refuse to change a call's arguments."""
    return "this adapter takes no edits"


@dataclass(frozen=True)
class Result:
    """How a run ended, or what it waits for."""

    status: str
    final_answer: str
    iterations: int
    pending: tuple[ToolCall, ...]


class AgentFrameworkPlanner:
    """A planner whose runs a store keeps: ``runs.start(planner, None, goal)``, ``runs.recover(planner, None)``.

    Args:
        client: A chat client with ``function_invocation_configuration["enabled"] = False``.
        tools: Named ``plugin-function``. One with ``approval_mode="always_require"`` waits for a person.
        budget: The limits of a run that begins here; one that began elsewhere keeps its own.
        interceptors: Policies, or callables that return a decision.
    """

    def __init__(
        self,
        client: SupportsChatGetResponse[Any],
        tools: Sequence[FunctionTool],
        *,
        budget: Budget,
        interceptors: Sequence[Any] = (),
    ) -> None:
        marked = sorted(tool.name for tool in tools if tool.approval_mode == "always_require")
        self.budget = budget
        self.functions = Functions({tool.name: tool for tool in tools})
        self.guards = Guards(interceptors=tuple(map(guard_name, interceptors)), marked=tuple(marked))
        chain = InterceptorChain(
            options=ApprovalSettings(),
            interceptors=interceptors,
            marked=lambda name: Defer() if name in marked else None,
        )
        self.ports = Ports(
            chat=Chat(client, list(tools)),
            functions=self.functions,
            message=lambda _, text: message_of("user", text or "Go on."),
            clock=SystemClock(),
            gate=Gate(chain),
        )

    def journaled(self, _: None, activation: Activation, /, *, arguments: Any = None) -> "KeptRun":  # noqa: ARG002  (the protocol's)
        """Prepare a run from a store."""
        return KeptRun(self, activation)


@dataclass(frozen=True)
class KeptRun:
    """One activation of a run, from its start or a decision to the next pause or end."""

    planner: AgentFrameworkPlanner
    activation: Activation

    async def result(self) -> Result:
        """Drive the run."""
        ports = replace(self.planner.ports, store=self.activation.store)
        engine = Engine(self.activation.facts, ports, emit=self.activation.emit)
        await engine.begin(await self._first(ports.clock.now()))
        state = await engine.run()
        answer = state.ended.answer if state.ended else ""
        status = state.ended.status if state.ended else "paused"
        return Result(status, answer, state.usage.iterations, pending_calls(state))

    async def _first(self, at: float) -> Sequence[Fact]:
        """List the facts that begin a run, or go on with its decisions."""
        given, guards = self.activation, self.planner.guards
        if not given.facts:
            opening = (message_of("user", given.goal),)
            rules = Rules(limits=self.planner.budget)
            return (
                RunStarted(run_id=given.run_id, rules=rules, messages=opening, goal=given.goal, guards=guards, at=at),
            )
        before = getattr(given.facts[0], "guards", None) or Guards()
        if missing := missing_guards(before, guards, self.planner.functions.tools):
            raise RunRefusedError(f"The run began under what this process lacks: {'; '.join(missing)}.")
        state = fold(given.facts)
        if state.phase not in (Phase.PAUSED, Phase.ENDED) or not (given.decisions or given.budget):
            return ()  # it goes on as it is; a call in doubt waits for a person
        waiting = {call.request.id: call for call in waiting_calls(state).values()}
        shown = {call.id: call for call in pending_calls(state)}
        decided = [await self._decided(shown[name], waiting[name], one, at) for name, one in given.decisions.items()]
        return (Resumed(limits=given.budget, at=at), *decided)

    async def _decided(self, shown: ToolCall, call: Call, made: MadeDecision, at: float) -> Fact:
        """Take a decision on what was asked about, and on nothing else."""
        given, functions, fact = self.activation, self.planner.functions, call.decided_fact
        decision, by = made.decision, getattr(made.decision, "by", "") or ""
        request = DecisionRequest(
            action="decide", by=by, run_id=given.run_id, call=shown, decision=decision, verified=made.verified
        )
        problem = await refusal_of(given.authorize, request)
        if isinstance(decision, Approve) and not problem:
            same = is_as_decided(functions.check(call.request, fact.edited), fact)
            alone = fact.panel.quorum == 1 and not fact.further and decision.arguments is None
            problem = None if same and alone else "It is not what was asked about, is edited, or needs another person."
        if problem:
            raise RefusedError(problem, call_id=shown.id)
        reviewed = Reviewed(decision=decision)
        return apply_decision(replace(fact, at=at, person=True), reviewed, functions, call.request, given.run_id)
