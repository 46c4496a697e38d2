"""The calls and questions of a run that wait for a person."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from planner_ext.approval.decisions import (
    ToolCall,
    digest_of,
    fingerprint_of,
    json_object,
    question_id,
    record_of,
)
from planner_ext.core.facts import CallDecided, ModelReplied, Panel
from planner_ext.core.state import (
    ASK_USER,
    Call,
    OpenRun,
    Phase,
    State,
    open_runs,
    path_of,
)
from planner_ext.core.values import RequestedCall, updated

InDoubt: TypeAlias = Literal["person", "model"]
"""Who handles a call in doubt: a person decides, or the model reads that its effect is
unknown."""

IN_DOUBT_PROMPT = (
    "This call is in doubt: it had started when its process ended, and may have taken effect. "
    "Approve runs it again, Supply tells the model its result, Deny leaves the model with the doubt."
)


def waiting_calls(state: State) -> Mapping[int | None, Call]:
    """Find what waits for a person in a run itself, by index and in call order.

    - a deferred call: its `decided` is the question;
    - a call in doubt, while the run is paused: its `decided` becomes the question
      whether to run it again;
    - a plain reply that asks: a call of the function that asks the user, at the index
      None.
    """
    paused = state.phase is Phase.PAUSED
    found = dict[int | None, Call]()
    for index, call in questions_of(state):
        if call.started and paused:
            found[index] = updated(call, decided=_whether_again(state, call))
        elif not call.started and (index is not None or paused):
            found[index] = call
    return found


def _whether_again(state: State, call: Call) -> CallDecided:
    """Ask whether a call in doubt is to run again."""
    fact = call.decided_fact
    own = fingerprint_of(
        state.run_id, fact.iteration, fact.call_id, fact.digest, fact.signature
    )
    panel = Panel(quorum=fact.panel.quorum)
    return replace(
        fact,
        expires_at=None,
        prompt=IN_DOUBT_PROMPT,
        fingerprint=own,
        panel=panel,
    )


def questions_of(state: State) -> Iterator[tuple[int | None, Call]]:
    """Find the calls of a run about which a question may be open, also while it is driven: see `waiting_calls`.

    A call that was left is not one of them: the question is about a call of a run in it.
    """
    batch = state.batch
    if state.ended is not None:
        return
    if batch is None:
        if state.reply is not None:
            yield None, _plain_question(state, state.reply)
        return
    for index, call in enumerate(batch.calls):
        deferred = call.decided is not None and call.decided.verdict == "defer"
        in_doubt = call.started and not call.left
        if call.answer is None and (deferred or in_doubt):
            yield index, call


def place_of(state: State, call: ToolCall | CallDecided) -> int | None:
    """Return the index of `waiting_calls` for a call; a plain reply's fact has 0."""
    return None if state.batch is None else call.index


def waiting_everywhere(state: State) -> Mapping[str, tuple[OpenRun, Call]]:
    """Find what waits for a person in a run and in the runs inside it, by path: see `ToolCall.path`."""
    return {
        run.path + path_of(call.request.id): (run, call)
        for run in open_runs(state)
        for call in waiting_calls(run.state).values()
    }


def pending_calls(state: State) -> tuple[ToolCall, ...]:
    """List what waits for a person in a run, and in the runs inside it: calls, and questions."""
    return tuple(
        shown_call(run.state, call, path)
        for path, (run, call) in waiting_everywhere(state).items()
    )


def shown_call(state: State, call: Call, path: str) -> ToolCall:
    """Show one of a run's `waiting_calls` as a person sees it, at its path."""
    fact = call.decided_fact
    expires_at = fact.expires_at
    *plugin, function = fact.function.split("-", maxsplit=1)
    return ToolCall(
        id=fact.call_id,
        path=path,
        kind="question" if fact.kind == "question" else "function",
        plugin_name="".join(plugin),
        function_name=function,
        fully_qualified_name=fact.function,
        arguments=json_object(fact.arguments_of(call.request)) or {},
        raw_arguments=call.request.arguments,
        iteration=fact.iteration,
        index=fact.index,
        batch_size=1 if state.batch is None else len(state.batch.calls),
        fingerprint=fact.fingerprint,
        signature=fact.signature,
        goal=state.goal,
        prompt=fact.prompt,
        summary=fact.summary,
        asked_by=fact.asked_by,
        roles=fact.roles,
        expires_at=None
        if expires_at is None
        else datetime.fromtimestamp(expires_at, UTC),
        in_doubt=call.started,
        decision=record_of(fact, call.request),
        parameters=json_object(fact.parameters) if fact.parameters else None,
    )


def only_asks(state: State) -> bool:
    """Return whether a run waits for answers alone, and for no decision on a call."""
    return state.phase is Phase.PAUSED and all(
        call.decided_fact.kind == "question"
        for _, call in waiting_everywhere(state).values()
    )


def present_status(state: State) -> str:
    """Return the status of a run: as in a result, or ``running``, also if its process ended."""
    if state.ended is not None:
        return state.ended.status
    return (
        "asked"
        if only_asks(state)
        else "paused"
        if state.phase is Phase.PAUSED
        else "running"
    )


def _plain_question(state: State, reply: ModelReplied) -> Call:
    call_id = question_id(reply.iteration)
    arguments = {"question": reply.text}
    digest = digest_of(ASK_USER, arguments)
    decided = CallDecided(
        iteration=reply.iteration,
        index=0,
        call_id=call_id,
        function=ASK_USER,
        kind="question",
        verdict="defer",
        digest=digest,
        fingerprint=fingerprint_of(state.run_id, reply.iteration, call_id, digest),
        prompt=reply.text,
        at=reply.at,
    )
    return Call(
        request=RequestedCall(
            id=call_id, name=ASK_USER, arguments=json.dumps(arguments)
        ),
        decided=decided,
    )
