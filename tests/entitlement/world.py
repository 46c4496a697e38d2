"""The real parts of a situation: a kernel with functions, a scripted model, guards of the package, and its people."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Annotated, Any

from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.functions import KernelArguments, kernel_function

from entitlement.record import MISSING, Answer, Record, Replied, Spoiled, Waited, within
from entitlement.rules import STAFF, Arguments, Chain, Hook, Opinion, Policy, may_decide
from entitlement.scenarios import AMOUNTS, PAYEES, Call, Scenario
from planner_ext import (
    ApprovalPolicy,
    ApprovalSettings,
    Approve,
    Defer,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    PlannerPlugin,
    Supply,
    requires_approval,
)
from planner_ext.hitl_manager import ToolCall
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.stock import add_filter

__all__ = ["People", "World", "goal_of"]

Hidden = Annotated[Kernel, {"include_in_function_choices": False}]
GOAL = "RUN:"
JUNK = (True, False, "yes", 1, {"approve": True})
"""What is no decision."""


def goal_of(run: str) -> str:
    """Write the goal by which the model knows a run."""
    return f"{GOAL}{run}"


def auto() -> PromptExecutionSettings:
    """Make settings of stock Semantic Kernel under which functions are called."""
    return PromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )


class World:
    """A kernel in which a situation happens, and the record of what happened."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.record = Record(scenario)
        self.people = People(scenario, self.record)
        self._runs = {prompt.name: prompt.turns for prompt in scenario.prompts}
        self._runs |= {one.id: one.turns for _, _, one in scenario.calls() if one.inner}
        self.service = ScriptedChatCompletion(self._reply)
        self.kernel = self._kernel()
        self._add_inner(self.kernel)

    def _kernel(self) -> Kernel:
        kernel = Kernel(services=self.service)
        kernel.add_functions(
            "bank", [self._tool(name) for name in ("pay", "move", "look")]
        )

        async def note(context: Any, next: Any) -> None:
            with within(context.function_call_content.id):
                await next(context)

        add_filter(kernel, "auto_function_invocation", note)
        return kernel

    @property
    def marks(self) -> Mapping[str, tuple[str, ...]]:
        """The marked functions with their roles."""
        return next(
            (chain.marks for chain in self.scenario.guards.all if chain.marks), {}
        )

    def _tool(self, name: str) -> Any:
        async def tool(to: str, amount: int = MISSING) -> str:
            self.record.started(name, to=to, amount=amount)
            return f"{name} done"

        tool.__name__ = name
        tool.__qualname__ = name
        made: Any = kernel_function(name=name)(tool)
        return (
            requires_approval(roles=self.marks[name])(made)
            if name in self.marks
            else made
        )

    def _add_inner(self, kernel: Kernel) -> None:
        world = self

        class Inner:
            @kernel_function
            async def invoke(self, step: str, kernel: Hidden) -> str:
                world.record.started("invoke", step=step)
                done: list[str] = []
                for one in (
                    one
                    for turn in world.record.call_of(step).turns
                    for one in turn
                    if one.inner is None
                ):
                    with within(one.id):
                        try:
                            await kernel.invoke(
                                plugin_name="bank",
                                function_name=one.function,
                                **one.written(),
                            )
                        except Exception as error:
                            done.append(str(error))
                return f"invoked {done}"

            @kernel_function
            async def prompt(self, step: str, kernel: Hidden) -> str:
                world.record.started("prompt", step=step)
                return str(
                    await kernel.invoke_prompt(
                        goal_of(step), arguments=KernelArguments(settings=auto())
                    )
                )

            @kernel_function
            async def agent(self, step: str, kernel: Hidden) -> str:
                world.record.started("agent", step=step)
                agent = ChatCompletionAgent(
                    kernel=kernel, name="inner", instructions="Do it."
                )
                return str(await agent.get_response(messages=goal_of(step)))

        kernel.add_plugin(Inner(), "inner")
        inside = self.options(
            self.scenario.inside, approver=self.scenario.inner_approver
        )
        options = FunctionCallingStepwisePlannerOptions(
            plan=False, max_iterations=1000, **inside
        )
        planner = FunctionCallingStepwisePlanner("scripted", options)
        kernel.add_plugin(PlannerPlugin(planner, function_name="planner"), "helper")
        own = self._kernel()
        agent: Any = ChatCompletionAgent(
            kernel=own, service=self.service, name="colleague", instructions="Do it."
        )
        kernel.add_functions("staff", [agent._as_kernel_function])

    def _reply(self, request: ScriptedRequest) -> ScriptedReply:
        users = [number for number, one in enumerate(request.messages) if _asks(one)]
        run = _text(request.messages[users[-1]]).partition(GOAL)[2].split()[0]
        turn = sum(bool(one.get("tool_calls")) for one in request.messages[users[-1] :])
        turns = self._runs[run]
        if turn >= len(turns) or not request.tools:
            return say(f"Done with {run}.")
        self.record.turns[run] = turn + 1
        self.record.add(Replied(run, turn))
        return calls(*(self._written(one) for one in turns[turn]))

    def _written(self, one: Call) -> ScriptedReply:
        names = {"planner": "helper-planner", "colleague": "staff-colleague"}
        if one.inner is None:
            return call(f"bank-{one.function}", one.written(), id=one.id)
        given = {
            "planner": {"goal": goal_of(one.id)},
            "colleague": {"messages": goal_of(one.id)},
        }
        return call(
            names.get(one.inner, f"inner-{one.inner}"),
            given.get(one.inner, {"step": one.id}),
            id=one.id,
        )

    def options(
        self, chain: Chain, *, approver: bool, bare: bool = False
    ) -> dict[str, Any]:
        """Write a chain as the options of a door; a bare one lacks the hook."""
        scenario = self.scenario
        settings: dict[str, Any] = {
            "unmatched": chain.unmatched,
            "on_deferred": "run_safe_first" if scenario.safe_first else "hold_all",
            "on_denial": scenario.on_denial,
        }
        if scenario.hook != "none" and not bare:
            settings["authorize"] = self.people.hook
        options: dict[str, Any] = {
            "interceptors": [self.guard(one) for one in chain.guards],
            "approval": ApprovalSettings(**settings),
        }
        if (refused := chain.refuses_above) is not None:
            options["pre_invoke"] = lambda _, __, given: (
                given.get("amount", 0) <= refused
            )
        if (checked := chain.checks_above) is not None:
            options["check_for_intervention"] = lambda one: (
                one.arguments.get("amount", 0) > checked
            )
        if approver:
            options["approver"] = self.people.asked
        return options

    def guard(self, guard: Policy | Opinion) -> Any:
        """Make the interceptor that a guard describes."""
        if isinstance(guard, Policy):
            return ApprovalPolicy.from_dict(guard.written())

        async def interceptor(one: ToolCall) -> Any:
            if not guard.is_for(one.function_name, one.arguments):
                return None
            match guard.says:
                case "approve":
                    return Approve()
                case "deny":
                    return Deny("No.")
                case "supply":
                    return Supply("supplied")
                case "defer":
                    return Defer(guard.prompt or None, roles=guard.asks(one.arguments))
                case "edit":
                    return Approve(arguments={**one.arguments, "amount": guard.becomes})
                case "raise":
                    raise ValueError("The interceptor is broken.")
                case _:
                    self.people.spoil(one)
                    return guard.junk

        interceptor.__qualname__ = guard.name
        return interceptor


def _asks(message: Mapping[str, Any]) -> bool:
    return message["role"] == "user" and GOAL in _text(message)


def _text(message: Mapping[str, Any]) -> str:
    return str(message.get("content"))


class People:
    """Those who are asked; what they answer is random, and noted."""

    def __init__(self, scenario: Scenario, record: Record) -> None:
        self._scenario = scenario
        self._record = record
        self._random = Random(scenario.seed ^ 0x5EED)

    def hook(self, request: Any) -> bool | None:
        """Decide who may decide, as the application does."""
        if self._scenario.hook == "forgets":
            return None
        return may_decide(request.by, request.call.roles, "by roles")

    def spoil(self, one: ToolCall) -> None:
        """Note that what should have decided a call answered no decision."""
        if (found := self._found(one)) is not None:
            self._record.add(Spoiled(found))

    async def asked(self, one: ToolCall) -> Any:
        """Answer as an approver does, at once."""
        found = self._found(one)
        assert found is not None, one
        if not self._scenario.honest and self._random.random() < 0.15:
            return None
        if not self._scenario.honest and self._random.random() < 0.02:
            self._record.add(Spoiled(found))
            return self._random.choice(JUNK)
        answer, decision = self.decide(
            found, dict(one.arguments), tuple(one.roles), hook=self._scenario.hook
        )
        self._record.add(replace(answer, inline=True))
        return decision

    def _found(self, one: ToolCall) -> Call | None:
        return (
            self._record.call_of(one.id)
            if self._record.knows(one.id)
            else self._record.current()
        )

    def decide(
        self,
        found: Call,
        shown: Arguments,
        roles: tuple[str, ...],
        *,
        hook: Hook,
        void: str = "",
        others: Sequence[str] = (),
    ) -> tuple[Answer, Any]:
        """Decide a call as it is shown.

        Args:
            found: The call.
            shown: The arguments with which it waits.
            roles: Who may decide, as the door says.
            hook: What checks that.
            void: Why no decision can count.
            others: The fingerprints of other calls.
        """
        self._record.add(Waited(found, shown, roles))
        random, honest, door = self._random, self._scenario.honest, self._scenario.door
        in_protocol = door in (
            "ag-ui",
            "inbox",
        )  # whose forms have no more than they say
        entitled = [name for name in STAFF if may_decide(name, roles, hook)]
        person: str | None = random.choice(entitled or [*STAFF])
        if not honest and random.random() < 0.4:
            person = random.choice([*STAFF, None])
        always: Any = (
            None
            if door == "ag-ui"
            else random.choices((None, "function", "arguments"), (5, 4, 2))[0]
        )
        says = (
            "approve"
            if honest
            else random.choices(("approve", "edit", "deny", "supply"), (11, 5, 2, 1))[0]
        )
        given: dict[str, Any] = {"void": void, "hook": hook}
        if says == "deny" or (says == "supply" and in_protocol):
            return Answer(found, person, "deny", shown, roles, **given), Deny(
                "No.", by=person
            )
        if says == "supply":
            return Answer(found, person, "supply", shown, roles, **given), Supply(
                "by hand", by=person
            )
        edited: dict[str, Any] | None = None
        if says == "edit" and found.inner is None:
            edited = {"to": random.choice(PAYEES), "amount": random.choice(AMOUNTS)}
            if random.random() < 0.1:
                del edited["amount"]
            if door == "inbox":
                always = None
        fingerprint: str | None = None
        if others and not honest and not in_protocol and random.random() < 0.05:
            fingerprint = random.choice(others)
            given["void"] = void or "for another call"
        answer = Answer(found, person, "approve", shown, roles, edited, always, **given)
        return answer, Approve(
            arguments=edited, always=always, by=person, fingerprint=fingerprint
        )

    def insist(self) -> bool:
        """Say whether they decide the same once more."""
        return not self._scenario.honest and self._random.random() < 0.1

    def chosen(self, waiting: list[Any]) -> list[Any]:
        """Choose which of the calls that wait are decided now."""
        if self._scenario.honest or self._random.random() < 0.7:
            return waiting
        return self._random.sample(waiting, self._random.randint(1, len(waiting)))
