"""``checkpoint_key=`` on every door: what leaves is signed, what is not is refused, the key is not shown."""

import asyncio
import copy
import dataclasses
import json
import logging
import pickle
from typing import Any

import pytest
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
)
from planner_ext.errors import (
    InvalidCheckpointError,
    LimitReachedError,
    PlannerException,
    PlannerInvalidConfigurationError,
    RunNotAnsweredError,
    ServiceCallError,
)
from planner_ext.events import RunStarted
from planner_ext.hitl_manager import Checkpoint
from planner_ext.session import ToolUseSession
from planner_ext.testing import call, calls
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    Door,
    asked,
    every_door,
    planner_with,
    service_and_handler,
    settings_with,
    world,
)
from support.narrow import as_type, present
from support.values import each_of

KEY, OTHER = b"the-signing-key", b"another-key"
ASK: dict[str, Any] = {"interceptors": [ASKING_REFUND]}
SIGNED: dict[str, Any] = {**ASK, "checkpoint_key": KEY}
APPROVE = {"call_1": Approve()}
REFUSED = "signed with this key"


def check_signed(text: str) -> None:
    """Fail where a text is not signed with the key."""
    assert Checkpoint.from_json(text, KEY).facts


@every_door
async def test_what_leaves_is_signed_and_comes_in_again(door: Door) -> None:
    """The checkpoint of a paused run is signed without being asked for, also after a resume, and is taken back."""
    paused = await door.ask(world([calls(REFUND, REFUND)]), **SIGNED)
    check_signed(paused.checkpoint)
    half = await door.resume(world([]), paused.checkpoint, APPROVE, **SIGNED)
    check_signed(half.checkpoint)
    here = world([DONE])
    done = await door.resume(here, half.checkpoint, {"call_2": Approve()}, **SIGNED)
    assert (done.status, here.ran) == ("answered", [REFUNDED] * 2)


@each_of("written_with", [None, OTHER], ids=["unsigned", "another-key"])
@every_door
async def test_what_is_not_signed_with_the_key_is_refused(
    door: Door, written_with: bytes | None
) -> None:
    """A text without a signature, or with that of another key, is refused by name, and nothing runs."""
    text = (
        await door.ask(world([REFUND]), **{**ASK, "checkpoint_key": written_with})
    ).checkpoint
    here = world([DONE])
    with pytest.raises(InvalidCheckpointError, match=REFUSED):
        await door.resume(here, text, APPROVE, **SIGNED)
    assert (here.ran, here.requests) == ([], 0)


async def signed_checkpoint() -> Checkpoint:
    return (
        await planner_with(**SIGNED).invoke(world([REFUND]).kernel, "Refund order 7.")
    ).checkpoint


async def forged(how: str) -> Checkpoint:
    """Make a checkpoint object that was not signed as it is."""
    signed = await signed_checkpoint()
    data = json.loads(signed.to_json())
    other = dataclasses.replace(
        as_type(RunStarted, signed.facts[0]), goal="Refund everything."
    )
    match how:
        case "by-hand":
            return Checkpoint(signed.facts)
        case "unsigned-text":
            return Checkpoint.from_json(
                json.dumps({key: data[key] for key in ("schema", "kind", "facts")})
            )
        case "altered-text":
            data["facts"][2]["prompt"] = "Nothing."
            return Checkpoint.from_json(json.dumps(data))
        case "another-key":
            return Checkpoint.from_json(signed.to_json(OTHER), OTHER)
        case "replaced-facts":
            return dataclasses.replace(signed, facts=(other, *signed.facts[1:]))
        case _:
            stolen = await signed_checkpoint()
            return dataclasses.replace(stolen, facts=signed.facts)


FORGED = [
    "by-hand",
    "unsigned-text",
    "altered-text",
    "another-key",
    "replaced-facts",
    "stolen-signature",
]


@each_of("how", FORGED)
async def test_an_object_that_was_not_signed_is_refused(how: str) -> None:
    """A `Checkpoint` object is verified like a text: by planner, planner's ``cancel``, service and handler."""
    checkpoint, here = await forged(how), world([DONE])
    planner = planner_with(**SIGNED)
    with pytest.raises(InvalidCheckpointError, match=REFUSED):
        await planner.resume(here.kernel, checkpoint, APPROVE)
    with pytest.raises(InvalidCheckpointError, match=REFUSED):
        planner.cancel(checkpoint)
    service = FunctionInvokingChatCompletion(here.service, **SIGNED)
    with pytest.raises(InvalidCheckpointError, match=REFUSED):
        await service.resume(
            ChatHistory(), checkpoint, APPROVE, settings_with(), kernel=here.kernel
        )
    with pytest.raises(InvalidCheckpointError, match=REFUSED):
        async for _ in ToolCallHandler(here.kernel, **SIGNED).resume(
            ChatHistory(), checkpoint, APPROVE
        ):
            pass
    assert (here.ran, here.requests) == ([], 0)


@each_of("how", ["object", "read-with-key", "read-without-key", "pickled", "copied"])
async def test_a_signed_object_is_taken(how: str) -> None:
    """Signed and unaltered, an object is taken however it was kept: the door itself verifies it."""
    signed = await signed_checkpoint()
    given = {
        "object": lambda: signed,
        "read-with-key": lambda: Checkpoint.from_json(signed.to_json(), KEY),
        "read-without-key": lambda: Checkpoint.from_json(signed.to_json()),
        "pickled": lambda: pickle.loads(pickle.dumps(signed)),
        "copied": lambda: copy.deepcopy(signed),
    }[how]()
    here = world([DONE])
    result = await planner_with(**SIGNED).resume(here.kernel, given, APPROVE)
    assert (result.status, here.ran) == ("answered", [REFUNDED])


@service_and_handler
async def test_the_history_is_not_changed_by_what_is_refused(door: Door) -> None:
    """A refused checkpoint leaves the caller's history alone."""
    paused = await door.ask(world([REFUND]), **ASK)
    before = paused.history.model_dump_json()
    with pytest.raises(InvalidCheckpointError):
        await door.resume(
            world([]), paused.checkpoint, APPROVE, history=paused.history, **SIGNED
        )
    assert paused.history.model_dump_json() == before


async def test_errors_and_cancelled_runs_are_signed() -> None:
    """The checkpoint of a fault, of a limit, of ``raise_for_status`` and of ``cancel`` is signed, too."""
    with pytest.raises(ServiceCallError) as fault:
        await planner_with(**SIGNED).invoke(world([LOOK]).kernel, "Look.")
    limited = planner_with(**SIGNED, budget=Budget(max_iterations=1, on_limit="raise"))
    with pytest.raises(LimitReachedError) as limit:
        await limited.invoke(world([LOOK]).kernel, "Look.")
    planner = planner_with(**SIGNED)
    paused = await planner.invoke(world([REFUND]).kernel, "Refund order 7.")
    with pytest.raises(RunNotAnsweredError) as waiting:
        paused.raise_for_status()
    for error in (fault, limit, waiting):
        assert isinstance(error.value, PlannerException)
        assert error.value.checkpoint is not None
        check_signed(error.value.checkpoint.to_json())
    check_signed(planner.cancel(paused.checkpoint).checkpoint.to_json())


class Hanging:
    """A plugin whose function waits until it is cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()

    @kernel_function(description="Waits.")
    async def wait(self) -> str:
        self.started.set()
        await asyncio.Event().wait()
        return "never"


async def test_a_cancelled_run_is_signed() -> None:
    """The checkpoint on the `CancelledError` of a cancelled run is signed like every other."""
    plugin = Hanging()
    here = world([call("slow-wait", {})], slow=plugin)
    task = asyncio.create_task(planner_with(**SIGNED).invoke(here.kernel, "Wait."))
    await plugin.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    check_signed(vars(cancelled.value)["checkpoint"].to_json())


async def test_a_limited_service_signs_its_errors() -> None:
    """A service that raises at its limit puts a signed checkpoint on the error."""
    here = world([LOOK])
    budget = Budget(max_iterations=1, on_limit="raise")
    service = FunctionInvokingChatCompletion(
        here.service, budget=budget, checkpoint_key=KEY
    )
    with pytest.raises(LimitReachedError) as limit:
        await service.get_chat_message_content(
            asked(), settings_with(), kernel=here.kernel
        )
    assert limit.value.checkpoint is not None
    check_signed(limit.value.checkpoint.to_json())


async def test_a_session_signs_the_checkpoint_of_its_error() -> None:
    """What a session cannot wait for, a handler with the same key resumes."""
    here = world([REFUND, DONE])
    session = ToolUseSession(here.kernel, **SIGNED)
    with pytest.raises(RunNotAnsweredError) as paused:
        await session.prompt("Refund order 7.")
    checkpoint = paused.value.checkpoint
    assert checkpoint is not None
    check_signed(checkpoint.to_json())
    handler = ToolCallHandler(here.kernel, settings=settings_with(), checkpoint_key=KEY)
    assert [
        str(message)
        async for message in handler.resume(ChatHistory(), checkpoint, APPROVE)
    ] == ["Done."]


async def test_the_outer_key_holds_and_else_the_inner_one() -> None:
    """Of a planner around a service, both with a key, the planner's counts; without its own, the service's does."""
    scripted = [REFUND, REFUND, DONE]
    here = world([])
    inner = FunctionInvokingChatCompletion(
        world(scripted).service, service_id="keyed", **SIGNED
    )
    here.kernel.add_service(inner)
    keyless = FunctionCallingStepwisePlanner(
        "keyed", FunctionCallingStepwisePlannerOptions(plan=False)
    )
    keyed = FunctionCallingStepwisePlanner(
        "keyed", FunctionCallingStepwisePlannerOptions(plan=False, checkpoint_key=OTHER)
    )
    check_signed((await keyless.invoke(here.kernel, "Refund.")).checkpoint.to_json())
    outer = (await keyed.invoke(here.kernel, "Refund.")).checkpoint
    assert (
        Checkpoint.from_json(outer.to_json(), OTHER).facts
        == Checkpoint.from_json(outer.to_json()).facts
    )
    (waiting,) = present(outer.state().batch).calls
    with pytest.raises(InvalidCheckpointError, match=REFUSED):
        await keyless.resume(here.kernel, outer, {waiting.request.id: Approve()})
    assert (
        await keyed.resume(here.kernel, outer, {waiting.request.id: Approve()})
    ).status == "answered"


def with_top_key(data: dict[str, Any]) -> str:
    return json.dumps({**data, "note": "x"})


def with_nested_key(data: dict[str, Any]) -> str:
    data["facts"][0]["rules"]["limits"]["max_everything"] = 1
    return json.dumps(data)


def with_fact_key(data: dict[str, Any]) -> str:
    data["facts"][2]["approved"] = True
    return json.dumps(data)


def with_message_key(data: dict[str, Any]) -> str:
    data["facts"][1]["message"]["hidden"] = "x"
    return json.dumps(data)


def with_facts_twice(data: dict[str, Any]) -> str:
    return json.dumps(data).replace('"facts":', '"facts": [], "facts":', 1)


def with_nested_key_twice(data: dict[str, Any]) -> str:
    return json.dumps(data).replace('"verdict":', '"verdict": "run", "verdict":', 1)


UNKNOWN = [
    with_top_key,
    with_nested_key,
    with_fact_key,
    with_message_key,
    with_facts_twice,
    with_nested_key_twice,
]


@each_of("change", UNKNOWN)
async def test_a_key_that_no_checkpoint_has_is_refused(change: Any) -> None:
    """With a key: a JSON key that is unknown, or stands twice, at the top or within, makes the text unusable."""
    text = change(json.loads((await signed_checkpoint()).to_json()))
    with pytest.raises(InvalidCheckpointError):
        Checkpoint.from_json(text, KEY)
    here = world([])
    with pytest.raises(InvalidCheckpointError):
        async for _ in ToolCallHandler(here.kernel, **SIGNED).resume(
            ChatHistory(), text, APPROVE
        ):
            pass
    assert here.ran == []


@each_of(
    "change", [with_top_key, with_nested_key, with_facts_twice, with_nested_key_twice]
)
async def test_a_key_that_no_checkpoint_has_is_refused_without_a_signature(
    change: Any,
) -> None:
    """Without a key as well, as far as it can be known."""
    data = json.loads(
        (
            await planner_with(**ASK).invoke(world([REFUND]).kernel, "Refund.")
        ).checkpoint.to_json()
    )
    with pytest.raises(InvalidCheckpointError):
        Checkpoint.from_json(change(data))


@each_of("key", ["secret-text", b"", 7, bytearray(b"secret-text")], ids=repr)
async def test_a_key_that_protects_nothing_is_refused_without_being_shown(
    key: Any,
) -> None:
    """Each door takes bytes, at least one, names the option, and does not print what it got."""
    here = world([])
    for make in (
        lambda: FunctionCallingStepwisePlannerOptions(checkpoint_key=key),
        lambda: FunctionInvokingChatCompletion(here.service, checkpoint_key=key),
        lambda: ToolCallHandler(here.kernel, checkpoint_key=key),
        lambda: ToolUseSession(here.kernel, checkpoint_key=key),
    ):
        with pytest.raises(
            PlannerInvalidConfigurationError, match="checkpoint_key must be bytes"
        ) as refused:
            make()
        assert "secret" not in str(refused.value)


async def test_the_key_is_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    """Neither repr, dump, pickle, log, error nor checkpoint of anything that has the key shows it."""
    caplog.set_level(logging.DEBUG)
    here = world([REFUND])
    options = FunctionCallingStepwisePlannerOptions(plan=False, **SIGNED)
    planner = FunctionCallingStepwisePlanner("scripted", options)
    service = FunctionInvokingChatCompletion(here.service, **SIGNED)
    handler, session = (
        ToolCallHandler(here.kernel, **SIGNED),
        ToolUseSession(here.kernel, **SIGNED),
    )
    result = await planner.invoke(here.kernel, "Refund order 7.")
    with pytest.raises(InvalidCheckpointError) as refused:
        planner.cancel(Checkpoint(result.facts))
    keyed = FunctionCallingStepwisePlannerOptions(checkpoint_key=KEY)
    shown = [
        *(
            repr(vars(each))
            for each in (planner, handler, session, options, result, keyed)
        ),
        *(
            repr(each)
            for each in (
                planner,
                service,
                handler,
                session,
                options,
                result,
                service.options,
                refused,
            )
        ),
        str(options),
        f"{options.checkpoint_key}",
        str(service.options.checkpoint_key),
        str(refused.value),
        repr(options.model_dump()),
        keyed.model_dump_json(),
        repr(service.model_dump()),
        result.model_dump_json(),
        result.checkpoint.to_json(),
        repr(result.checkpoint),
        repr(pickle.dumps(keyed)),
        repr(pickle.dumps(result.checkpoint)),
        repr(pickle.dumps(FunctionCallingStepwisePlanner("scripted", keyed).options)),
        caplog.text,
    ]
    for text in shown:
        assert KEY.decode() not in text


async def test_options_that_lost_their_key_sign_and_take_nothing() -> None:
    """Pickled options leave the key behind: a planner made of them refuses to work without it."""
    options = pickle.loads(
        pickle.dumps(
            FunctionCallingStepwisePlannerOptions(plan=False, checkpoint_key=KEY)
        )
    )
    here = world([REFUND])
    planner = FunctionCallingStepwisePlanner("scripted", options)
    with pytest.raises(PlannerInvalidConfigurationError, match="left behind"):
        await planner.resume(here.kernel, await signed_checkpoint(), APPROVE)
    assert here.ran == []


async def test_copied_options_keep_the_key() -> None:
    """Copies made in one process are the same options, key included."""
    options = FunctionCallingStepwisePlannerOptions(plan=False, **SIGNED)
    for other in (
        options.model_copy(deep=True),
        copy.deepcopy(options),
        copy.copy(options),
    ):
        result = await FunctionCallingStepwisePlanner("scripted", other).invoke(
            world([REFUND]).kernel, "Refund."
        )
        check_signed(result.checkpoint.to_json())
