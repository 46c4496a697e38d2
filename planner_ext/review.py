"""From a requested call to a recorded decision: fingerprint it, show it, and put a verdict into words."""

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

from planner_ext.approval.decisions import Approve, Decision, Defer, Deny, Supply, ToolCall
from planner_ext.approval.fingerprint import digest_of, digests_of, fingerprint_of, takes_no_more
from planner_ext.core.facts import CallDecided
from planner_ext.core.state import State
from planner_ext.core.values import Checked
from planner_ext.ports import Functions

__all__ = ["apply_decision", "describe_call", "first_verdict", "is_as_decided"]

FINAL_ANSWER_ACCEPTED = "The final answer was accepted."
"""What stands in the transcript as the result of the final-answer call."""


def first_verdict(state: State, index: int, checked: Checked, at: float) -> CallDecided:
    """Record what a checked call of the open batch comes to as long as nobody objects.

    A ``function`` runs, the final answer is taken, a question waits, a call of the caller's own function goes back to
    the caller, and an unknown or unusable one is answered.
    """
    batch = state.batch
    assert batch is not None
    request = batch.calls[index].request
    digest = fingerprint = ""
    if checked.kind in _BOUND:
        digest = digest_of(checked.function, checked.arguments)
        fingerprint = fingerprint_of(state.run_id, batch.iteration, request.id, digest, checked.signature)
    return CallDecided(
        iteration=batch.iteration,
        index=index,
        call_id=request.id,
        function=checked.function,
        kind=checked.kind,
        nested=checked.nested,
        asks_model=checked.asks_model,
        digest=digest,
        signature=checked.signature,
        fingerprint=fingerprint,
        arguments=checked.converted,
        at=at,
        **_verdict(checked),
    )


_BOUND = frozenset({"function", "question"})
"""Kinds of calls that somebody may decide."""


def _verdict(checked: Checked) -> dict[str, Any]:
    match checked.kind:
        case "function":
            return {"verdict": "run"}
        case "final_answer":
            return {"verdict": "final_answer", "answer": FINAL_ANSWER_ACCEPTED, "final_answer": checked.answer}
        case "question":
            return {"verdict": "defer", "prompt": checked.answer}
        case "external":
            return {"verdict": "external"}
        case "unknown" | "invalid":
            return {"verdict": "answer", "answer": checked.answer, "reason": checked.kind}


def is_as_decided(checked: Checked, fact: CallDecided) -> bool:
    """Whether a call that was checked again is the one that was decided; older journals say nothing of parameters."""
    same = checked.kind == "function" and fact.digest in digests_of(checked.function, checked.arguments)
    return same and takes_no_more(fact.signature, checked.signature)


def describe_call(state: State, fact: CallDecided, checked: Checked) -> ToolCall:
    """Show a call that could run as interceptors see it."""
    batch = state.batch
    assert batch is not None
    return ToolCall(
        id=fact.call_id,
        plugin_name=checked.plugin_name,
        function_name=checked.function_name,
        fully_qualified_name=checked.function,
        arguments=deepcopy(dict(checked.arguments)),  # theirs to hold: what was fingerprinted is what runs
        raw_arguments=batch.calls[fact.index].request.arguments,
        iteration=fact.iteration,
        index=fact.index,
        batch_size=len(batch.calls),
        fingerprint=fact.fingerprint,
        signature=fact.signature,
    )


def apply_decision(fact: CallDecided, decision: Decision, functions: Functions, state: State) -> CallDecided:
    """Record what a decider said of a call that could run.

    Edited arguments are validated as the model's are; where they do not pass, the call is denied.
    """
    match decision:
        case Approve(arguments=None):
            return replace(fact, verdict="run", approved=True, by=decision.by or "", sticky=decision.always)
        case Approve():
            return _edited(fact, decision, functions, state)
        case Deny(reason=reason, by=by):
            return replace(fact, verdict="deny", answer=_refusal(reason), reason=reason, by=by or "")
        case Supply(result=result, by=by):
            text = functions.encode(result)
            return replace(fact, verdict="answer", answer=text, reason="supplied", by=by or "")
        case Defer(prompt=prompt, expires_in=expires_in):
            expires_at = None if expires_in is None else fact.at + expires_in
            return replace(fact, verdict="defer", prompt=prompt or "", expires_at=expires_at)


def _refusal(reason: str) -> str:
    return f"The call was refused and did not run: {reason}" if reason else "The call was refused and did not run."


def _unusable(decision: Approve, problem: str) -> Deny:
    return Deny(f"The edited arguments cannot be used. {problem}", decision.by)


def _edited(fact: CallDecided, decision: Approve, functions: Functions, state: State) -> CallDecided:
    batch = state.batch
    assert batch is not None
    try:
        text = json.dumps(decision.arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        return apply_decision(fact, _unusable(decision, f"They are no JSON: {error}"), functions, state)
    checked = functions.check(batch.calls[fact.index].request, text)
    if checked.kind != "function" or checked.function != fact.function:
        return apply_decision(fact, _unusable(decision, checked.answer), functions, state)
    return replace(
        fact,
        verdict="run",
        approved=True,
        by=decision.by or "",
        sticky=decision.always,
        edited=text if checked.converted is None else checked.converted,
        digest=digest_of(checked.function, checked.arguments),
    )
