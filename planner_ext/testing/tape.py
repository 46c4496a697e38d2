"""``record`` and ``replay``: a run with a real model, kept as a cassette, and played without it.

    with record("tests/cassettes/refund.json") as tape:                       # calls the model, and writes the file
        result = await planner.invoke(tape.kernel(kernel), "Refund order 7.")

    with replay("tests/cassettes/refund.json") as tape:                       # needs no model
        result = await planner.invoke(tape.kernel(kernel), "Refund order 7.")

What uses `Tape.kernel`'s copy of a kernel is recorded, also inside functions. In a
replay the copy has every service of the cassette; one that the kernel lacks takes
OpenAI's settings, and needs neither a key nor a connector.

A replay has the run ids and times of the recorded run, so it gives the same journal.
Prompt functions and planners are always called, since their requests are on the
cassette. With recorded functions the application's filters do not run. A tape does not
cover text completion, embeddings, and requests that bypass its kernel.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast
from uuid import uuid4

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.contents import (
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    StreamingChatMessageContent,
    StreamingTextContent,
    TextContent,
)
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.core.accounts import current_tab
from planner_ext.core.facts import (
    CallFinished,
    CallLeft,
    CallStarted,
    Fact,
    HappenedInside,
    RunStarted,
    cost_of,
)
from planner_ext.core.state import Batch, State
from planner_ext.core.values import RequestedCall, ResolvedCall, Usage
from planner_ext.engine.document import dump_message
from planner_ext.engine.ports import Clock, Finished, Ports, RunInfo
from planner_ext.sk.chat.reply import ReplyAssembly, corrected, corrected_chunks
from planner_ext.sk.chat.transport import kernel_with_services
from planner_ext.sk.errors import InvalidOptionError
from planner_ext.sk.messages import load_message, loaded, text_of, with_own_ids
from planner_ext.sk.run.options import CheckedOptions
from planner_ext.sk.run.tools import KernelFunctions
from planner_ext.testing.cassette import (
    Asked,
    Cassette,
    Difference,
    Exchange,
    Raised,
    ReplayDifferenceError,
    differences,
    options_of,
    same,
    versions,
)
from planner_ext.testing.connector import OuterConnector
from planner_ext.testing.scrub import Scrub, Scrubber

S = TypeVar("S", bound=AIServiceClientBase)


class Tape(ABC):
    """The value of `record` and `replay`: it puts kernels and services on the cassette.

    Attributes:
        recording: Whether the model is called.
        services: The model of each service on the tape, by the service's id.
        runs: The journal of each run, by its id, in the order in which they began.
        differences: In a replay, those from the recorded run.
        as_recorded: In a replay with live functions, calls that return their recorded
            result: run, iteration, index.
    """

    recording: ClassVar[bool]

    def __init__(self) -> None:
        self.services: dict[str, str] = {}
        self.runs: dict[str, list[Fact]] = {}
        self.differences: list[Difference] = []
        self.as_recorded: set[tuple[str, int, int]] = set()

    def kernel(self, kernel: Kernel) -> Kernel:
        """Copy a kernel, with its services on the tape."""
        given = cast("dict[str, AIServiceClientBase]", kernel.services)
        return kernel_with_services(
            kernel, {name: self.service(service) for name, service in given.items()}
        )

    def service(self, service: S) -> S:
        """Wrap a chat completion service; others are returned as they are.

        Of a `FunctionInvokingChatCompletion`, a copy wraps its connector.
        """
        wrapper: Any = service
        if isinstance(getattr(wrapper, "options", None), CheckedOptions):
            wrapper = wrapper.model_copy()
            wrapper._inner = self.service(wrapper.inner)
            return wrapper
        if not isinstance(service, ChatCompletionClientBase) or isinstance(
            service, _TapedChatCompletion
        ):
            return service
        self.services[service.service_id] = service.ai_model_id
        return cast("S", self._taped(service.service_id, service.ai_model_id, service))

    @abstractmethod
    def _taped(
        self, service_id: str, model: str, inner: ChatCompletionClientBase | None
    ) -> ChatCompletionClientBase:
        """Make the service that replaces a connector."""


class _Tape(Tape):
    """What runs and services call; see `planner_ext.sk.run.context.Tape`."""

    def __init__(self, scrub: Scrub = ()) -> None:
        super().__init__()
        self._scrub = Scrubber(scrub)

    def _taped(
        self, service_id: str, model: str, inner: ChatCompletionClientBase | None
    ) -> "_TapedChatCompletion":
        if isinstance(
            key := getattr(getattr(inner, "client", None), "api_key", None), str
        ):
            self._scrub.add(key)
        role = {} if inner is None else {"instruction_role": inner.instruction_role}
        calls = inner is None or inner.SUPPORTS_FUNCTION_CALLING
        return (_TapedChatCompletion if calls else _TapedWithoutCalls)(
            ai_model_id=model, service_id=service_id, inner=inner, tape=self, **role
        )

    @abstractmethod
    def run_id(self, goal: str) -> str:
        """Return the id of a new run."""

    @abstractmethod
    def clock(self, clock: Clock) -> Clock:
        """Return the clock of a run, given its default one."""

    def ports(self, ports: Ports, facts: Sequence[Fact]) -> Ports:
        """Add the tape as an observer of a run."""
        if facts and isinstance(facts[0], RunStarted):
            self.runs[facts[0].run_id] = list(facts)
        return replace(ports, observers=(*ports.observers, self._observe))

    def _observe(self, fact: Fact, run: RunInfo) -> None:
        self.runs.setdefault(run.run_id, []).append(fact)

    @abstractmethod
    async def reply(self, request: "_Request") -> list[ChatMessageContent]: ...

    @abstractmethod
    def chunks(
        self, request: "_Request", attempt: int
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]: ...


def _functions() -> Iterator[str]:
    """Name the functions around this code, the innermost first."""
    tab = current_tab()
    while tab is not None:
        batch = tab.account.state.batch
        if batch is not None:
            yield batch.calls[tab.index].request.name
        tab = tab.account.within


class _Request(NamedTuple):
    """A request of a service on the tape."""

    service: "_TapedChatCompletion"
    history: ChatHistory
    settings: PromptExecutionSettings

    def asked(self) -> Asked:
        """Write it in its normal form, with the function that makes it."""
        function = next(_functions(), "")
        return Asked.of(self.service.service_id, function, self.history, self.settings)


class _TapedChatCompletion(OuterConnector):
    """A connector on a tape; ``inner`` is None where the replayed kernel lacks it."""

    tape: _Tape

    async def _inner_get_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings
    ) -> list[ChatMessageContent]:
        return await self.tape.reply(_Request(self, chat_history, settings))

    async def _inner_get_streaming_chat_message_contents(
        self,
        chat_history: ChatHistory,
        settings: PromptExecutionSettings,
        function_invoke_attempt: int = 0,
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        request = _Request(self, chat_history, settings)
        chunks = self.tape.chunks(request, function_invoke_attempt)
        async with aclosing(chunks) as stream:
            async for group in stream:
                yield group


class _TapedWithoutCalls(_TapedChatCompletion):
    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = False


class _Recorder(_Tape):
    recording = True

    def __init__(self, scrub: Scrub) -> None:
        super().__init__(scrub)
        self._exchanges: list[tuple[Asked, Exchange]] = []

    def write(self, path: Path) -> None:
        """Write the cassette, without requests that are still under way."""
        self._scrub.add_environment()
        done = [
            one
            for one in self._exchanges
            if one[1].replies is not None or one[1].error or one[1].abandoned
        ]
        Cassette(
            self.services, done, [tuple(facts) for facts in self.runs.values()]
        ).write(path, self._scrub)

    def run_id(self, goal: str) -> str:  # noqa: ARG002  (the port's signature)
        return uuid4().hex

    def clock(self, clock: Clock) -> Clock:
        return clock

    @contextmanager
    def _exchange(
        self, request: "_Request"
    ) -> Generator[tuple[ChatCompletionClientBase, Exchange]]:
        asked = request.asked()
        within = [*_functions()][1:]
        kept = Exchange(
            **{field.name: getattr(asked, field.name) for field in fields(asked)},
            within=within,
        )
        self._exchanges.append((asked, kept))
        try:
            yield request.service.connector, kept
        except Exception as error:
            kept.error = Raised.chain(error)
            raise
        except BaseException:  # cancelled, or a stream that its reader left
            kept.abandoned = True
            raise

    async def reply(self, request: "_Request") -> list[ChatMessageContent]:
        with self._exchange(request) as (inner, kept):
            ask = inner._inner_get_chat_message_contents  # pyright: ignore[reportPrivateUsage]  (what a connector overrides)
            replies = await ask(request.history, request.settings)
            messages = [with_own_ids(corrected(message)) for message in replies]
            kept.replies = [dump_message(message) for message in messages]
            return messages

    async def chunks(
        self, request: "_Request", attempt: int
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        assembly = ReplyAssembly()
        with self._exchange(request) as (inner, kept):
            ask = inner._inner_get_streaming_chat_message_contents  # pyright: ignore[reportPrivateUsage]  (what a connector overrides)
            stream = ask(request.history, request.settings, attempt)
            try:
                async with aclosing(corrected_chunks(stream)) as groups:
                    async for group in groups:
                        for chunk in group:
                            if chunk is not None and chunk.choice_index == 0:  # pyright: ignore[reportUnnecessaryComparison]
                                assembly.add(chunk)
                        yield group
            finally:  # what had arrived is a reply, too
                kept.replies = []
                if assembly.is_reply:
                    kept.replies.append(dump_message(with_own_ids(assembly.message())))


class _Player(_Tape):
    recording = False

    def __init__(
        self,
        cassette: Cassette,
        *,
        functions: Literal["live", "recorded"],
        on_difference: Literal["raise", "collect"],
    ) -> None:
        super().__init__()
        for name, given, known in (
            ("functions", functions, ("live", "recorded")),
            ("on_difference", on_difference, ("raise", "collect")),
        ):
            if given not in known:
                raise InvalidOptionError(
                    f"{name} must be {known[0]!r} or {known[1]!r}; got {given!r}."
                )
        self.cassette = cassette
        self.functions = functions
        self._raises = on_difference == "raise"
        self._left = list(range(len(cassette.exchanges)))
        self._not_called: set[str] = set()
        started = (run[0] for run in cassette.runs)
        self._ids = [
            (one.goal, one.run_id) for one in started if isinstance(one, RunStarted)
        ]
        self._clock = _Clock(
            self.runs, sorted(fact.at for run in cassette.runs for fact in run)
        )
        self.order: dict[tuple[str, int], list[CallStarted | CallFinished]] = {}
        self.spent: dict[tuple[str, int, int], Usage] = {}
        for (_, run_id), run in zip(self._ids, cassette.runs, strict=True):
            for fact in run:
                if isinstance(fact, CallStarted | CallFinished):
                    self.order.setdefault((run_id, fact.iteration), []).append(fact)
                if isinstance(fact, CallFinished | CallLeft | HappenedInside):
                    place = (run_id, fact.iteration, fact.index)
                    before = self.spent.get(place, Usage())
                    self.spent[place] = before + cost_of(fact)
        self.finished = {
            (*batch, fact.index): fact
            for batch, order in self.order.items()
            for fact in order
            if isinstance(fact, CallFinished)
        }
        self.changed = asyncio.Event()

    def kernel(self, kernel: Kernel) -> Kernel:
        copied = super().kernel(kernel)
        there = {*copied.services, *self.services}
        missing = {
            name: self._taped(name, model, None)
            for name, model in self.cassette.services.items()
            if name not in there
        }
        return kernel_with_services(
            copied, {**cast("dict[str, Any]", copied.services), **missing}
        )

    def finish(self) -> None:
        """Add the requests that were not made to the differences, and raise if there are any."""
        for number in self._left:
            asked, exchange = self.cassette.exchanges[number]
            if self._not_called.isdisjoint((asked.function, *exchange.within)):
                self._note(number, "the request", "as recorded", "not made")
        if self._raises and self.differences:
            raise self._differing()

    def run_id(self, goal: str) -> str:
        known = next(
            (one for one in self._ids if same(one[0], goal)),
            (goal, f"replay-{len(self.runs)}"),
        )
        with suppress(ValueError):
            self._ids.remove(known)
        return known[1]

    def clock(self, clock: Clock) -> Clock:  # noqa: ARG002  (the port's signature)
        return self._clock

    def ports(self, ports: Ports, facts: Sequence[Fact]) -> Ports:
        functions = cast("KernelFunctions", ports.functions)
        return replace(
            super().ports(ports, facts),
            functions=_TapedFunctions(functions, self, ports.max_concurrency),
        )

    def _observe(self, fact: Fact, run: RunInfo) -> None:
        super()._observe(fact, run)
        self._clock.ahead = False
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def _made(self) -> int:
        return len(self.cassette.exchanges) - len(self._left)

    def result(
        self, fact: CallFinished, checked: ResolvedCall, spent: Usage
    ) -> Finished:
        self._not_called.add(checked.function)
        if spent != Usage() and (tab := current_tab()) is not None:
            tab.charge(spent)
        error = None
        if fact.outcome != "ok":
            error = RuntimeError(fact.error)
        return Finished(
            outcome=fact.outcome,
            text=fact.result,
            error=fact.error,
            exception=error,
            terminate=fact.terminate,
        )

    def no_result(self, checked: ResolvedCall) -> Finished:
        name = checked.function
        got = json.dumps(dict(checked.arguments), default=str)
        what = f"one more call of {name}"
        self._note(self._made, what, "no such call", got, function=name)
        text = "The cassette has no result of this call."
        return Finished(
            outcome="failed", text=text, error=text, exception=LookupError(text)
        )

    def compare(self, fact: CallFinished, finished: Finished) -> None:
        before = fact.result
        now = finished.text
        if not same(before, now):
            name = fact.function
            what = f"the result of {name}"
            self._note(self._made, what, before, now, function=name)

    def _notes(self) -> Iterator[str]:
        """Say what else is not as it was recorded: the versions, and the options of a run."""
        for name, now in versions().items():
            then = self.cassette.versions.get(name)
            if then != now:
                yield f"It was recorded with {name} {then}; this is {now}."
        for run in self.cassette.runs:
            run_id = getattr(run[0], "run_id", "")
            facts = self.runs.get(run_id, run)
            before = json.dumps(options_of(run))
            after = json.dumps(options_of(facts))
            if before != after:
                yield f"The options of a run were {before}; they are {after}."

    def _differing(self) -> ReplayDifferenceError:
        return ReplayDifferenceError(self.differences, [*self._notes()])

    def _note(
        self, request: int, what: str, expected: str, got: str, *, function: str = ""
    ) -> None:
        self._add(
            Difference(
                request=request,
                what=what,
                function=function,
                expected=expected,
                got=got,
            )
        )

    def _add(self, found: Difference) -> None:
        """Add a difference once, without secrets; later requests repeat it."""
        found = replace(found, got=self._scrub.text(found.got))
        key = (found.what, found.expected, found.got)
        if found.what == "the request" or all(
            (one.what, one.expected, one.got) != key for one in self.differences
        ):
            self.differences.append(found)

    def _recorded(self, request: "_Request") -> int:
        """Find the recorded request that equals this one, or compare it with the next one."""
        asked = request.asked()
        exchanges = self.cassette.exchanges
        left = self._left
        equal = (one for one in left if exchanges[one][0].equals(asked))
        number = next(equal, None)
        if number is None and left:
            same = (one for one in left if exchanges[one][0].function == asked.function)
            number = next(same, left[0])
            for found in differences(number, exchanges[number][0], asked):
                self._add(found)
        if number is None:
            got = ""
            if asked.messages:
                got = str(asked.messages[-1].get("content"))
            more = len(exchanges)
            self._note(more, "one more request", "no further request", got)
        if number is None or (self._raises and self.differences):
            raise self._differing()
        left.remove(number)
        return number

    async def _end(self, number: int) -> None:
        """End a request as the recorded one ended."""
        exchange = self.cassette.exchanges[number][1]
        self._clock.ahead = True
        if exchange.error:
            raise Raised.again(exchange.error)
        if exchange.abandoned:
            await asyncio.sleep(_PATIENCE)
            self._note(number, "the request", "abandoned", "waited for")
            raise self._differing()

    async def reply(self, request: "_Request") -> list[ChatMessageContent]:
        number = self._recorded(request)
        await self._end(number)
        return [
            _message(one) for one in self.cassette.exchanges[number][1].replies or ()
        ]

    async def chunks(
        self, request: "_Request", attempt: int
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        number = self._recorded(request)
        for one in self.cassette.exchanges[number][1].replies or ():
            for chunk in _pieces(_message(one), attempt):
                yield [chunk]
        await self._end(number)


def _message(written: dict[str, Any]) -> ChatMessageContent:
    message = load_message(written)
    if "usage" in message.metadata:
        message.metadata["usage"] = loaded(message.metadata["usage"])
    return with_own_ids(message)


_PIECE = 16
"""Characters of a piece of streamed text."""


def _pieces(
    message: ChatMessageContent, attempt: int
) -> Iterator[StreamingChatMessageContent]:
    """Cut a reply into chunks: pieces of its text, then everything else."""
    same: dict[str, Any] = {
        "role": message.role,
        "choice_index": 0,
        "ai_model_id": message.ai_model_id,
        "function_invoke_attempt": attempt,
    }
    text = text_of(message)
    for start in range(0, len(text), _PIECE):
        piece = StreamingTextContent(choice_index=0, text=text[start : start + _PIECE])
        yield StreamingChatMessageContent(items=[piece], **same)
    others = [item for item in message.items if not isinstance(item, TextContent)]
    items: list[Any] = [
        item.model_copy(update={"index": place})
        if isinstance(item, FunctionCallContent)
        else item
        for place, item in enumerate(others)
    ]
    yield StreamingChatMessageContent(
        items=items,
        metadata=message.metadata,
        finish_reason=message.finish_reason,
        **same,
    )


class _Clock:
    """The recorded time.

    Attributes:
        ahead: Whether a reply has arrived whose fact is not in the journal yet.
    """

    def __init__(self, runs: dict[str, list[Fact]], times: Sequence[float]) -> None:
        self._runs = runs
        self._times = times or [0.0]
        self.ahead = False

    def now(self) -> float:
        """Return the time at which the next fact was recorded."""
        return self._time(0)

    def monotonic(self) -> float:
        """Return the time of the last fact, or of the next one if its reply has arrived."""
        return self._time(0 if self.ahead else -1)

    def _time(self, offset: int) -> float:
        recorded = sum(map(len, self._runs.values()))
        last = len(self._times) - 1
        place = min(recorded + offset, last)
        return self._times[max(place, 0)]

    async def sleep(self, seconds: float) -> None:
        """Do not wait."""


_PATIENCE = 5.0
"""The longest wait for what the recorded run did: for calls that ended before another
one, which a filter may delay, and for an abandoned request."""


class _TapedFunctions:
    """The functions of a replayed run, in the recorded order."""

    def __init__(
        self, inner: KernelFunctions, tape: _Player, max_concurrency: int | None
    ) -> None:
        self._inner = inner
        self._tape = tape
        self._in_order = max_concurrency is not None
        self.check = inner.check
        self.encode = inner.encode

    async def run(
        self, call: RequestedCall, checked: ResolvedCall, *, index: int, state: State
    ) -> Finished:
        batch = state.batch
        tape = self._tape
        assert batch is not None, "a function runs while its batch is open"
        place = (state.run_id, batch.iteration, index)
        fact = tape.finished.get(place)
        if fact is not None and fact.function != checked.function:
            fact = None
        recorded = tape.functions == "recorded" or place in tape.as_recorded
        function = self._inner.tools.functions.get(checked.function)
        asks = checked.nested or (function is not None and function.is_prompt)
        if recorded and not asks:
            finished = (
                tape.result(fact, checked, tape.spent[place])
                if fact is not None
                else tape.no_result(checked)
            )
        else:
            finished = await self._inner.run(call, checked, index=index, state=state)
            if fact is not None:
                tape.compare(fact, finished)
        if not self._in_order:
            await self._turn(*place)
        return finished

    async def _turn(self, run_id: str, iteration: int, index: int) -> None:
        """Wait for what came before the end of this call in the recorded batch."""
        order = self._tape.order.get((run_id, iteration), [])
        ends = (
            place
            for place, fact in enumerate(order)
            if fact.index == index and isinstance(fact, CallFinished)
        )
        before = order[: next(ends, 0)]
        tab = current_tab()
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                while (
                    tab is not None and (batch := tab.account.state.batch) is not None
                ):
                    if all(
                        _has_happened(fact, batch)
                        for fact in before
                        if fact.index < len(batch.calls)
                    ):
                        return
                    await self._tape.changed.wait()


def _has_happened(fact: CallStarted | CallFinished, batch: Batch) -> bool:
    """Whether a call has got as far as a recorded fact, or will not start."""
    call = batch.calls[fact.index]
    return (
        call.answer is not None
        or call.decided is None
        or (call.started and isinstance(fact, CallStarted))
    )


@contextmanager
def record(path: str | Path, *, scrub: Scrub = ()) -> Generator[Tape]:
    """Record the requests to the services on the tape, their replies, and the runs' journals.

    Args:
        path: The file, written when the block ends without an exception; folders are
            created.
        scrub: Regular expressions of texts that may not enter the file, and functions
            from a text to its clean form: one, or a list of them. Known forms of keys,
            values with secret names, the services' keys and the environment's secrets
            always become "[scrubbed]", which in a replay matches any text, and is what
            a called function gets. Numbers are not scrubbed.

    Raises:
        InvalidOptionError: If ``scrub`` is something else.
        CassetteError: If the file cannot be written, or could not be read.
    """
    tape = _Recorder(scrub)
    yield tape
    tape.write(Path(path))


@contextmanager
def replay(
    path: str | Path,
    *,
    functions: Literal["live", "recorded"] = "live",
    on_difference: Literal["raise", "collect"] = "raise",
) -> Generator[Tape]:
    """Replay a cassette without calling a model.

    Args:
        path: The file that `record` wrote.
        functions: ``live`` calls functions; ``recorded`` returns their recorded
            results, and an unrecorded call is a difference, and fails.
        on_difference: ``raise``: the first request that differs raises, and so does the
            end of the block if requests were not made. ``collect``: a request that
            differs still receives the recorded reply, and ``tape.differences`` has the
            differences; only a request without a recorded reply raises.

    Raises:
        CassetteError: If the file is not a valid cassette; names the place.
        ReplayDifferenceError: If the run differs from the recorded one.
    """
    tape = _Player(
        Cassette.read(Path(path)), functions=functions, on_difference=on_difference
    )
    yield tape
    tape.finish()
