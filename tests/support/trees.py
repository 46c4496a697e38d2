"""Trees of runs: planners, prompts, agents and code that make runs inside runs, and what these must have done.

A tree is data. `World` plays it: each model says what the tree says, each function
notes its effect, and persons decide as the tree says, in an order that is drawn.
`Node.effects` and `Node.requests` are the reference.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, Any, Literal, TypeAlias

from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import kernel_function
from semantic_kernel.functions.kernel_function_from_prompt import (
    KernelFunctionFromPrompt,
)

from planner_ext import (
    ApprovalSettings,
    Approve,
    Budget,
    Defer,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    Supply,
    requires_approval,
)
from planner_ext.approval.decisions import Decision, MadeDecision, ToolCall
from planner_ext.core.facts import Ended, Fact, place_of_fact, unwrapped
from planner_ext.core.fold import apply
from planner_ext.core.state import State, run_at
from planner_ext.durable import effect
from planner_ext.engine.activation import Activation
from planner_ext.engine.concurrency import SystemClock
from planner_ext.engine.document import dump_facts, load_facts
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.stock import stock

Fate: TypeAlias = Literal["approve", "always", "deny", "supply", "edit", "late"]
Asked: TypeAlias = Literal["mark", "policy", "inner", "refused", "nobody"]
Kind: TypeAlias = Literal["plan", "ask", "clerk", "own"]
EDITED = 1000
EXPIRES_IN = 60.0
PRICE = 0.25
Hidden = Annotated[Kernel, {"include_in_function_choices": False}]


@dataclass(kw_only=True)
class Leaf:
    """A call with an effect: who is asked about it, and what they say.

    Attributes:
        waits: Whether somebody is asked. An ``inner`` planner's rule holds only in its
            run and those inside, and an approval may be for the rest of the run.
    """

    asked: Asked
    fate: Fate
    id: int = 0
    waits: bool = False


@dataclass(kw_only=True)
class Node:
    """A run: what makes it, and its batches."""

    kind: Kind
    batches: list[list["Leaf | Node"]]
    id: int = 0

    def nodes(self) -> "Iterator[Node]":
        yield self
        for one in (one for batch in self.batches for one in batch):
            if isinstance(one, Node):
                yield from one.nodes()

    def leaves(self) -> Iterator[Leaf]:
        for node in self.nodes():
            for batch in node.batches:
                yield from (one for one in batch if isinstance(one, Leaf))

    @property
    def requests(self) -> int:
        """How many requests the run and those inside it make where no limit is reached."""
        return sum(len(node.batches) + 1 for node in self.nodes())

    @property
    def effects(self) -> Counter[int]:
        """What its functions, and those inside, have done at the end."""
        done = Counter[int]()
        for leaf in self.leaves():
            if leaf.asked == "refused":
                continue
            if not leaf.waits or leaf.fate in ("approve", "always"):
                done[leaf.id] += 1
            elif leaf.fate == "edit":
                done[leaf.id + EDITED] += 1
        return done

    def ask(self, *, is_ruled: bool = False) -> None:
        """Say which of its calls, and of those inside, wait."""
        free: set[Asked] = {"refused", "nobody"}
        if not is_ruled:
            free.add("inner")
        for batch in self.batches:
            for one in batch:
                if isinstance(one, Leaf):
                    one.waits = one.asked not in free
                else:
                    one.ask(is_ruled=is_ruled or one.kind in ("plan", "own"))
            asked = [one for one in batch if isinstance(one, Leaf) and one.waits]
            free |= {one.asked for one in asked if one.fate == "always"}

    @property
    def starts(self) -> int:
        """How many calls of it and of the runs inside have started."""
        inside = sum(1 for _ in self.nodes()) - 1
        return self.effects.total() + inside


leaves = st.builds(
    Leaf,
    asked=st.sampled_from(("mark", "mark", "policy", "inner", "refused", "nobody")),
    fate=st.sampled_from(("approve", "always", "deny", "supply", "edit", "late")),
)


def nodes(depth: int) -> st.SearchStrategy[Node]:
    """Draw a run with up to this many levels of runs in it."""
    items: st.SearchStrategy[Leaf | Node] = leaves
    if depth:
        items = st.one_of(leaves, nodes(depth - 1))
    batches = st.lists(st.lists(items, min_size=1, max_size=3), min_size=1, max_size=2)
    kinds = st.sampled_from(("plan", "plan", "ask", "clerk", "own"))
    return st.builds(Node, kind=kinds, batches=batches)


def numbered(tree: Node) -> Node:
    """Number the runs and calls of a tree."""
    for number, node in enumerate(tree.nodes(), 1):
        node.id = number
    for number, leaf in enumerate(tree.leaves(), 1):
        leaf.id = number
    tree.ask()
    return tree


trees = nodes(3).map(numbered)


def ended_runs(facts: Sequence[Fact]) -> dict[str, State]:
    """Fold a journal, and return each run inside at its end, by name."""
    state = State()
    ended: dict[str, State] = {}
    for fact in facts:
        state = apply(state, fact)
        run = run_at(state, place_of_fact(fact))
        if isinstance(unwrapped(fact), Ended) and run is not None:
            ended[run.run_id] = run
    return ended


def node_of(tree: Node, run: State) -> Node:
    """Find what a run is in its tree, by the number in its goal or first messages."""
    text = run.goal or " ".join(str(getattr(one, "content", one)) for one in run.given)
    number = int(text.split("#")[1])
    return next(node for node in tree.nodes() if node.id == number)


class PassingClock(SystemClock):
    """The system's clock, and time that passes at once."""

    def __init__(self) -> None:
        self.passed = 0.0

    def now(self) -> float:
        """Seconds since the epoch."""
        return super().now() + self.passed


class Died(BaseException):
    """The process has ended."""


@dataclass
class Journal:
    """A store that ends the process at one of its appends, before or after it has written."""

    facts: list[Fact] = field(default_factory=list[Fact])
    dies_at: int | None = None
    written: bool = False
    dead: bool = False
    appends: int = 0

    def begin(self, dies_at: int | None, written: bool) -> None:
        """Let the next process begin, which dies at an append, with or without having written."""
        self.dead = False
        self.appends = 0
        self.dies_at = dies_at
        self.written = written

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:
        self.appends += 1
        if self.dead or (self.appends == self.dies_at and not self.written):
            self.dead = True
            raise Died
        assert seq == len(self.facts)
        self.facts.extend(facts)
        if self.appends == self.dies_at:
            self.dead = True
            raise Died


@dataclass(eq=False)
class World:
    """What plays a tree, in one process after another.

    Attributes:
        tell: Is told of each request, ``asked``, and each effect, ``did`` and its
            number, when it happens.
    """

    tree: Node
    on_deferred: Literal["hold_all", "run_safe_first"] = "hold_all"
    budget: Budget = field(default_factory=Budget)
    inner_budget: Budget = field(default_factory=Budget)
    tell: Callable[[str], None] = lambda _: None
    done: Counter[int] = field(default_factory=Counter[int])
    sent: int = 0
    lives: int = 0
    clock: PassingClock = field(default_factory=PassingClock)

    def __post_init__(self) -> None:
        self._nodes = {node.id: node for node in self.tree.nodes()}
        self._leaves = {leaf.id: leaf for leaf in self.tree.leaves()}
        runs = [node for node in self.tree.nodes() if node is not self.tree]
        self._inside = sorted({(node.kind, self._level(node)) for node in runs})

    def process(self) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
        """Make planner and kernel, as a new process does."""
        self.lives += 1
        kernel = Kernel(services=[ScriptedChatCompletion(self._reply)])
        kernel.add_plugin(_Bank(self._do), "bank")
        planners = [self._planner(self.budget)]
        planners += [self._planner(self.inner_budget) for _ in range(3)]
        for kind, level in self._inside:
            match kind:
                case "plan":
                    kernel.add_plugin(PlannerPlugin(planners[level]), f"plan{level}")
                case "own":
                    kernel.add_plugin(_Own(planners[level]), f"own{level}")
                case "ask":
                    kernel.add_function(f"ask{level}", _prompt(f"ask{level}"))
                case "clerk":
                    agent = ChatCompletionAgent(kernel=kernel, name=f"clerk{level}")
                    kernel.add_plugin(agent, f"clerk{level}")
                case _:
                    pass
        return planners[0], kernel

    def _planner(self, budget: Budget) -> FunctionCallingStepwisePlanner:
        is_root = budget is self.budget
        approval = ApprovalSettings(on_deferred=self.on_deferred, authorize=allow)
        options = FunctionCallingStepwisePlannerOptions(
            plan=False,
            max_iterations=budget.max_iterations or 10_000,
            budget=budget,
            price=lambda _model, _usage: PRICE,
            approval=approval,
            clock=self.clock,
            interceptors=[self._policy if is_root else self._own_policy],
        )
        return FunctionCallingStepwisePlanner(options=options)

    def _do(self, number: int) -> None:
        self.tell(f"did {number}")
        self.done[number] += 1

    def _policy(self, asked: ToolCall) -> Decision | None:
        leaf = self._leaves.get(int(asked.arguments.get("id", 0)))
        match leaf.asked if leaf else None:
            case "refused":
                return Deny("never")
            case "policy":
                return _question("boss", leaf)
            case _:
                return None

    def _own_policy(self, asked: ToolCall) -> Decision | None:
        leaf = self._leaves.get(int(asked.arguments.get("id", 0)))
        is_ours = leaf is not None and leaf.asked == "inner"
        return _question("chief", leaf) if is_ours else None

    def _reply(self, request: ScriptedRequest) -> ScriptedReply:
        self.sent += 1
        self.tell("asked")
        said = next(one for one in request.messages if one["role"] == "user")
        node = self._nodes[int(str(said["content"]).split("#")[1])]
        turn = sum("tool_calls" in one for one in request.messages)
        if turn >= len(node.batches) or not request.tools:
            return say(f"Done {node.id}.")
        level = self._level(node)
        return calls(*(_asked_for(one, level + 1) for one in node.batches[turn]))

    def _level(self, node: Node) -> int:
        return sum(node in one.nodes() for one in self.tree.nodes()) - 1

    @property
    def goal(self) -> str:
        return f"Go #{self.tree.id}#"

    def decisions(
        self, pending: Sequence[ToolCall], draw: Random
    ) -> dict[str, Decision]:
        """Decide some of what waits, as the tree says; where that is nothing, the time of it passes."""
        some = draw.sample(list(pending), draw.randint(1, len(pending)))
        decided = [one for one in some if one.in_doubt or one.expires_at is None]
        if not decided:
            self.clock.passed += EXPIRES_IN + 1.0
        return {one.path: self.decision(one.arguments, one.in_doubt) for one in decided}

    def decision(self, arguments: Mapping[str, Any], in_doubt: bool) -> Decision:
        """Decide a call as the tree says; nobody runs one in doubt again."""
        if in_doubt:
            return Supply("in doubt", by="ann")
        match self._leaves[int(arguments["id"])].fate:
            case "approve":
                return Approve(by="ann")
            case "always":
                return Approve(by="ann", always="function")
            case "deny" | "late":
                return Deny("no", by="ann")
            case "supply":
                return Supply("told", by="ann")
            case "edit":
                return Approve(by="ann", arguments={"id": arguments["id"] + EDITED})

    async def live(self, journal: Journal, decisions: dict[str, Decision]) -> Any:
        """Drive the run in one process, as a worker does, from its journal as another process reads it."""
        planner, kernel = self.process()
        journal.facts = list(load_facts(dump_facts(journal.facts)))
        activation = Activation(
            run_id="run",
            goal=self.goal,
            store=journal,
            facts=tuple(journal.facts),
            decisions={
                name: MadeDecision(decision=decisions[name]) for name in decisions
            },
        )
        return await planner.journaled(kernel, activation).result()


async def allow(request: Any) -> bool:
    return bool(request.by)


def _question(role: str, leaf: Leaf | None) -> Defer:
    is_late = leaf is not None and leaf.fate == "late"
    return Defer(roles=[role], expires_in=EXPIRES_IN if is_late else None)


def _asked_for(one: Leaf | Node, level: int) -> Any:
    kind = "leaf" if isinstance(one, Leaf) else "run"
    id_ = f"{kind}/{one.id}#1%" if one.id % 3 == 0 else f"{kind}_{one.id}"
    if isinstance(one, Leaf):
        name = "bank-pay" if one.asked == "mark" else "bank-look"
        return call(name, {"id": one.id}, id=id_)
    goal = f"Go #{one.id}#"
    names = {
        "plan": (f"plan{level}-reach_goal", {"goal": goal}),
        "own": (f"own{level}-work", {"goal": goal}),
        "ask": (f"ask{level}-ask{level}", {"goal": goal}),
        "clerk": (f"clerk{level}-clerk{level}", {"messages": goal}),
    }
    return call(*names[one.kind], id=id_)


def _prompt(name: str) -> KernelFunctionFromPrompt:
    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=_auto())
    return KernelFunctionFromPrompt(
        function_name=name,
        plugin_name=name,
        prompt="{{$goal}}",
        prompt_execution_settings=settings,
    )


def _auto() -> Any:
    return stock.Auto()


@dataclass
class _Bank:
    do: Callable[[int], None]

    @requires_approval
    @kernel_function(description="Pays.")
    async def pay(self, id: int) -> str:
        self.do(id)
        return f"paid {id}"

    @kernel_function(description="Looks.")
    async def look(self, id: int) -> str:
        self.do(id)
        return f"seen {id}"


@dataclass
class _Own:
    planner: FunctionCallingStepwisePlanner

    @effect("idempotent")
    @kernel_function(description="Works.")
    async def work(self, goal: str, kernel: Hidden) -> str:
        try:
            return (await self.planner.invoke(kernel, goal)).final_answer
        except Exception as error:
            return f"failed: {error}"
