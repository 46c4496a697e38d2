"""The message that a service or an agent returns for a run; it also shows that a turn of an agent waits."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from semantic_kernel.contents import AuthorRole, ChatMessageContent

from planner_ext.approval.waiting import pending_calls
from planner_ext.core.errors import waiting_text
from planner_ext.core.facts import (
    CallFinished,
    CallLeft,
    Clarified,
    Fact,
    IterationCompleted,
    ModelReplied,
    Planned,
    RequestFailed,
    unwrapped,
)
from planner_ext.core.fold import fold
from planner_ext.core.state import Phase, State
from planner_ext.core.values import CallResult, Message, Usage
from planner_ext.sk.chat.history import last_reply, render
from planner_ext.sk.checkpoint import Checkpoint, SigningKey
from planner_ext.sk.errors import InvalidHistoryError
from planner_ext.sk.messages import (
    add_reported,
    as_reported,
    assistant_text,
    load_message,
    loaded,
    text_of,
)
from planner_ext.sk.run.outcome import status_of

PAUSED_TEXT = "This run waits for a decision."
"""The text of a service's message for a paused run; one that only asks returns its questions."""


def waits(message: ChatMessageContent) -> bool:
    """Whether an agent added it to its thread for a turn that waits for a decision.

    An agent names what it adds, and keeps only the text of a stream. A message without
    a name is of a caller who keeps the history, and may continue without the call.
    """
    if message.role != AuthorRole.ASSISTANT or message.name is None:
        return False
    status = message.metadata.get("status")
    return status == "paused" or (
        status is None and text_of(message).endswith(PAUSED_TEXT)
    )


def refuse_waiting(messages: Sequence[ChatMessageContent]) -> None:
    """Refuse a further turn of an agent whose last one waits for a decision."""
    last = next(
        (
            message
            for message in reversed(messages)
            if message.role == AuthorRole.ASSISTANT
        ),
        None,
    )
    if last is not None and waits(last):
        raise InvalidHistoryError(
            f"Expected a conversation in which nothing waits; the last turn of the agent {last.name!r} waits for a "
            "decision. Nothing was sent. Decide it with planner_ext.agent.resume_agent, or end it with "
            "planner_ext.agent.cancel_agent."
        )


def final_message(
    state: State, facts: Sequence[Fact], key: SigningKey | None
) -> ChatMessageContent:
    """Build the message that a service returns: an assistant message, safe to add to the history.

    It carries calls only if they are returned to the caller. Where a filter ended the
    run it is, as in Semantic Kernel's loop, the tool message with the last batch's
    results.
    """
    reply = last_reply(facts)
    status = status_of(state)
    metadata = {
        **({} if reply is None else load_message(reply.message).metadata),
        "iterations": state.usage.iterations,
        "usage": _reported_usage(facts),
        "tool_calls": state.usage.tool_calls,
        "status": status,
        "limit": state.ended.limit if state.ended is not None else None,
    }
    if status in ("paused", "asked"):
        metadata["pending"] = [call.as_dict() for call in pending_calls(state)]
    if status != "answered":
        metadata["reason"] = (
            waiting_text(status) if state.ended is None else state.ended.reason
        )
        metadata["checkpoint"] = Checkpoint.of_run(facts, key).to_json()
    return returned_message(state, facts).model_copy(update={"metadata": metadata})


def returned_message(state: State, facts: Sequence[Fact]) -> ChatMessageContent:
    """Build the message of `final_message`, without the metadata about the run."""
    if state.phase is Phase.PAUSED:
        questions = (
            [call.prompt for call in pending_calls(state)]
            if status_of(state) == "asked"
            else []
        )
        return assistant_text("\n".join(questions) or PAUSED_TEXT)
    if results := _results_of_terminated(state, facts):
        return ChatMessageContent(role=AuthorRole.TOOL, items=[*results])
    reply = last_reply(facts)
    returned = state.ended is not None and state.ended.returned
    # A reply without text, whose calls were handled, is not the answer.
    if reply is None or not (
        returned or (state.reply is not None and state.reply.text)
    ):
        return assistant_text(state.ended.answer if state.ended is not None else "")
    message = render((reply.message,))[0]
    if reply.calls and not returned:
        return assistant_text(
            text_of(message),
            finish_reason=message.finish_reason,
            ai_model_id=message.ai_model_id,
        )
    return message


def _results_of_terminated(state: State, facts: Sequence[Fact]) -> list[Any]:
    if state.ended is None or state.ended.status != "stopped":
        return []
    ends = range(len(facts) - 1, -1, -1)
    completed = next(
        (place for place in ends if isinstance(facts[place], IterationCompleted)), 0
    )
    batch = takewhile(
        lambda fact: not isinstance(fact, ModelReplied), reversed(facts[:completed])
    )
    if not any(isinstance(fact, CallFinished) and fact.terminate for fact in batch):
        return []
    transcript = fold(
        facts[:completed]
    ).transcript  # a callback may have compacted that of the state
    results = [
        *takewhile(lambda entry: isinstance(entry, CallResult), reversed(transcript))
    ]
    return [item for message in render(reversed(results)) for item in message.items]


def _reported_usage(facts: Sequence[Fact]) -> Any:
    """Sum the usage of all requests, in the connector's own type; others add only their tokens."""
    total: Any = None
    for fact in facts:
        match unwrapped(fact):
            case ModelReplied(message=message) if fact.type == "ModelReplied":
                total = add_reported(total, _usage_in(message))
            case (
                ModelReplied(usage=usage)
                | Planned(usage=usage)
                | Clarified(usage=usage)
                | RequestFailed(usage=usage)
                | CallFinished(spent=Usage() as usage)
                | CallLeft(spent=Usage() as usage)
            ):
                total = add_reported(total, as_reported(usage))
            case _:
                pass
    return total


def _usage_in(message: Message) -> Any:
    """Read a message's usage; if loaded from JSON, as Semantic Kernel's own type."""
    if isinstance(message, ChatMessageContent):
        return message.metadata.get("usage")
    return loaded(message.get("metadata", {}).get("usage"))
