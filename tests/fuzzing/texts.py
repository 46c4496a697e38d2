"""The parsers of texts that others wrote, each with the promises that hold for every text."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from fuzzing.mutation import Fuzzed
from planner_ext import Approve, Budget
from planner_ext.approval.decisions import ToolCall, digest_of
from planner_ext.approval.policy import ApprovalPolicy, InvalidPolicyError
from planner_ext.approval.waiting import pending_calls
from planner_ext.core.errors import PlannerExtError
from planner_ext.core.state import State
from planner_ext.core.text import one_line
from planner_ext.errors import InvalidCheckpointError
from planner_ext.hitl_manager import Checkpoint, Supply
from planner_ext.testing import call, calls, say
from planner_ext.testing.cassette import Cassette, CassetteError
from planner_ext.testing.scrub import Scrubber
from planner_ext.testing.tape import record, replay
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    WIPE,
    World,
    planner_with,
    world,
)
from support.journal import FACTS

KEY = b"a shared secret"
ASK: dict[str, Any] = {
    "interceptors": [ASKING_REFUND],
    "budget": Budget(max_iterations=4, max_tool_calls=6),
}


def refused(error: BaseException) -> str:
    """Describe an error of the package, which must say something."""
    text = one_line(str(error))
    assert text, f"{type(error).__name__} says nothing"
    return f"refused {type(error).__name__} {text}"


def canonical(text: str) -> str:
    """Write JSON in one way, so that only texts with the same values are equal."""
    return json.dumps(json.loads(text), sort_keys=True)


async def _leave_open(question: object) -> None:
    return None


async def checkpoints() -> list[Checkpoint]:
    """Make checkpoints of runs that wait in all ways, and of runs that ended."""
    question = call("UserInteraction-AskUser", {"question": "Which order?"})
    asking = {**ASK, "clarifier": _leave_open, "max_clarifications": 3}
    scripts: list[tuple[Any, dict[str, Any]]] = [
        ([calls(LOOK, REFUND)], ASK),
        ([calls(REFUND, REFUND, WIPE)], ASK),
        (
            [
                LOOK,
                calls(
                    WIPE,
                    call("shop-refund", {"order": "8", "amount": 1, "note": "ü\u202e"}),
                ),
            ],
            ASK,
        ),
        ([question], asking),
        ([say("Which order?")], {**asking, "require_final_answer_function": True}),
        (
            [LOOK, LOOK, LOOK, say("Enough.")],
            {**ASK, "budget": Budget(max_iterations=4, on_limit="stop")},
        ),
    ]
    made: list[Checkpoint] = []
    for script, options in scripts:
        result = await planner_with(**options).invoke(
            world(script).kernel, "Refund order 7."
        )
        assert result.checkpoint is not None
        made.append(result.checkpoint)
    return made


@asynccontextmanager
async def checkpoint(_: Path) -> AsyncGenerator[Fuzzed]:
    """A checkpoint is read and written unchanged, or refused; altered, it neither verifies nor runs what was shown."""
    made = await checkpoints()
    shown = {
        one.fingerprint: _does(one.fully_qualified_name, one.raw_arguments)
        for c in made
        for one in _waiting(c)
    }
    signed = [one.to_json(KEY) for one in made]
    genuine = set(map(canonical, signed))

    async def check(text: str) -> str:
        with suppress(InvalidCheckpointError):
            Checkpoint.from_json(text, KEY)
            assert canonical(text) in genuine, "an altered text has a valid signature"
        try:
            read = Checkpoint.from_json(text)
        except InvalidCheckpointError as error:
            return refused(error)
        written = read.to_json()
        assert Checkpoint.from_json(written).to_json() == written, (
            "what was read is not what was written"
        )
        return await _resumed(read, shown)

    yield Fuzzed(
        [*(one.to_json() for one in made), *signed, Checkpoint(tuple(FACTS)).to_json()],
        check,
    )


def _waiting(checkpoint: Checkpoint) -> tuple[ToolCall, ...]:
    return pending_calls(checkpoint.state())


def _does(name: str, arguments: str) -> tuple[Any, ...]:
    """Return what `Shop.ran` holds after a call."""
    given = json.loads(arguments)
    match name:
        case "shop-refund":
            return (
                "refund",
                given["order"],
                float(given["amount"]),
                given.get("note", ""),
            )
        case _:
            return name.partition("-")[2], *given.values()


async def _resumed(read: Checkpoint, shown: Mapping[str, tuple[Any, ...]]) -> str:
    """Approve what waits, bound to what was shown, and resume."""
    here, state = world(lambda _: DONE), read.state()
    waiting = pending_calls(state)
    decisions: dict[str, Any] = {
        one.id: Supply("7")
        if one.kind == "question"
        else Approve(fingerprint=one.fingerprint)
        for one in waiting
    }
    pins = [one.fingerprint for one in waiting if one.kind != "question"]
    try:
        result = await planner_with(**ASK).resume(
            here.kernel, read, decisions, budget=Budget(max_iterations=20)
        )
        outcome = f"read {result.status} {len(here.ran)}"
        json.dumps([one.as_dict() for one in result.pending])
        written = result.checkpoint.to_json()
        assert Checkpoint.from_json(written).to_json() == written, (
            "a resumed run is not read as it was written"
        )
    except PlannerExtError as error:
        outcome = refused(error)
    _check_bound(here, state, pins, shown)
    return outcome


def _check_bound(
    here: World, state: State, pins: list[str], shown: Mapping[str, tuple[Any, ...]]
) -> None:
    """What ran is what the fingerprints of the decisions show, or what the text itself says was approved."""
    calls = () if state.batch is None else state.batch.calls
    told = [
        one for one in calls if one.decided is not None and one.decided.verdict == "run"
    ]
    if told or state.sticky or not here.ran or not all(pin in shown for pin in pins):
        return
    expected = [shown[pin] for pin in pins]
    for done in here.ran:
        assert done in expected, f"{done} ran; approved was {expected}"
        expected.remove(done)


POLICIES = (
    {"default": "ask"},
    {
        "default": "deny",
        "rules": [
            {"plugin": "shop", "function": "look*", "action": "allow"},
            {
                "plugin": "shop",
                "function": "refund",
                "arguments": {
                    "amount": {"ge": 0, "le": 100},
                    "order": {"glob": "[0-9]*"},
                },
                "action": "ask",
                "reason": "Much money.",
                "expires_in": 60,
                "roles": ["treasurer"],
            },
            {
                "function": "w?pe",
                "arguments": {"what": {"equals": {"a": [1, None]}}},
                "action": "deny",
            },
            {
                "arguments": {
                    "order": {"one_of": ["7", 7, None]},
                    "amount": {"gt": 1.5, "lt": 2},
                },
                "action": "allow",
            },
        ],
    },
)


@asynccontextmanager
async def policy(folder: Path) -> AsyncGenerator[Fuzzed]:
    """A policy is read or refused by name; its data and its normal form decide every call as it does."""
    texts = [json.dumps(one) for one in POLICIES]
    texts += [yaml.safe_dump(one) for one in POLICIES] + [
        "default: ask\nrules: &r []\n",
        "default: ask\nrules:\n- action: ask\n  arguments: {a: {equals: [&a [1, x], &b [*a, *a], *b]}}\n",
        "default: ask\nrules:\n- &r {action: ask, reason: 2026-11-22}\n- {<<: *r, action: deny, expires_in: 0x1F}\n",
    ]
    path = folder / "policy.yaml"

    async def check(text: str) -> str:
        read, said = None, ""
        with suppress(ValueError, RecursionError):
            if isinstance(data := json.loads(text), dict):
                read, said = _policy_of(ApprovalPolicy.from_dict, data)
        if read is None:
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
            read, said = _policy_of(ApprovalPolicy.from_yaml, path)
        if read is None:
            return said
        again = ApprovalPolicy.from_dict(read.model_dump(exclude_unset=True))
        same = ApprovalPolicy.from_dict(read.normal_form())
        assert again.normal_form() == read.normal_form() == same.normal_form()
        decided = [
            [_kind(one, name, given) for one in (read, again, same)]
            for name, given in (
                ("look", {"order": "7"}),
                ("refund", {"amount": 2, "order": "a" * 3000}),
                ("wipe", {}),
            )
        ]
        assert all(len(set(kinds)) == 1 for kinds in decided), decided
        return f"read {[kinds[0] for kinds in decided]} {len(read.rules)}"

    yield Fuzzed(texts, check)


def _policy_of(read: Any, given: Any) -> tuple[ApprovalPolicy | None, str]:
    try:
        return read(given), ""
    except InvalidPolicyError as error:
        return None, refused(error)


def _kind(policy: ApprovalPolicy, name: str, arguments: dict[str, Any]) -> str:
    function = f"shop-{name}"
    seen = ToolCall(
        id="c",
        plugin_name="shop",
        function_name=name,
        fully_qualified_name=function,
        arguments=arguments,
        raw_arguments=json.dumps(arguments),
        iteration=0,
        index=0,
        batch_size=1,
        fingerprint=digest_of(function, arguments),
    )
    return type(policy(seen)).__name__


@asynccontextmanager
async def cassette(folder: Path) -> AsyncGenerator[Fuzzed]:
    """A cassette is refused by name, or it is written as it was read, and its replay ends in a named error or a run."""
    made: list[str] = []
    for script in (
        [calls(LOOK, LOOK), say("Done.")],
        [LOOK, RuntimeError("no"), say("Done.")],
        [say("Hi.")],
    ):
        path = folder / "made.json"
        path.unlink(missing_ok=True)
        with record(path) as tape, suppress(Exception):
            await planner_with().invoke(
                tape.kernel(world(script).kernel), "Look order 7 up."
            )
        made.append(path.read_text())
    path, copy = folder / "read.json", folder / "written.json"

    async def check(text: str) -> str:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            read = Cassette.read(path)
        except CassetteError as error:
            return refused(error)
        read.write(copy, Scrubber())
        written = copy.read_text()
        Cassette.read(copy).write(copy, Scrubber())
        assert copy.read_text() == written, "what was read is not what was written"
        raised = {one.type for _, exchange in read.exchanges for one in exchange.error}
        here = world([])
        try:
            with replay(path) as tape:
                result = await planner_with(
                    budget=Budget(max_iterations=6, max_tool_calls=5)
                ).invoke(tape.kernel(here.kernel), "Look order 7 up.")
        except PlannerExtError as error:
            return refused(error)
        except Exception as error:
            if {one.__name__ for one in type(error).__mro__} & raised:
                return "read raised"
            raise
        assert len(here.ran) <= 5
        assert len(here.ran) == result.tool_calls or any(
            "recorded" in str(fact) for fact in result.facts
        )
        return f"read {result.status}"

    yield Fuzzed(made, check)
