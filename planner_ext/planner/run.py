"""One run of the planner, driven from its first new facts to its result."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from pydantic import Field, PrivateAttr
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent
from semantic_kernel.kernel_pydantic import KernelBaseModel

from planner_ext.approval.decisions import DecisionRecord, ToolCall
from planner_ext.approval.waiting import pending_calls
from planner_ext.core.errors import not_answered
from planner_ext.core.facts import Fact, Guards, Planned, RunStarted
from planner_ext.core.state import State
from planner_ext.core.values import Status, Usage
from planner_ext.engine.batch import BudgetHandle
from planner_ext.engine.engine import watch
from planner_ext.engine.ports import Emit, Event, ResultReady, TextDelta
from planner_ext.planner.options import FunctionCallingStepwisePlannerOptions
from planner_ext.sk.checkpoint import Checkpoint, SigningKey, Taking, journal_signature
from planner_ext.sk.run.context import RunContext
from planner_ext.sk.run.outcome import chat_history, raise_at_limit, status_of

if TYPE_CHECKING:
    from planner_ext.sk.run.form import ResponseForm


class FunctionCallingStepwisePlannerResult(KernelBaseModel):
    """The outcome of a run.

    Attributes:
        status: ``answered``; ``incomplete``: the last reply was cut short or empty;
            ``paused``: a call waits for a decision; ``asked``: only questions wait, for
            an answer; ``limit_reached``: see ``limit``; ``stopped``.
        final_answer: The answer, forced at a limit if need be, or ""; JSON text if it
            has the ``response_format``.
        value: The answer as an instance of the ``response_format``'s model, or as JSON
            values; None without a ``response_format``, or if the answer lacks it.
        chat_history: Every message of the run, the final one included; servers accept
            it.
        iterations: Round trips charged.
        tool_calls: Functions started, failures included.
        usage: Tokens, cost and active time of all requests.
        limit: The limit that ended the run, or None.
        pending: The calls and questions that wait for a person.
        reason: Why the run ended as it did, in words; "" if it was answered.
        plan: "" if no plan was made.
        facts: The journal's facts.
    """

    final_answer: str = ""
    value: Any = None
    chat_history: ChatHistory | None = Field(default=None, repr=False)
    iterations: int = 0
    status: Status = "answered"
    tool_calls: int = 0
    usage: Usage = Usage()
    limit: str | None = None
    pending: tuple[ToolCall, ...] = ()
    reason: str = ""
    plan: str = ""
    facts: tuple[Any, ...] = Field(default=(), exclude=True, repr=False)
    _signature: str | None = PrivateAttr(default=None)

    @property
    def checkpoint(self) -> Checkpoint:
        """The run's checkpoint, to resume it; signed if the planner has a ``checkpoint_key``."""
        return Checkpoint.signed_as(self.facts, self._signature)

    @property
    def decisions(self) -> tuple[DecisionRecord, ...]:
        """The decisions on the run's calls with author, time and arguments, in order."""
        from planner_ext.approval.record import decisions_of  # noqa: PLC0415  (only where they are read)

        return decisions_of(self.facts)

    def to_html(self, *, title: str = "") -> str:
        """Write the run as one HTML file, with nothing to fetch and no script.

        Args:
            title: The page's title; "" is the goal.

        Raises:
            PlannerExtError: If jinja2 is not installed: extra ``cli`` or ``inbox``.
        """
        from planner_ext.timeline import page_of, timeline_of  # noqa: PLC0415  (a run needs no page)

        return page_of([timeline_of(self.facts)], title=title)

    def raise_for_status(self) -> Self:
        """Return this result if the run was answered; also works for a result that was stored and loaded.

        Raises:
            LimitReachedError: If a limit ended the run.
            RunNotAnsweredError: If the run is paused, or has no answer for another
                reason.
        """
        if self.status == "answered":
            return self
        raise not_answered(
            status=self.status,
            reason=self.reason,
            limit=self.limit,
            iterations=self.iterations,
            tool_calls=self.tool_calls,
            usage=self.usage,
            chat_history=self.chat_history,
            checkpoint=self.checkpoint if self.facts else None,
        )


def result_of(
    state: State,
    facts: tuple[Fact, ...],
    form: "ResponseForm | None" = None,
    *,
    written: Sequence[ChatMessageContent] | None = None,
    key: SigningKey | None = None,
) -> FunctionCallingStepwisePlannerResult:
    """Build the result of a run, with its answer parsed if there is a response format.

    ``written`` is the transcript as messages, if known; without a ``key`` the
    checkpoint is unsigned.
    """
    ended = state.ended
    answer = ended.answer if ended is not None else ""
    value = (
        form.parse(answer)
        if form is not None and answer and not form.problem(answer)
        else None
    )
    result = FunctionCallingStepwisePlannerResult(
        final_answer=answer,
        value=value,
        chat_history=chat_history(state, written),
        iterations=state.usage.iterations,
        status=status_of(state),
        tool_calls=state.usage.tool_calls,
        usage=state.usage,
        limit=ended.limit if ended is not None else None,
        pending=pending_calls(state),
        reason=ended.reason if ended is not None else "",
        plan=next((fact.plan for fact in facts if isinstance(fact, Planned)), ""),
        facts=facts,
    )
    result._signature = journal_signature(facts, key)  # pyright: ignore[reportPrivateUsage]  (not a field: it is not an input)
    return result


PlannerEvent: TypeAlias = (
    TextDelta | Fact | ResultReady[FunctionCallingStepwisePlannerResult]
)
"""An event that ``invoke_stream`` yields."""


async def run_started(
    options: FunctionCallingStepwisePlannerOptions,
    context: RunContext,
    goal: str,
    run_id: str,
    *,
    before: Sequence[ChatMessageContent] = (),
    continues: bool = False,
    guards: Guards | None = None,
) -> RunStarted:
    """Build the first fact of a run: its rules and its opening messages.

    A run that continues a history, which comes ``before``, asks for no plan.
    """
    rules = replace(
        context.rules(),
        plan=options.plan is True and not continues,
        charge_plan=options.charge_plan or context.parent is not None,
        rounds_per_step=1 if options.control == "use_attempts" else None,
        close_on_denial=options.control == "pre_invoke",
        require_final_answer=options.require_final_answer_function,
    )
    if isinstance(options.plan, str):
        assert context.prompts is not None, "a planner's context has prompts"
        opening = await context.prompts.opening(options.plan)
    else:  # a plan that is asked for replaces it later
        opening = (ChatMessageContent(role=AuthorRole.USER, content=goal),)
    at = context.options.clock.now()
    return RunStarted(
        run_id=run_id,
        rules=rules,
        messages=(*before, *opening),
        goal=goal,
        guards=guards,
        at=at,
    )


@dataclass(kw_only=True, eq=False)
class PlannerRun:
    """One run, from its first new facts to its result.

    Attributes:
        facts: The journal that is resumed.
        new: The facts after it: started, or resumed with the decisions of ``taking``.
        budget: Changes the run's limits from outside.
    """

    context: RunContext
    facts: Sequence[Fact] = ()
    new: Sequence[Fact] = ()
    budget: BudgetHandle | None = None
    taking: Taking | None = None

    async def result(
        self, emit: Emit | None = None
    ) -> FunctionCallingStepwisePlannerResult:
        """Run to the next pause or end; raises as the planner's `resume` does."""
        context = self.context
        engine = context.engine(self.facts, emit=emit, budget=self.budget)
        with nullcontext() if self.taking is None else self.taking.reserve(engine):
            await context.drive(engine, self.new)
        key = context.options.checkpoint_key
        raise_at_limit(engine.state, engine.facts, key)
        written = context.chat.messages(engine.state.transcript)
        return result_of(
            engine.state, tuple(engine.facts), context.form, written=written, key=key
        )

    async def events(self) -> AsyncGenerator[PlannerEvent]:
        """Run, and yield the events; the result comes last."""
        results: list[FunctionCallingStepwisePlannerResult] = []

        async def run(emit: Emit) -> None:
            async def show(event: Event) -> None:
                if not isinstance(event, TextDelta) or event.text:
                    await emit(event)

            results.append(await self.result(show))

        async with aclosing(watch(run)) as events:
            async for event in events:
                yield event
        yield ResultReady(result=results[0])
