"""``FunctionCallingStepwisePlanner``: a goal in, an answer out, within a budget that is never exceeded."""

import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.contents import ChatHistory, ChatMessageContent
from semantic_kernel.functions import KernelArguments, KernelFunction
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.approval.decisions import (
    AuthorizeHooks,
    Decision,
    DecisionRequest,
)
from planner_ext.core.accounts import Tab
from planner_ext.core.facts import Rules
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.text import check_goal
from planner_ext.engine.authorization import refusal_of
from planner_ext.engine.concurrency import StopHandle, streams
from planner_ext.engine.ports import RunStore
from planner_ext.planner.options import FunctionCallingStepwisePlannerOptions
from planner_ext.planner.run import (
    FunctionCallingStepwisePlannerResult,
    PlannerEvent,
    PlannerRun,
    result_of,
    run_started,
)
from planner_ext.sk.charging.nested import (
    ParentRun,
    current_parent_run,
    planner_of,
    tab_in,
)
from planner_ext.sk.chat.transport import select_service
from planner_ext.sk.checkpoint import Checkpoint, DecisionsTaken, Taking
from planner_ext.sk.checks import instance_of
from planner_ext.sk.errors import (
    DecisionRefusedError,
    InvalidOptionError,
    RunEndedError,
)
from planner_ext.sk.functions.questions import OWN_PLUGIN, own_function
from planner_ext.sk.run.context import (
    RunContext,
    checked_messages,
    function_names,
    prepare,
    refuse_unknown,
    unasked_functions,
    unwrapped,
)
from planner_ext.sk.run.options import CheckedOptions
from planner_ext.sk.run.prompts import (
    PlannerPrompts,
    Templates,
    default_plan_prompt,
    default_step_prompt,
)

if TYPE_CHECKING:
    from planner_ext.engine.activation import Activation
    from planner_ext.planner.kept import KeptRun
    from planner_ext.sk.run.form import ResponseForm

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class FunctionCallingStepwisePlanner:
    """Reaches a goal with the functions of a kernel: plans, calls functions step by step, and answers.

    It replaces the planner that Semantic Kernel removed in 2025, with the same names.
    One planner may be used for many runs, also concurrently.
    """

    def __init__(
        self,
        service_id: str | None = None,
        options: FunctionCallingStepwisePlannerOptions | None = None,
    ) -> None:
        """Set the planner up.

        Args:
            service_id: The chat completion service; None uses the kernel's selection.
            options: None uses the defaults.

        Raises:
            PlannerInvalidConfigurationError: If the options are invalid.
        """
        self.service_id = (
            None if service_id is None else instance_of("service_id", service_id, str)
        )
        given = FunctionCallingStepwisePlannerOptions() if options is None else options
        self.options = instance_of(
            "options", given, FunctionCallingStepwisePlannerOptions
        )
        plan = self.options.get_initial_plan
        step = self.options.get_step_prompt
        self._templates = Templates.read(
            default_plan_prompt if plan is None else plan(),
            default_step_prompt if step is None else step(),
        )
        self._taken = DecisionsTaken()
        self._said_unguarded = False
        self._read: tuple[object, CheckedOptions] | None = None
        self._checked_options()  # which checks them

    def _checked_options(self) -> CheckedOptions:
        """Read the options; cached until one changes, also a list in place."""
        options = self.options
        lists = (tuple(options.interceptors), tuple(options.observers))
        given = (*vars(options).values(), *lists, set(options.model_fields_set))
        if self._read is None or self._read[0] != given:
            self._read = (given, CheckedOptions.of(self._taken, **options.run_options))
        return self._read[1]

    @property
    def generate_plan_yaml(self) -> str:
        """The YAML of the plan prompt, from ``get_initial_plan``; may be set, for runs that begin later.

        Raises:
            PlannerInvalidConfigurationError: If it is set to an invalid prompt
                template; then nothing is changed.
        """
        return self._templates.plan_yaml

    @generate_plan_yaml.setter
    def generate_plan_yaml(self, text: str) -> None:
        self._templates = Templates.read(text, self._templates.step_prompt)

    @property
    def step_prompt(self) -> str:
        """The template that opens the steps, from ``get_step_prompt``; may be set, like `generate_plan_yaml`."""
        return self._templates.step_prompt

    @step_prompt.setter
    def step_prompt(self, text: str) -> None:
        self._templates = Templates.read(self._templates.plan_yaml, text)

    async def invoke(
        self,
        kernel: Kernel,
        question: str,
        arguments: KernelArguments | None = None,
        *,
        chat_history: ChatHistory | None = None,
        stop: StopHandle | None = None,
        **kwargs: Any,
    ) -> FunctionCallingStepwisePlannerResult:
        """Reach a goal.

        Args:
            kernel: Its functions may be called; it is not changed.
            question: The goal.
            arguments: The application's, for functions and templates; never stored, and
                not changed.
            chat_history: An earlier conversation; the goal is added to a copy of it,
                and no plan is asked for.
            stop: Ends the run from outside.
            **kwargs: More arguments, by name.

        Returns:
            A result for every expected end: answered, paused, asked, limit reached,
            stopped, incomplete.

        Raises:
            PlannerInvalidConfigurationError: If the goal is empty, there is no chat
                completion service, or an argument or option is invalid.
            InvalidHistoryError: If the ``chat_history`` is invalid.
            LimitReachedError: At a limit, if the budget says ``on_limit="raise"``.
            ServiceCallError: If a request fails. Every exception out of a run has
                ``chat_history`` and ``checkpoint`` as attributes.
            InvalidReplyError: If a response is not a valid reply.
        """
        run = await self._start(
            kernel,
            question,
            _merged(arguments, kwargs),
            chat_history,
            stop,
            streaming=False,
        )
        return await run.result()

    def invoke_sync(
        self,
        kernel: Kernel,
        question: str,
        arguments: KernelArguments | None = None,
        *,
        chat_history: ChatHistory | None = None,
        stop: StopHandle | None = None,
        **kwargs: Any,
    ) -> FunctionCallingStepwisePlannerResult:
        """Reach a goal as `invoke` does, and wait for the result: for scripts and notebooks.

        All such runs of a process share one event loop in a background thread, with the
        caller's context variables, so that clients keep their connections. A service
        whose client has made requests on another event loop, such as a notebook's own,
        may not work on this one; use ``await invoke(...)`` then. A forked process needs
        clients of its own.

        Interrupting the call cancels the run; the ``KeyboardInterrupt`` carries history
        and checkpoint.

        Raises:
            PlannerInvalidConfigurationError: As `invoke`; and if an async function of
                such a run calls it, whose loop would wait for itself.
            Exception: As `invoke`.
        """
        options: dict[str, Any] = {"chat_history": chat_history, "stop": stop, **kwargs}
        return _run_sync(
            self.invoke(kernel, question, arguments, **options), door="invoke_sync"
        )

    @streams
    async def invoke_stream(
        self,
        kernel: Kernel,
        question: str,
        arguments: KernelArguments | None = None,
        *,
        chat_history: ChatHistory | None = None,
        stop: StopHandle | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[PlannerEvent]:
        """Reach a goal as `invoke` does, with streaming requests, and yield the events of the run.

        Yields:
            `TextDelta` for text as it arrives, the facts of the run, and last a
            `ResultReady`. Leaving the stream early cancels the run.
        """
        run = await self._start(
            kernel,
            question,
            _merged(arguments, kwargs),
            chat_history,
            stop,
            streaming=True,
        )
        async with aclosing(run.events()) as events:
            async for event in events:
                yield event

    async def resume(
        self,
        kernel: Kernel,
        checkpoint: Checkpoint | str,
        decisions: Mapping[str, Decision] | None = None,
        *,
        arguments: KernelArguments | None = None,
        budget: Budget | None = None,
        stop: StopHandle | None = None,
    ) -> FunctionCallingStepwisePlannerResult:
        """Resume a run that is paused, that a limit or a stop ended, or that a fault interrupted.

        This planner and its copies accept one decision on a call, and remember the
        newest 100,000; a resume that fails before a function has started releases its
        decisions. Another planner or process would run the call again: if that can
        happen, keep the run in a store (`planner_ext.durable.Runs`).

        Args:
            kernel: Its functions may be called; it may be another than the run began
                with.
            checkpoint: From the run's result or its error, or its JSON text. Anyone who
                can write an unsigned one can put an approval in it; a
                ``checkpoint_key`` refuses those.
            decisions: By call id. No request is made before every call is decided:
                without decisions a paused run stays paused, except for expired
                questions.
            arguments: The application's arguments again; a checkpoint does not hold
                them.
            budget: Replaces the run's limits; what was spent still counts, and the
                budget of a wrapped service still applies. ``max_iterations`` defaults
                to that of the options.
            stop: Ends the run from outside.

        Raises:
            RunEndedError: If the run was answered.
            DecisionRefusedError: If a decision is invalid, or was taken before; then
                none is taken, and nothing runs.
            InvalidCheckpointError: If the checkpoint contradicts itself, is not signed
                with the ``checkpoint_key``, or is that of a run in a store: see `Runs`.
            Exception: As `invoke`.
        """
        run = await self._resume(
            kernel,
            checkpoint,
            decisions,
            arguments,
            budget=budget,
            stop=stop,
            streaming=False,
        )
        return await run.result()

    def resume_sync(
        self,
        kernel: Kernel,
        checkpoint: Checkpoint | str,
        decisions: Mapping[str, Decision] | None = None,
        *,
        arguments: KernelArguments | None = None,
        budget: Budget | None = None,
        stop: StopHandle | None = None,
    ) -> FunctionCallingStepwisePlannerResult:
        """Resume as `resume` does; wait as `invoke_sync` does."""
        resumed = self.resume(
            kernel, checkpoint, decisions, arguments=arguments, budget=budget, stop=stop
        )
        return _run_sync(resumed, door="resume_sync")

    @streams
    async def resume_stream(
        self,
        kernel: Kernel,
        checkpoint: Checkpoint | str,
        decisions: Mapping[str, Decision] | None = None,
        *,
        arguments: KernelArguments | None = None,
        budget: Budget | None = None,
        stop: StopHandle | None = None,
    ) -> AsyncGenerator[PlannerEvent]:
        """Resume as `resume` does; yield what `invoke_stream` does."""
        run = await self._resume(
            kernel,
            checkpoint,
            decisions,
            arguments,
            budget=budget,
            stop=stop,
            streaming=True,
        )
        async with aclosing(run.events()) as events:
            async for event in events:
                yield event

    def cancel(
        self, checkpoint: Checkpoint | str, *, by: str = "", reason: str = ""
    ) -> FunctionCallingStepwisePlannerResult:
        """End a paused run for good: every pending call is answered "not executed", and nothing runs.

        Args:
            checkpoint: The run's checkpoint, or its JSON text.
            by: Who cancels, for the record and the model.
            reason: Why, for the record and the model.

        Returns:
            The stopped run.

        Raises:
            RunEndedError: If the run has ended already.
            DecisionRefusedError: If this planner has taken a decision on one of the
                calls, or the ``authorize`` hook does not allow it.
            InvalidCheckpointError: As `resume`, but only with the planner's own
                ``checkpoint_key``.
        """
        from planner_ext.sk.run.resume import (  # noqa: PLC0415  (only to end a paused run)
            cancelling_facts,
            end_cancelled,
            given_checkpoint,
        )

        options = self._checked_options()
        loaded = given_checkpoint(checkpoint, options.checkpoint_key)
        hook = options.approval.authorize
        if hook is not None:
            request = DecisionRequest(
                action="cancel", by=by, run_id=loaded.state().run_id
            )
            if (
                refusal := _run_sync(refusal_of(hook, request), door="cancel")
            ) is not None:
                raise DecisionRefusedError(refusal)
        facts = cancelling_facts(loaded, by=by, reason=reason, at=options.clock.now())
        state = end_cancelled(loaded, facts, options.taken)
        return result_of(state, (*loaded.facts, *facts), key=options.checkpoint_key)

    def journaled(
        self,
        kernel: Kernel,
        activation: "Activation",
        *,
        arguments: KernelArguments | None = None,
    ) -> "KeptRun":
        """@private Prepare a run from a store, to be driven to its next pause or end.

        The application's arguments replace the submitted ones, by name.
        """
        from planner_ext.planner.kept import KeptRun, rules_kept  # noqa: PLC0415  (only for a run from a store)

        own = KernelArguments() if arguments is None else arguments
        if not activation.facts:
            self._say_unguarded(kernel)
        submitted = {
            name: value
            for name, value in activation.arguments.items()
            if name not in own
        }
        context = self._prepare(
            kernel,
            activation.goal,
            _merged(own, submitted),
            streaming=activation.emit is not None,
            budget=activation.budget,
            kept=rules_kept(activation),
            store=activation.store,
            authorize=activation.authorize,
        )
        return KeptRun(options=self.options, context=context, activation=activation)

    def unguarded(self, kernel: Kernel) -> str | None:
        """@private Say, once, that nothing decides which functions of a kernel run; or None."""
        if self._said_unguarded or not (
            names := unasked_functions(kernel, self._checked_options())
        ):
            return None
        self._said_unguarded = True
        more = (
            f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        )
        return (
            "Every function runs unasked: planner and kernel have no policy, no interceptor and no function marked "
            f"with @requires_approval. The kernel has {', '.join(names[:_MOST_NAMED])}{more}. Give "
            "interceptors=[ApprovalPolicy.from_yaml(path)], mark what a person must approve, or have every call wait: "
            'ApprovalSettings(unmatched="defer"); on the command line --policy or --ask-all.'
        )

    def _say_unguarded(self, kernel: Kernel) -> None:
        text = self.unguarded(kernel)
        if text is not None:
            logger.info(text)

    @property
    def authorize(self) -> AuthorizeHooks:
        """@private The hook that says who may decide, for the runs of a store."""
        return (
            None if self.options.approval is None else self.options.approval.authorize
        )

    async def _start(
        self,
        kernel: Kernel,
        question: str,
        arguments: KernelArguments,
        chat_history: ChatHistory | None,
        stop: StopHandle | None,
        *,
        streaming: bool,
    ) -> PlannerRun:
        check_goal(question)
        before: Sequence[ChatMessageContent] = ()
        if chat_history is not None:
            given = instance_of("chat_history", chat_history, ChatHistory)
            before = checked_messages(
                given.messages, self.options.on_invalid_history, kernel
            )
        stop = None if stop is None else instance_of("stop", stop, StopHandle)
        context = self._prepare(
            kernel, question, arguments, streaming=streaming, stop=stop
        )
        if context.parent is None and not self._said_unguarded:
            self._say_unguarded(kernel)
        continues = chat_history is not None
        parent = context.parent
        if parent is not None and parent.known:
            from planner_ext.sk.charging.again import check_same_run  # noqa: PLC0415  (only where it is called again)

            check_same_run(parent.known[0], goal=question, messages=before)
            return PlannerRun(context=context, facts=parent.known)
        started = await run_started(
            self.options,
            context,
            question,
            context.new_run_id(question),
            before=before,
            continues=continues,
            guards=context.guards_inside(),
        )
        return PlannerRun(context=context, new=(started,))

    async def _resume(
        self,
        kernel: Kernel,
        checkpoint: Checkpoint | str,
        decisions: Mapping[str, Decision] | None,
        arguments: KernelArguments | None,
        *,
        budget: Budget | None,
        stop: StopHandle | None,
        streaming: bool,
    ) -> PlannerRun:
        from planner_ext.sk.run.inside import resumed  # noqa: PLC0415  (only to resume)
        from planner_ext.sk.run.resume import ResumeRequest, as_given, given_checkpoint  # noqa: PLC0415  (only to resume)

        stop = None if stop is None else instance_of("stop", stop, StopHandle)
        loaded = given_checkpoint(checkpoint)
        state = loaded.state()
        if state.ended is not None and state.ended.status == "answered":
            raise RunEndedError(
                "The run of this checkpoint was answered; there is nothing to resume. Invoke with a new goal."
            )
        context = self._prepare(
            kernel,
            state.goal,
            _merged(arguments, {}),
            streaming=streaming,
            stop=stop,
            budget=budget,
            kept=state.rules,
        )
        options = context.options
        if options.checkpoint_key is not None:
            loaded = given_checkpoint(checkpoint, options.checkpoint_key)
        limits = None if budget is None else options.budget
        given = ResumeRequest(
            checkpoint=loaded,
            decisions=as_given({} if decisions is None else decisions),
            budget=limits,
        )
        taking = Taking(options.taken)
        facts = await resumed(context, given, taking)
        return PlannerRun(context=context, facts=loaded.facts, new=facts, taking=taking)

    def _prepare(
        self,
        kernel: Kernel,
        goal: str,
        arguments: KernelArguments,
        *,
        streaming: bool,
        stop: StopHandle | None = None,
        budget: Budget | None = None,
        kept: Rules | None = None,
        store: RunStore | None = None,
        authorize: AuthorizeHooks = None,
        parent: ParentRun | None = None,
    ) -> RunContext:
        """Find service, settings and functions for one run.

        A resumed run has the new ``budget``, or the limits of the rules ``kept``. One
        that is looked at, and not driven, gets its ``parent``.
        """
        if parent is None and store is None:
            # A run in a store has its own budget, even if it begins inside another run.
            parent = current_parent_run(tab_in(kernel))
            if parent is not None and kept is None:
                parent = parent.enter(lambda begun: getattr(begun, "goal", "") == goal)
                kept = None
                if parent.known:
                    kept = fold(parent.known).rules
        own = self.options
        options = self._checked_options()
        service, chosen = select_service(
            kernel, self.service_id, arguments, own.execution_settings
        )
        service, options = unwrapped(service, options)
        limits = self._limits(options, budget, kept)
        approval = (
            options.approval
            if authorize is None
            else options.approval.asking(authorize)
        )
        options = replace(options, budget=limits, approval=approval)
        final_answer, ask_user = _own_functions(own, options, kernel)
        behavior = chosen.function_choice_behavior
        running = (self,) if parent is None else (*parent.planners, self)
        select = partial(
            _selected, options=own, running=running, kernel=kernel, goal=goal
        )
        if behavior is not None and behavior.type_ is FunctionChoiceType.NONE:
            select = _none
        return prepare(
            kernel=kernel,
            service=service,
            settings=chosen,
            options=options,
            arguments=arguments,
            streaming=streaming,
            parent=parent,
            wrap=_charged,
            stop=stop,
            store=store,
            select=select,
            final_answer=final_answer,
            ask_user=ask_user,
            max_completion_tokens=own.max_completion_tokens,
            plan_settings=self._templates.plan_settings,
            form=_response_form(own.response_format),
            prompts=lambda tools: PlannerPrompts(
                kernel=kernel,
                arguments=arguments,
                goal=goal,
                templates=self._templates,
                tools=tools,
                hands_over=final_answer is not None,
            ),
            planner=self,
        )

    def _looked_at(
        self,
        kernel: Kernel,
        goal: str,
        arguments: KernelArguments,
        *,
        rules: Rules,
        parent: ParentRun,
    ) -> RunContext:
        """@private Prepare a run inside a call that waits, to check decisions on its calls; it is not driven."""
        return self._prepare(
            kernel, goal, arguments, streaming=False, kept=rules, parent=parent
        )

    def _limits(
        self, options: CheckedOptions, budget: Budget | None, kept: Rules | None
    ) -> Budget:
        if budget is not None:
            given = options.bounded(budget)
            most = self._checked_options().budget.max_iterations
            return replace(given, max_iterations=given.max_iterations or most)
        if kept is None:
            return options.budget
        return options.bounded(kept.limits)


_MOST_NAMED = 10


def _run_sync(work: Coroutine[Any, Any, _T], *, door: str) -> _T:
    from planner_ext.engine.background import run_sync  # noqa: PLC0415  (only where code that is not async waits)

    return run_sync(work, door=door)


def _response_form(given: object) -> "ResponseForm | None":
    if given is None:
        return None
    from planner_ext.sk.run.form import response_form  # noqa: PLC0415  (only where an answer has a form)

    return response_form(given)


def _charged(service: AIServiceClientBase, tab: Tab) -> AIServiceClientBase:
    from planner_ext.service import charged_service  # noqa: PLC0415  (only where a function asks a model)

    return charged_service(service, tab)


def _merged(
    arguments: KernelArguments | None, kwargs: dict[str, Any]
) -> KernelArguments:
    merged = KernelArguments() if arguments is None else copy(arguments)
    for name, value in kwargs.items():
        merged[name] = value
    return merged


def _own_functions(
    options: FunctionCallingStepwisePlannerOptions,
    settings: CheckedOptions,
    kernel: Kernel,
) -> tuple[KernelFunction | None, KernelFunction | None]:
    insists = options.require_final_answer_function
    offered = {
        "SendFinalAnswer": insists or options.plan is not False,
        "AskUser": settings.takes_questions
        or (insists and settings.max_clarifications != 0),
    }
    if options.excluded_plugins or options.excluded_functions:
        _check_exclusions(options, kernel)
        for name in offered:
            in_kernel = (
                OWN_PLUGIN in kernel.plugins
                and name in kernel.plugins[OWN_PLUGIN].functions
            )
            names = {name, f"{OWN_PLUGIN}-{name}"}
            if not in_kernel and (
                names & options.excluded_functions
                or OWN_PLUGIN in options.excluded_plugins
            ):
                offered[name] = False
    if insists and not offered["SendFinalAnswer"]:
        raise InvalidOptionError(
            "require_final_answer_function=True needs UserInteraction-SendFinalAnswer, which is in excluded_functions "
            "or excluded_plugins. Take it out of them, or accept a plain answer."
        )
    final_answer, ask_user = (
        own_function(name) if is_offered else None
        for name, is_offered in offered.items()
    )
    return final_answer, ask_user


def _check_exclusions(
    options: FunctionCallingStepwisePlannerOptions, kernel: Kernel
) -> None:
    """Refuse names that the kernel does not have: a misspelt name excludes nothing."""
    refuse_unknown(
        "excluded_plugins", options.excluded_plugins, {*kernel.plugins, OWN_PLUGIN}
    )
    names = function_names(kernel)
    own = {name.partition("-")[2] for name in names}
    refuse_unknown("excluded_functions", options.excluded_functions, names, also=own)


def _none(_: Sequence[KernelFunction]) -> Sequence[KernelFunction]:
    return ()


def _selected(
    functions: Sequence[KernelFunction],
    *,
    options: FunctionCallingStepwisePlannerOptions,
    running: Sequence[object],
    kernel: Kernel,
    goal: str,
) -> Sequence[KernelFunction]:
    functions = [
        function for function in functions if planner_of(function) not in running
    ]
    if options.get_available_functions is not None:
        chosen = {
            function.fully_qualified_name
            for function in options.get_available_functions(options, goal)
        }
        there = {
            function.fully_qualified_name
            for function in kernel.get_full_list_of_function_metadata()
        }
        if unknown := sorted(chosen - there):
            raise InvalidOptionError(
                f"get_available_functions gave {', '.join(unknown)}; the kernel has "
                f"{', '.join(sorted(there)) or 'no function'}. Give functions of the kernel."
            )
        functions = [
            function
            for function in functions
            if function.fully_qualified_name in chosen
        ]
    plugins = options.excluded_plugins
    names = options.excluded_functions
    if not plugins and not names:
        return functions
    return [
        function
        for function in functions
        if function.plugin_name not in plugins
        and not {function.name, function.fully_qualified_name} & names
    ]
