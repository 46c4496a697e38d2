"""The doors through which a situation happens: each asks, and continues after decisions, as an application would."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from urllib.parse import quote

from ag_ui.core import (
    BaseEvent,
    ResumeEntry,
    RunAgentInput,
    RunErrorEvent,
    RunFinishedEvent,
    UserMessage,
)
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments

from entitlement.record import within
from entitlement.rules import STAFF
from entitlement.world import World, auto, goal_of
from planner_ext import (
    ApprovalFilter,
    Approve,
    BoundedFunctionChoiceBehavior,
    Checkpoint,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
    ToolUseSession,
)
from planner_ext.ag_ui import ag_ui_events
from planner_ext.agent import resume_agent, resume_agent_stream
from planner_ext.approval.waiting import pending_calls
from planner_ext.durable import Approvals, Runs
from planner_ext.errors import (
    ApprovalRefusedError,
    InvalidHistoryError,
    PlannerExtError,
    RunNotAnsweredError,
)
from planner_ext.events import ResultReady
from planner_ext.session import AutomaticToolUseConfig
from support.inbox import inbox, visitor_at
from support.stock import add_filter

__all__ = ["Outcome", "Way", "way_into"]


@dataclass(frozen=True)
class Shown:
    """A call that waits, as a door shows it."""

    key: str
    call_id: str
    arguments: Mapping[str, Any]
    roles: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run so far; with the keys of decisions that were refused."""

    status: str
    waiting: Sequence[Shown] = ()
    refused: frozenset[str] = frozenset()


class Way(Protocol):
    """One door of a situation."""

    async def ask(self, run: str) -> Outcome:
        """Begin a run."""
        ...

    async def decide(self, decisions: Mapping[str, Any]) -> Outcome:
        """Go on with the run, with decisions by the keys of what is shown."""
        ...

    async def decide_again(self, decisions: Mapping[str, Any]) -> None:
        """Go on once more from where the run stood before the last decisions."""
        ...

    async def say_more(self) -> bool:
        """Have the user say something else, and the model answer; False where that is not done here."""
        ...


@asynccontextmanager
async def way_into(world: World) -> AsyncGenerator[Way]:
    """Open the door of a situation."""
    match world.scenario.door:
        case "planner" | "filter-in-run":
            yield _Planner(world)
        case "service" | "handler":
            yield _Chat(world, world.scenario.door)
        case "session":
            yield _Session(world)
        case "agent":
            yield _Agent(world)
        case "ag-ui":
            yield _FrontEnd(world)
        case "filter":
            yield _Filter(world)
        case "kept" | "inbox":
            with TemporaryDirectory() as folder:
                store = Path(folder) / "runs.db"
                authorize: Any = (
                    None if world.scenario.hook == "none" else world.people.hook
                )
                elsewhere: dict[str, Any] = {
                    "authorize": None if world.scenario.bare else authorize
                }
                async with (
                    Runs.sqlite(store, authorize=authorize, poll_seconds=0.001) as runs,
                    Approvals.connect(store, **elsewhere) as approvals,
                ):
                    if world.scenario.door == "kept":
                        yield _Kept(world, runs, approvals)
                    else:
                        async with inbox(store, **elsewhere) as address:
                            yield _Inbox(world, runs, approvals, address)


def _options(world: World, *, bare: bool = False) -> dict[str, Any]:
    return world.options(
        world.scenario.guards.chains[0], approver=world.scenario.approver, bare=bare
    )


def _settings() -> PromptExecutionSettings:
    behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=None)
    return PromptExecutionSettings(function_choice_behavior=behavior)


def _planner(world: World, *, bare: bool = False) -> FunctionCallingStepwisePlanner:
    options = FunctionCallingStepwisePlannerOptions(
        plan=False, max_iterations=1000, **_options(world, bare=bare)
    )
    return FunctionCallingStepwisePlanner(options=options)


def _shown(pending: Sequence[Any]) -> list[Shown]:
    found = [one if isinstance(one, Mapping) else one.as_dict() for one in pending]
    return [
        Shown(
            one["path"],
            one["id"],
            one["arguments"],
            tuple(one.get("roles", ())),
            one["fingerprint"],
        )
        for one in found
    ]


class _Once:
    """A door whose store, history or protocol has only the newest state of a run."""

    async def decide_again(self, decisions: Mapping[str, Any]) -> None:
        pass

    async def say_more(self) -> bool:
        return False


class _Planner(_Once):
    """A planner; with the filter of its kernel, if the situation has one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._planner = _planner(world)
        self._checkpoint: Any = None
        self._before: Any = None
        if (of_kernel := world.scenario.guards.filter) is not None:
            add_filter(
                world.kernel,
                "auto_function_invocation",
                _filter(world, of_kernel.guards[0]),
            )

    async def ask(self, run: str) -> Outcome:
        if self._world.scenario.streamed:
            return await self._last(
                self._planner.invoke_stream(self._world.kernel, goal_of(run))
            )
        return self._of(await self._planner.invoke(self._world.kernel, goal_of(run)))

    async def decide(self, decisions: Mapping[str, Any]) -> Outcome:
        checkpoint = self._checkpoint
        if self._world.scenario.anew or self._world.scenario.bare:
            checkpoint = Checkpoint.from_json(checkpoint.to_json())
            self._planner = _planner(self._world, bare=self._world.scenario.bare)
        self._before = checkpoint
        if self._world.scenario.streamed:
            return await self._last(
                self._planner.resume_stream(self._world.kernel, checkpoint, decisions)
            )
        return self._of(
            await self._planner.resume(self._world.kernel, checkpoint, decisions)
        )

    async def decide_again(self, decisions: Mapping[str, Any]) -> None:
        await self._planner.resume(self._world.kernel, self._before, decisions)

    async def _last(self, events: Any) -> Outcome:
        async with aclosing(events):
            seen = [event async for event in events]
        assert isinstance(seen[-1], ResultReady)
        return self._of(seen[-1].result)

    def _of(self, result: Any) -> Outcome:
        self._checkpoint = result.checkpoint
        return Outcome(result.status, _shown(result.pending))


class _Chat:
    """A service or a handler over one history."""

    def __init__(self, world: World, kind: str) -> None:
        self._world = world
        self._kind = kind
        self._history = ChatHistory()
        self._door = self._made()
        self._checkpoint = self._before = ""

    def _made(self, *, bare: bool = False) -> Any:
        options = _options(self._world, bare=bare)
        if self._kind == "service":
            return FunctionInvokingChatCompletion(self._world.service, **options)
        return ToolCallHandler(self._world.kernel, settings=_settings(), **options)

    async def ask(self, run: str) -> Outcome:
        self._history.add_user_message(goal_of(run))
        if self._kind == "handler":
            invoke = (
                self._door.invoke_stream
                if self._world.scenario.streamed
                else self._door.invoke
            )
            return await self._drained(invoke(self._history))
        given: dict[str, Any] = {"kernel": self._world.kernel}
        if self._world.scenario.streamed:
            return await self._drained(
                self._door.get_streaming_chat_message_content(
                    self._history, _settings(), **given
                )
            )
        return self._of(
            await self._door.get_chat_message_content(
                self._history, _settings(), **given
            )
        )

    async def decide(self, decisions: Mapping[str, Any]) -> Outcome:
        scenario = self._world.scenario
        if scenario.anew or scenario.bare:
            self._door = self._made(bare=scenario.bare)
        self._before = self._checkpoint
        return await self._resumed(self._history, self._checkpoint, decisions)

    async def _resumed(self, *given: Any) -> Outcome:
        streamed = self._world.scenario.streamed
        if self._kind == "handler":
            return await self._drained(
                (self._door.resume_stream if streamed else self._door.resume)(*given)
            )
        world: dict[str, Any] = {"kernel": self._world.kernel}
        if streamed:
            return await self._drained(
                self._door.resume_streaming(*given, _settings(), **world)
            )
        return self._of(await self._door.resume(*given, _settings(), **world))

    async def decide_again(self, decisions: Mapping[str, Any]) -> None:
        with suppress(InvalidHistoryError):  # which holds the results
            await self._resumed(self._history, self._before, decisions)

    async def take(self, checkpoint: Checkpoint, history: ChatHistory) -> Outcome:
        """Take a run over that waits in another door."""
        self._checkpoint, self._history = checkpoint.to_json(), history
        return await self.decide({})

    async def say_more(self) -> bool:
        self._history.add_user_message("By the way, is it raining?")
        self._history.add_assistant_message("It is not.")
        return True

    async def _drained(self, messages: Any) -> Outcome:
        async with aclosing(messages):
            seen = [message async for message in messages]
        return self._of(seen[-1])

    def _of(self, message: Any) -> Outcome:
        self._checkpoint = message.metadata.get("checkpoint", "")
        if self._kind == "service" and message.metadata["status"] == "answered":
            self._history.add_assistant_message("Done.")
        return Outcome(
            message.metadata["status"], _shown(message.metadata.get("pending", ()))
        )


class _Session:
    """A session, and a handler for what waits in it."""

    def __init__(self, world: World) -> None:
        self._world = world
        use = AutomaticToolUseConfig(max_tool_calls=1000)
        self._session = ToolUseSession(
            world.kernel, tool_use_config=use, settings=_settings(), **_options(world)
        )
        self._chat = _Chat(world, "handler")

    async def ask(self, run: str) -> Outcome:
        try:
            if self._world.scenario.streamed:
                async with aclosing(
                    self._session.prompt_streaming(goal_of(run))
                ) as pieces:
                    async for _ in pieces:
                        pass
            else:
                await self._session.prompt(goal_of(run))
        except RunNotAnsweredError as error:
            return await self._chat.take(
                vars(error)["checkpoint"], self._session.history()
            )
        return Outcome(
            "stopped" if self._session.pending else "answered"
        )  # denied calls may be returned

    async def decide(self, decisions: Mapping[str, Any]) -> Outcome:
        return await self._chat.decide(decisions)

    async def decide_again(self, decisions: Mapping[str, Any]) -> None:
        await self._chat.decide_again(decisions)

    async def say_more(self) -> bool:
        return await self._chat.say_more()


class _Agent(_Once):
    """An agent with its thread, whose service is one of this package."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._agent = self._made()
        self._thread: Any = None
        self._checkpoint = self._before = ""

    def _made(self) -> ChatCompletionAgent:
        # Under an id of its own: the agent puts it into the kernel, where a nested planner would take it over.
        service = FunctionInvokingChatCompletion(
            self._world.service, service_id="desk", **_options(self._world)
        )
        settings = _settings()
        settings.service_id = "desk"
        given: dict[str, Any] = {"kernel": self._world.kernel, "service": service}
        given |= {
            "arguments": KernelArguments(settings),
            "function_choice_behavior": settings.function_choice_behavior,
        }
        return ChatCompletionAgent(name="desk", instructions="Do it.", **given)

    async def ask(self, run: str) -> Outcome:
        given: dict[str, Any] = {"messages": goal_of(run), "thread": self._thread}
        if self._world.scenario.streamed:
            return await self._last(self._agent.invoke_stream(**given))
        return self._of(await self._agent.get_response(**given))

    async def decide(self, decisions: Mapping[str, Any]) -> Outcome:
        if self._world.scenario.anew:
            self._agent = self._made()
        self._before = self._checkpoint
        given: tuple[Any, ...] = (
            self._agent,
            self._thread,
            self._checkpoint,
            decisions,
        )
        if self._world.scenario.streamed:
            return await self._last(resume_agent_stream(*given))
        return self._of(await resume_agent(*given))

    async def decide_again(self, decisions: Mapping[str, Any]) -> None:
        with suppress(InvalidHistoryError):
            await resume_agent(self._agent, self._thread, self._before, decisions)

    async def say_more(self) -> bool:
        try:
            await self._agent.get_response(
                messages="By the way, is it raining?", thread=self._thread
            )
        except PlannerExtError:
            return False
        return True

    async def _last(self, items: Any) -> Outcome:
        async with aclosing(items):
            seen = [item async for item in items]
        return (
            self._of(seen[-1]) if seen else Outcome("stopped")
        )  # Semantic Kernel keeps returned calls to itself

    def _of(self, item: Any) -> Outcome:
        self._thread = item.thread
        self._checkpoint = item.metadata.get("checkpoint", "")
        return Outcome(
            item.metadata["status"], _shown(item.metadata.get("pending", ()))
        )


class _Kept(_Once):
    """A planner whose run is kept in a store, and is decided from elsewhere."""

    def __init__(self, world: World, runs: Runs, approvals: Approvals) -> None:
        self._world = world
        self._runs = runs
        self._approvals = approvals
        self._run = ""

    async def ask(self, run: str) -> Outcome:
        self._run = run
        given: tuple[Any, ...] = (
            _planner(self._world),
            self._world.kernel,
            goal_of(run),
        )
        result = await (await self._runs.start(*given, run_id=run)).result()
        if result.status != "paused":
            return Outcome(result.status)
        items = await self._approvals.pending(run)
        return Outcome(
            "paused",
            [
                Shown(
                    one.id,
                    one.call_id,
                    one.arguments,
                    tuple(one.roles),
                    one.fingerprint,
                )
                for one in items
            ],
        )

    async def decide(self, decisions: Mapping[str, Any]) -> Outcome:
        if (
            self._world.scenario.streamed
        ):  # by a worker's own resume, and else from another process
            waiting = await self._approvals.pending(self._run)
            given = {
                one.path: decisions[one.id] for one in waiting if one.id in decisions
            }
            world: tuple[Any, ...] = (_planner(self._world), self._world.kernel)
            await (await self._runs.resume(self._run, *world, decisions=given)).result()
            return await self.ask(self._run)
        refused: set[str] = set()
        for key, decision in decisions.items():
            try:
                await self._approvals.decide(key, decision)
            except ApprovalRefusedError:
                refused.add(key)
        return replace(await self.ask(self._run), refused=frozenset(refused))


class _Inbox(_Kept):
    """The same, decided in the forms of the inbox, by the signed-in user."""

    def __init__(
        self, world: World, runs: Runs, approvals: Approvals, address: str
    ) -> None:
        super().__init__(world, runs, approvals)
        self._address = address

    async def decide(self, decisions: Mapping[str, Any]) -> Outcome:
        refused: set[str] = set()
        for key, decision in decisions.items():
            kind, fields = "deny", dict[str, Any]()
            if isinstance(decision, Approve) and decision.arguments is None:
                kind, fields = "approve", {"always": decision.always or ""}
            elif isinstance(decision, Approve):
                given = decision.arguments or {}
                kind, fields = (
                    "edit",
                    {
                        "argument-0": given["to"],
                        "argument-1": str(given.get("amount", "")),
                    },
                )
            async with visitor_at(self._address, decision.by or "stranger") as visitor:
                response = await visitor.decide(
                    f"approvals/{quote(key, safe='')}", kind, **fields
                )
            if response.status_code != 200:
                refused.add(key)
        return replace(await self.ask(self._run), refused=frozenset(refused))


class _FrontEnd(_Once):
    """A planner behind a front end of AG-UI; the person who decides is the user of that request."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[str, Checkpoint] = {}
        self._requests = 0

    async def ask(self, run: str) -> Outcome:
        event = await self._request(
            None, messages=[UserMessage(id=run, content=goal_of(run))]
        )
        return (
            self._outcome()
            if isinstance(event, RunFinishedEvent)
            else Outcome("failed")
        )

    async def decide(self, decisions: Mapping[str, Any]) -> Outcome:
        refused: set[str] = set()
        for key, decision in decisions.items():
            entry = ResumeEntry(
                interrupt_id=key, status="resolved", payload=_payload(decision)
            )
            if isinstance(
                await self._request(decision.by, messages=[], resume=[entry]),
                RunErrorEvent,
            ):
                refused.add(key)
        return replace(self._outcome(), refused=frozenset(refused))

    async def _request(self, by: str | None, **given: Any) -> BaseEvent:
        self._requests += 1
        options: dict[str, Any] = {
            "waiting": self._waiting,
            "by": by or "",
            "roles": STAFF.get(by or "", ()),
        }
        given |= {"state": {}, "tools": [], "context": [], "forwarded_props": {}}
        run_input = RunAgentInput(
            thread_id="thread", run_id=f"request-{self._requests}", **given
        )
        events = ag_ui_events(
            _planner(self._world), self._world.kernel, run_input, **options
        )
        return [event async for event in events][-1]

    def _outcome(self) -> Outcome:
        kept = self._waiting.get("thread")
        waiting = [] if kept is None else pending_calls(kept.state())
        shown = [
            Shown(
                one.fingerprint,
                one.id,
                one.arguments,
                tuple(one.roles),
                one.fingerprint,
            )
            for one in waiting
        ]
        return Outcome("paused" if shown else "answered", shown)


def _payload(decision: Any) -> dict[str, Any]:
    if not isinstance(decision, Approve):
        return {"approved": False}
    return {"approved": True} | (
        {} if decision.arguments is None else {"editedArgs": decision.arguments}
    )


def _filter(world: World, guard: Any) -> ApprovalFilter:
    scenario = world.scenario
    approver = world.people.asked if scenario.approver else None
    authorize = None if scenario.hook == "none" else world.people.hook
    return ApprovalFilter(world.guard(guard), approver, authorize=authorize)


class _Filter(_Once):
    """A stock kernel with a filter."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._history = ChatHistory()
        (policy,) = world.scenario.guards.chains[0].guards
        self._filter = _filter(world, policy)
        for kind in ("auto_function_invocation", "function_invocation"):
            if world.scenario.stock in (
                "both",
                kind.partition("_function")[0].partition("_")[0],
            ):
                add_filter(world.kernel, kind, self._filter)

    async def ask(self, run: str) -> Outcome:
        self._history.add_user_message(goal_of(run))
        return await self._answer()

    async def _answer(self) -> Outcome:
        given: dict[str, Any] = {"kernel": self._world.kernel}
        if self._world.scenario.streamed:
            stream = self._world.service.get_streaming_chat_message_content(
                self._history, auto(), **given
            )
            async with aclosing(stream) as chunks:
                async for _ in chunks:
                    pass
        else:
            await self._world.service.get_chat_message_content(
                self._history, auto(), **given
            )
        waiting = self._filter.pending(self._history)
        return Outcome("paused" if waiting else "answered", _shown(waiting))

    async def decide(self, decisions: Mapping[str, Any]) -> Outcome:
        with ExitStack() as stack:
            if len(decisions) == 1:
                stack.enter_context(within(next(iter(decisions))))
            waiting = await self._filter.resume(
                self._world.kernel, self._history, decisions
            )
        return Outcome("paused", _shown(waiting)) if waiting else await self._answer()
