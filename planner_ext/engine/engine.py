"""The only loop: perform the next action, record what happened, until the run pauses or ends.

Plain, streamed and resumed runs are this loop; a stream passes ``emit``.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

from planner_ext.core import facts, machine
from planner_ext.core.accounts import Account, CallWaits, SharedBudgets
from planner_ext.core.errors import (
    IllegalTransitionError,
    InvalidJournalError,
    described,
)
from planner_ext.core.state import OpenRun, Phase, State, open_runs
from planner_ext.core.values import Reply, TranscriptItem, Usage, frozen
from planner_ext.engine.batch import Calls
from planner_ext.engine.concurrency import (
    LeftByError,
    OutOfTime,
    StopHandle,
    contained,
    end_tasks,
)
from planner_ext.engine.journal import Recorder, lost_request, plain_fact
from planner_ext.engine.log import log_run
from planner_ext.engine.ports import (
    Clarification,
    Emit,
    Event,
    Ports,
    TextDelta,
    WorkLeftError,
)

if TYPE_CHECKING:
    from planner_ext.engine.shared import Reservations

logger = logging.getLogger(__name__)

_MOST_REPEATS = 100
"""How many actions in a row may record nothing: just before a time limit, one starts
nothing."""


@frozen
class _Announced:
    """A request that is about to be sent.

    Attributes:
        recorded: The length of the journal by then.
        again: Whether a request in the call around had failed by then.
    """

    transcript: Sequence[TranscriptItem]
    request: machine.AskModel
    recorded: int
    again: bool


class Engine:
    """Drives one run over its journal; ``record`` adds a fact and notifies the observers."""

    def __init__(
        self,
        facts: Iterable[facts.Fact],
        ports: Ports,
        *,
        emit: Emit | None = None,
        stop: StopHandle | None = None,
    ) -> None:
        self._journal = journal = Recorder(facts, ports, emit, stop)
        self.facts = journal.facts
        self.record = journal.record
        self.account = Account(
            journal.as_of_now,
            ports.within,
            threading.RLock(),
            ports.shared,
            is_recorded=ports.run is not None,
        )
        self._shared = (
            None
            if self.account.shared is None
            else _reservations(self.account.shared, journal)
        )
        self._ports = ports
        self._emit = emit
        self._stop = stop or StopHandle()
        self._calls = Calls(self._journal, ports, self._stop, self.account)
        self._asked_at: float | None = None
        self._announced: _Announced | None = None

    @property
    def state(self) -> State:
        """The journal's fold."""
        return self._journal.state

    async def begin(self, new: Sequence[facts.Fact]) -> None:
        """Record the first new facts of this activation.

        Before them, a request that an earlier process may have sent, without recording
        a reply, is recorded as failed, so that it is charged; here and in the runs
        inside.
        """
        shared = self._ports.shared
        is_kept = self._ports.store is not None
        continues = bool(self.facts)
        if self._ports.run is None:
            for run in tuple(open_runs(self.state)):
                await self._charge_lost(run)
        for fact in new:
            await self.record(fact)
        # Shared budgets know an activation by the length of its journal, so each adds a fact.
        marks_activation = shared is not None and is_kept and continues
        recheck = self.state.refused is not None  # by an earlier process
        if self.is_running and (marks_activation or recheck):
            await self.record(facts.SharedBudgetsChecked(at=self._journal.now()))
        if self.is_running and shared is not None:
            shared.begin(self.facts, is_kept=is_kept)

    async def _charge_lost(self, run: OpenRun) -> None:
        state = run.state
        for fact in lost_request(state, at=self._journal.now()):
            request = machine.AskModel(
                iteration=fact.iteration,
                offer=True,
                tool_choice=state.rules.tool_choice,
                withheld=None,
            )
            usage = self._estimated(state.transcript, request)
            await self.record(run.wrapped(replace(fact, usage=usage)))

    async def run(self) -> State:
        """Drive the run until it pauses or ends, and return its last state.

        If anything is raised, cancellation included, the request under way is recorded
        as failed, and the open batch is answered; in a store it stays open, to be
        continued.

        Raises:
            CallFailedError: If a function failed and ``raise_errors`` is set.
            IllegalTransitionError: If an action changes nothing, and would be repeated
                for ever.
        """
        tracing = self._ports.tracing
        perform = self._perform if tracing is None else tracing.around(self._perform)
        self._journal.lap()
        recorded = len(self.facts)
        repeats = 0
        try:
            while (action := await self._next()) is not None:
                await contained(perform(action))
                repeats = 0 if len(self.facts) > recorded else repeats + 1
                recorded = len(self.facts)
                if repeats > _MOST_REPEATS:
                    raise _no_progress(action)
        except BaseException as error:
            await self._end_after(error)
            raise
        return self.state

    async def _end_after(self, error: BaseException) -> None:
        """Record the end of a run that breaks off; a cancellation of one step skips no other."""
        try:
            # The state lacks what a store has recorded that ends the work on the run.
            has_left = isinstance(error, WorkLeftError)
            if machine.may_have_asked(self.state) and not has_left:
                await self._record_failed(error)
        finally:
            try:
                if self._shared is not None:
                    await self._shared.settle()
            finally:
                cancelled = isinstance(error, asyncio.CancelledError | CallWaits)
                if (
                    self.state.batch is not None
                    and self.is_running
                    and not self._is_continued(cancelled=cancelled)
                ):
                    reason = (
                        "The run was cancelled." if cancelled else "The run failed."
                    )
                    await self._journal.terminate(
                        reason, spent=self.account.unrecorded()
                    )
                elif self.is_running and self._ports.store is None:
                    # No fact says so; a worker logs its runs' faults.
                    log_run(
                        logging.INFO,
                        self.state.run_id,
                        f"broke off: {type(error).__name__}",
                    )

    def _is_continued(self, *, cancelled: bool) -> bool:
        """Return whether a run that breaks off is continued later, from a store.

        A run inside a function is continued only after a cancellation: where it fails,
        its function has failed.
        """
        if self._ports.run is None or self._ports.within is None:
            return self._ports.store is not None
        return cancelled and self._ports.within.is_kept

    @property
    def is_running(self) -> bool:
        """Whether the run has begun, and neither waits nor has ended."""
        return self.state.phase not in (Phase.NEW, Phase.PAUSED, Phase.ENDED)

    async def _next(self) -> machine.Action | None:
        """Decide on the next action, and reserve what it needs; after a refusal, decide again.

        Raises:
            IllegalTransitionError: If what was refused is refused once more.
        """
        waits = self._ports.min_iteration_seconds > 0
        while True:
            await self._take_wishes()
            action = self.account.decide(self._journal.as_of_now())
            if (
                waits
                and isinstance(action, machine.AskPlan | machine.AskModel)
                and await self._kept_interval()
            ):
                waits = False
                continue  # a stop or a deadline may have come meanwhile
            if self._shared is None:
                return action
            respondent = self._ports.respondent
            earlier = self.state.refused
            asks_model = respondent is not None and respondent.is_model
            if (
                refused := await self._shared.before(action, asks_model=asks_model)
            ) is None:
                return action
            if earlier is not None and replace(earlier, at=refused.at) == refused:
                raise _no_progress(action)
            await self.record(refused)
            waits = False

    async def _take_wishes(self) -> None:
        if (
            self._stop.reason is not None
            and self.is_running
            and self.state.stopping is None
        ):
            await self.record(
                facts.StopRequested(reason=self._stop.reason, at=self._journal.now())
            )
        if (
            self._ports.new_budget is not None
            and self.is_running
            and (new := self._ports.new_budget()) is not None
        ):
            at = self._journal.now()
            seconds = self._journal.lap()
            limits, by = new
            await self.record(
                facts.BudgetChanged(limits=limits, by=by, at=at, seconds=seconds)
            )
        next_message = self._ports.next_message
        while (
            next_message is not None
            and self.state.phase in (Phase.ASKING, Phase.ANSWERING)
            and (said := next_message()) is not None
        ):
            text, by = said
            message = self._ports.message("said", text)
            at = self._journal.now()
            await self.record(
                facts.MessageAdded(message=message, purpose="said", by=by, at=at)
            )

    async def _perform(self, action: machine.Action) -> None:  # noqa: C901  (one case for each action)
        match action:
            case machine.AskPlan():
                await self._ask_plan()
            case machine.AskModel():
                await self._ask_model(action)
            case machine.AskPerson():
                await self._ask_person(action)
            case machine.ReviewCalls():
                await self._calls.review(action)
            case machine.RunCalls():
                await self._calls.run(action)
            case machine.CompleteIteration():
                await self._complete_iteration(action)
            case machine.AddMessage(purpose=purpose, problem=problem):
                message = self._ports.message(purpose, problem)
                at = self._journal.now()
                await self.record(
                    facts.MessageAdded(message=message, purpose=purpose, at=at)
                )
            case machine.CheckAnswer():
                await self._check_answer(action.answer)
            case machine.WithholdCalls():
                await self.record(plain_fact(action, at=self._journal.now()))
            case machine.Pause():
                traced = (
                    {}
                    if self._ports.tracing is None
                    else {"trace": self._ports.tracing.trace}
                )
                at = self._journal.now()
                seconds = self._journal.lap()
                await self.record(plain_fact(action, at=at, seconds=seconds, **traced))
            case machine.Finish():
                at = self._journal.now()
                seconds = self._journal.lap()
                await self.record(plain_fact(action, at=at, seconds=seconds))
            case _:
                assert_never(action)

    async def _check_answer(self, answer: str) -> None:
        """Check an answer; one whose check a time limit or a stop interrupts is refused."""
        check = self._ports.answer_check
        if check is None:
            raise InvalidJournalError(
                "Expected a run whose answer is not checked; resume this one with its response_format and check_answer."
            )
        found = await self._journal.in_time(check.problem(answer, self.state))
        if isinstance(found, OutOfTime):
            found = (
                "revise",
                f"The check of the answer was interrupted. {self._journal.interruption}",
            )
        purpose, problem = found
        at = self._journal.now()
        await self.record(
            facts.AnswerChecked(answer=answer, problem=problem, purpose=purpose, at=at)
        )

    async def _ask_plan(self) -> None:
        prompts = self._ports.prompts
        if prompts is None:
            raise InvalidJournalError(
                "Expected a run without a plan request; resume this one with a planner."
            )
        request = machine.AskModel(
            iteration=-1, offer=False, tool_choice=None, withheld=None
        )
        reply = await self._requested(await prompts.plan_request(), request)
        if isinstance(reply, OutOfTime):
            return
        messages = self.state.transcript
        at = self._journal.now()
        seconds = self._journal.lap()
        try:
            messages = await prompts.opening(reply.text)
        finally:  # a failing template does not take back the request, nor its cost
            await self.record(
                facts.Planned(
                    plan=reply.text,
                    messages=messages,
                    usage=reply.usage,
                    at=at,
                    seconds=seconds,
                )
            )

    async def _requested(
        self, transcript: Sequence[TranscriptItem], request: machine.AskModel
    ) -> Reply | OutOfTime:
        """Make a request; one that a time limit interrupts is charged."""
        emit = self._emit
        interrupted = False
        await self._announce(
            transcript, request, is_implied=self.state.intent == "implied"
        )

        async def pass_on(event: Event) -> None:
            if emit is not None and not interrupted:
                await emit(event)

        asked = self._ports.chat.ask(
            transcript, request, None if emit is None else pass_on
        )
        reply = await self._journal.in_time(asked)
        if isinstance(reply, OutOfTime):
            interrupted = True
            await self.record(self._charge_failed(self._journal.interruption))
        elif self._shared is not None:
            self._shared.answered(reply.usage)
        return reply

    async def _announce(
        self,
        transcript: Sequence[TranscriptItem],
        request: machine.AskModel,
        *,
        is_implied: bool,
    ) -> None:
        if not is_implied:
            await self.record(
                facts.ModelAsked(iteration=request.iteration, at=self._journal.now())
            )
        within = self._ports.within
        if within is not None and self._ports.run is None:
            await within.record_request()
        self._announced = _Announced(
            transcript=transcript,
            request=request,
            recorded=len(self.facts),
            again=within is not None and within.has_failed,
        )

    @property
    def _under_way(self) -> _Announced | None:
        """The request that was announced last, unless a fact was recorded since."""
        announced = self._announced
        return (
            announced
            if announced is not None and announced.recorded == len(self.facts)
            else None
        )

    async def _record_failed(self, error: BaseException) -> None:
        """Record that the next request has no reply, or will not be made; if that fails, the error stays.

        A stream whose consumer has left takes no more events.
        """
        cancelled = isinstance(error, asyncio.CancelledError)
        reason = "The request was cancelled." if cancelled else described(error)
        try:
            failure = self._ports.chat.failure(error)
            fact = self._charge_failed(reason, failure)
            await self._journal.record(fact, streamed=not cancelled)
        except Exception as problem:
            logger.info(
                "Run %s: a failed request is not recorded: %s",
                self.state.run_id,
                problem,
            )

    def _charge_failed(
        self, reason: str, failure: facts.Failure = "processed"
    ) -> facts.RequestFailed:
        """Return the fact of a request without a reply."""
        iteration = self.state.iteration
        usage = Usage()
        under_way = self._under_way
        if under_way is not None:
            iteration = under_way.request.iteration
            if self._ports.within is not None:
                self._ports.within.has_failed = True
            kept = self._calls.is_kept
            if not facts.is_free(failure, kept=kept, again=under_way.again):
                usage = self._estimated(under_way.transcript, under_way.request)
        if self._shared is not None:
            self._shared.failed(usage)
        at = self._journal.now()
        seconds = self._journal.lap()
        return facts.RequestFailed(
            iteration=iteration,
            reason=reason,
            failure=failure,
            usage=usage,
            at=at,
            seconds=seconds,
        )

    def _estimated(
        self, transcript: Sequence[TranscriptItem], request: machine.AskModel
    ) -> Usage:
        """Estimate what a request without a reply used: one round trip, and tokens where limited."""
        try:
            estimated = self._ports.chat.estimated(transcript, request)
        except Exception:
            logger.exception(
                "The tokens of a failed request cannot be estimated; they are not charged."
            )
            estimated = Usage()
        return replace(estimated, iterations=1)

    async def _ask_model(self, action: machine.AskModel) -> None:
        reply = await self._requested(self._journal.state.transcript, action)
        if isinstance(reply, OutOfTime):
            return
        final_answer = None  # a model may call the final-answer function although it was not offered
        if not action.offer:
            resolved = map(self._ports.functions.check, reply.calls)
            final_answer = next(
                (call.answer for call in resolved if call.kind == "final_answer"), None
            )
        await self.record(
            facts.ModelReplied(
                iteration=action.iteration,
                message=reply.message,
                text=reply.text,
                calls=reply.calls,
                finish_reason=reply.finish_reason,
                usage=reply.usage,
                offered=action.offer and reply.functions_available,
                withheld=action.withheld if reply.functions_available else None,
                final_answer=final_answer,
                at=self._journal.now(),
                seconds=self._journal.lap(),
            )
        )

    async def _ask_person(self, action: machine.AskPerson) -> None:
        respondent = self._ports.respondent
        seconds = self._journal.lap()
        given = Clarification(text=None)
        if respondent is not None and respondent.is_model and action.iterations != 0:
            request = machine.AskModel(
                iteration=action.iteration, offer=False, tool_choice=None, withheld=None
            )
            await self._announce(self.state.transcript, request, is_implied=False)
        try:
            if respondent is not None:
                answer = respondent.answer(action, self.state)
                answered = await self._journal.in_time(
                    answer, person=not respondent.is_model
                )
                interrupted = Clarification(
                    text=None, iterations=1 if respondent.is_model else 0
                )
                given = interrupted if isinstance(answered, OutOfTime) else answered
        finally:
            waited = self._journal.lap()
        usage = replace(given.usage, iterations=given.iterations, active_seconds=0.0)
        if self._shared is not None:
            self._shared.answered(usage)
        await self.record(
            facts.Clarified(
                question=action.question,
                answer=given.text if given.text and given.text.strip() else None,
                iteration=action.iteration,
                index=action.index,
                by=given.by,
                usage=usage,
                at=self._journal.now(),
                seconds=seconds + waited if given.iterations else seconds,
            )
        )

    async def _kept_interval(self) -> bool:
        """Keep the least time between the starts of two requests; return whether it waited."""
        clock = self._ports.clock
        least = self._ports.min_iteration_seconds
        wait = (
            0.0
            if self._asked_at is None
            else self._asked_at + least - clock.monotonic()
        )
        if wait > 0:
            wait = (
                min(wait, max(self._journal.left(), 0.0))
                if self._journal.timed
                else wait
            )
            await self._journal.in_time(clock.sleep(wait))
        self._asked_at = clock.monotonic()
        return wait > 0

    async def _complete_iteration(self, action: machine.CompleteIteration) -> None:
        asked: dict[str, Any] = {}
        if action.called and self._ports.hook is not None:
            completed = await self._journal.in_time(
                self._ports.hook.completed(self.state)
            )
            if isinstance(completed, OutOfTime):
                logger.error(
                    "The iteration-completed callback was interrupted. %s",
                    self._journal.interruption,
                )
            else:
                asked = dict(completed)
        await self.record(
            plain_fact(
                action, at=self._journal.now(), seconds=self._journal.lap(), **asked
            )
        )


def _reservations(shared: SharedBudgets, journal: Recorder) -> "Reservations":
    from planner_ext.engine.shared import Reservations  # noqa: PLC0415  (only where budgets are shared)

    return Reservations(shared, journal)


def _no_progress(action: machine.Action | None) -> IllegalTransitionError:
    name = type(action).__name__
    return IllegalTransitionError(
        f"The run would repeat {name} for ever: nothing that happened changed its state."
    )


T = TypeVar("T")

_AHEAD = 64
"""Events that a run may be ahead of its consumer."""

_UNDER_WAY = (TextDelta, facts.CallStarted, facts.CallFinished)
"""Events of a request or call under way, which must not delay the batch's other
calls."""


async def watch(run: Callable[[Emit], Awaitable[T]]) -> AsyncGenerator[Event]:
    """Start a run and yield its events as they happen; raise what it raises.

    The run has its own task, so none of its spans, timeouts and task groups is open
    across a ``yield``. A consumer that leaves early cancels it and waits for its end.
    One that keeps up receives the decisions on a batch before its first call begins.
    """
    queue: asyncio.Queue[Event | None] = asyncio.Queue()
    room = asyncio.Event()

    async def emit(event: Event) -> None:
        queue.put_nowait(event)
        if queue.qsize() > _AHEAD:
            room.clear()
            await room.wait()
        elif not isinstance(event, _UNDER_WAY):
            # A consumer that waits for this event may leave before the run continues.
            await asyncio.sleep(0)

    task = asyncio.ensure_future(_in_task(run, emit))
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (event := await queue.get()) is not None:
            if queue.qsize() <= _AHEAD:
                room.set()
            yield event
        await task
    except asyncio.CancelledError as error:
        await _end_for(error, task)
        raise
    finally:
        await end_tasks(task)


async def _in_task(run: Callable[[Emit], Awaitable[T]], emit: Emit) -> T:
    try:
        return await contained(run(emit))
    except GeneratorExit as error:
        # A future that hands it on would close who awaits it.
        raise LeftByError(error) from error


async def _end_for(error: asyncio.CancelledError, task: asyncio.Future[T]) -> None:
    # A second one changes nothing: the first is raised.
    with suppress(asyncio.CancelledError):
        await end_tasks(task)
    try:
        task.result()
    except BaseException as raised:
        vars(error).update(vars(raised))
