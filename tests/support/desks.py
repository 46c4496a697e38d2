"""Planners one inside the other, the innermost of which pays, with approval."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Checkpoint,
    FunctionCallingStepwisePlanner,
    requires_approval,
)
from planner_ext.approval.decisions import Decision
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import (
    Script,
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.planner import planner_with

Hidden = Annotated[Kernel, {"include_in_function_choices": False}]


@dataclass
class Bank:
    """Functions that start: one at will, one with approval alone."""

    paid: list[int] = field(default_factory=list[int])
    looked: int = 0

    @requires_approval
    @kernel_function(description="Pays.")
    async def pay(self, account: int) -> str:
        self.paid.append(account)
        return f"paid {account}"

    @kernel_function(description="Looks.")
    async def look(self) -> str:
        self.looked += 1
        return "seen"


def tool_results(request: ScriptedRequest) -> list[str]:
    return [str(one["content"]) for one in request.messages if one["role"] == "tool"]


def once(asks: ScriptedReply) -> Callable[[ScriptedRequest], ScriptedReply]:
    """Make these calls, then answer with what they gave."""

    def script(request: ScriptedRequest) -> ScriptedReply:
        results = tool_results(request)
        return say(" ".join(results)) if results else asks

    return script


def goal_in(request: ScriptedRequest) -> str:
    return str(
        next(one for one in request.messages if one["role"] == "user")["content"]
    )


def pays(request: ScriptedRequest) -> ScriptedReply:
    """Pay what the goal says, then answer with what that gave."""
    results = tool_results(request)
    if results:
        return say(" ".join(results))
    return call("bank-pay", {"account": int(goal_in(request).split()[1].rstrip("."))})


@dataclass
class World:
    """Three planners, one inside the other: ``top`` calls ``expert``, which calls ``clerk``, which pays."""

    top: Script
    expert: Script = field(
        default_factory=lambda: once(
            calls(call("bank-look"), call("clerk-reach_goal", {"goal": "Pay 1."}))
        )
    )
    bank: Bank = field(default_factory=Bank)
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    inner: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.services = {
            name: ScriptedChatCompletion(script, service_id=name)
            for name, script in (
                ("top", self.top),
                ("expert", self.expert),
                ("clerk", pays),
            )
        }
        self.kernel = Kernel(services=[*self.services.values()])
        self.kernel.add_plugin(self.bank, "bank")
        clerk = planner_with("clerk", plan=False, **self.inner)
        self.kernel.add_plugin(PlannerPlugin(clerk), "clerk")
        expert = planner_with("expert", plan=False)
        self.kernel.add_plugin(PlannerPlugin(expert), "expert")
        self.planner = self.new_planner()

    def new_planner(self) -> FunctionCallingStepwisePlanner:
        return planner_with("top", plan=False, **self.options)

    def scripted(self, name: str, script: Script) -> ScriptedChatCompletion:
        """Put another model behind a service's name."""
        if name in self.kernel.services:
            self.kernel.remove_service(name)
        service = ScriptedChatCompletion(script, service_id=name)
        self.kernel.add_service(service)
        self.services[name] = service
        return service

    @property
    def sent(self) -> int:
        return sum(len(service.requests) for service in self.services.values())

    async def resume(self, result: Any, decisions: Mapping[str, Decision]) -> Any:
        """Resume from the checkpoint's text, as another process does."""
        checkpoint = Checkpoint.from_json(result.checkpoint.to_json())
        return await self.new_planner().resume(self.kernel, checkpoint, decisions)


TWO = calls(
    call("expert-reach_goal", {"goal": "Look deep."}),
    call("clerk-reach_goal", {"goal": "Pay 2."}),
)
