"""Journals for the pages of runs: one in which much happens, its fork, and a long one."""

import json
from dataclasses import replace
from typing import Any

from planner_ext.core.facts import (
    CallDecided,
    CallFinished,
    CallStarted,
    Ended,
    Fact,
    IterationCompleted,
    ModelAsked,
    ModelReplied,
    Paused,
    Planned,
    RequestFailed,
    Resumed,
    Rules,
    RunStarted,
)
from planner_ext.core.limits import Budget
from planner_ext.core.values import RequestedCall, Usage
from planner_ext.engine.journal import REQUEST_LOST

__all__ = ["Journal", "eventful", "forked", "long"]


class Journal:
    """Facts at a distance of seconds from each other."""

    def __init__(self, at: float = 1_795_365_678.0) -> None:
        self.at = at
        self.facts: list[Fact] = []

    def add(self, after: float, kind: Any, /, **values: Any) -> None:
        self.at += after
        if "seconds" in kind.__dataclass_fields__:
            values.setdefault("seconds", after)
        self.facts.append(kind(at=self.at, **values))

    def start(self, goal: str, run_id: str = "order-7", **rules: Any) -> None:
        messages = (
            message("system", "You are the order desk of a small shop."),
            message("user", goal),
        )
        self.add(
            0,
            RunStarted,
            run_id=run_id,
            rules=Rules(**rules),
            messages=messages,
            goal=goal,
        )

    def reply(
        self,
        after: float,
        iteration: int,
        text: str,
        *calls: tuple[str, object],
        tokens: int = 900,
    ) -> None:
        requested = tuple(
            RequestedCall(
                id=f"call_{iteration}_{place}",
                name=name,
                arguments=json.dumps(arguments),
            )
            for place, (name, arguments) in enumerate(calls)
        )
        self.add(
            after,
            ModelReplied,
            iteration=iteration,
            message={**message("assistant", text), "ai_model_id": "scripted"},
            text=text,
            calls=requested,
            finish_reason="tool_calls" if calls else "stop",
            usage=Usage(
                iterations=1,
                prompt_tokens=tokens,
                completion_tokens=40,
                cost=tokens / 1e6,
            ),
            offered=True,
            withheld=None,
        )

    def decide(
        self, iteration: int, index: int, name: str, verdict: str = "run", **more: Any
    ) -> None:
        values = {
            "kind": "function",
            "verdict": verdict,
            "digest": f"{name}{iteration}{index}",
            **more,
        }
        self._call(0.001, CallDecided, iteration, index, name, **values)

    def begin(self, iteration: int, index: int, name: str) -> None:
        self._call(0.002, CallStarted, iteration, index, name)

    def finish(
        self,
        after: float,
        iteration: int,
        index: int,
        name: str,
        result: str,
        **more: Any,
    ) -> None:
        self._call(
            after,
            CallFinished,
            iteration,
            index,
            name,
            result=result,
            **{"outcome": "ok", **more},
        )

    def _call(
        self,
        after: float,
        kind: Any,
        iteration: int,
        index: int,
        name: str,
        /,
        **more: Any,
    ) -> None:
        call = {
            "iteration": iteration,
            "index": index,
            "call_id": f"call_{iteration}_{index}",
            "function": name,
        }
        self.add(after, kind, **call, **more)

    def complete(self, iteration: int) -> None:
        self.add(0.01, IterationCompleted, iteration=iteration, called=True)


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "items": [{"content_type": "text", "text": text}]}


_GOAL = "Refund order 7 if the parcel is lost, and tell the customer in their language what happens next."
_LIMITS = Budget(
    max_iterations=12,
    max_tool_calls=10,
    max_total_tokens=20_000,
    max_cost=0.05,
    max_active_seconds=120,
    max_calls_per_function={"shop-refund": 2},
    max_calls_per_reply=None,
)


def _searched() -> Journal:
    """Plan, a batch of three in parallel of which one fails, a failed request and its retry."""
    run = Journal()
    run.start(_GOAL, limits=_LIMITS, plan=True)
    opening = (message("system", "A plan was made: follow it."), message("user", _GOAL))
    used = Usage(iterations=1, prompt_tokens=420, completion_tokens=61, cost=0.0002)
    run.add(
        2.1, Planned, plan="1. Look it up.\n2. Refund it.", messages=opening, usage=used
    )
    batch: dict[str, object] = {
        "shop-order": {"id": 7},
        "post-track": {"parcel": "CH-1182-77", "events": True},
        "crm-customer": {"order": 7},
    }
    run.reply(
        1.24,
        0,
        "I look up the order, the parcel and the customer at once.",
        *batch.items(),
    )
    for place, name in enumerate(batch):
        run.decide(0, place, name)
    for place, name in enumerate(batch):
        run.begin(0, place, name)
    run.finish(0.34, 0, 0, "shop-order", '{"id": 7, "total": 129.9}')
    run.finish(0.21, 0, 2, "crm-customer", '{"name": "Léa Morel"}')
    run.finish(
        1.6,
        0,
        1,
        "post-track",
        "The function failed.",
        outcome="failed",
        error="TimeoutError: no answer",
    )
    run.complete(0)
    run.add(
        8,
        RequestFailed,
        iteration=1,
        reason="APIStatusError: 503, the server is overloaded",
    )
    run.add(4, ModelAsked, iteration=1)
    run.reply(1.9, 1, "", ("post-track", {"parcel": "CH-1182-77"}))
    run.decide(1, 0, "post-track")
    run.begin(1, 0, "post-track")
    run.finish(0.8, 1, 0, "post-track", '{"status": "lost"}')
    run.complete(1)
    return run


def eventful(*, paused: bool = False) -> list[Fact]:
    """A run with a plan, failures, a pause with an edited approval, a denial, a nested run and a crash."""
    run = _searched()
    refund = {"order": 7, "amount": 129.9}
    letter = {
        "language": "fr",
        "goal": "Tell the customer that the refund is on its way.",
    }
    asked = (
        ("shop-refund", refund),
        ("write-letter", letter),
        ("shop-block_customer", {"customer": "Léa Morel"}),
    )
    run.reply(2.4, 2, "I refund it and have the letter written.", *asked)
    run.decide(
        2,
        0,
        "shop-refund",
        "defer",
        prompt="More than 100 francs: may it?",
        roles=("accounting",),
    )
    run.decide(2, 1, "write-letter", nested=True)
    run.decide(
        2,
        2,
        "shop-block_customer",
        "deny",
        by="rule 3",
        reason="Only people block.",
        answer="Refused.",
    )
    run.add(0.01, Paused)
    if paused:
        return run.facts
    run.add(11_293, Resumed)
    edited = {"edited": '{"order": 7, "amount": 120.0}', "by": "ann@shop.example"}
    run.decide(2, 0, "shop-refund", person=True, approved=True, **edited)
    run.begin(2, 0, "shop-refund")
    run.begin(2, 1, "write-letter")
    run.finish(0.9, 2, 0, "shop-refund", "refunded 120.00 CHF")
    spent = Usage(iterations=3, tool_calls=1, prompt_tokens=2410, completion_tokens=350)
    run.finish(
        5.2,
        2,
        1,
        "write-letter",
        "Bonjour Madame Morel,\n\n    votre colis est perdu.",
        spent=spent,
    )
    run.complete(2)
    run.add(
        310,
        RequestFailed,
        iteration=3,
        reason=REQUEST_LOST,
        usage=Usage(iterations=1),
        seconds=0.0,
    )
    run.add(0.2, ModelAsked, iteration=3)
    run.reply(2.2, 3, "Order 7 is refunded with 120.00 CHF.")
    run.add(
        0.001, Ended, status="answered", answer="Order 7 is refunded with 120.00 CHF."
    )
    return run.facts


def forked() -> list[Fact]:
    """The same run from its second iteration on, with another limit."""
    run = _searched()
    run.add(400, Resumed, limits=replace(_LIMITS, max_iterations=6))
    run.reply(
        3.1,
        2,
        "It is lost, so I refund it.",
        ("shop-refund", {"order": 7, "amount": 129.9}),
    )
    run.decide(2, 0, "shop-refund")
    run.begin(2, 0, "shop-refund")
    run.finish(0.7, 2, 0, "shop-refund", "refunded 129.90 CHF")
    run.complete(2)
    run.reply(1.2, 3, "Order 7 is refunded.")
    run.add(0.001, Ended, status="answered", answer="Order 7 is refunded.")
    return run.facts


def long(iterations: int = 256) -> list[Fact]:
    """A run of eight facts an iteration."""
    run = Journal()
    run.start(
        "Check every order of the day.",
        limits=Budget(max_iterations=400, max_calls_per_reply=None),
    )
    names = ("shop-order", "post-track")
    for iteration in range(iterations):
        calls = [(name, {"order": iteration}) for name in names]
        run.reply(
            0.8 + iteration % 7 * 0.3, iteration, f"I check order {iteration}.", *calls
        )
        for place, name in enumerate(names):
            run.decide(iteration, place, name)
        for place, name in enumerate(names):
            run.begin(iteration, place, name)
        for place, name in enumerate(names):
            run.finish(
                0.2 + iteration % 5 * 0.1,
                iteration,
                place,
                name,
                json.dumps({"note": "x" * 300}),
            )
        run.complete(iteration)
    return run.facts
