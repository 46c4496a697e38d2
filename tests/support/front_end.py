"""A chat of a shop over a store, behind real HTTP, and the packages from npm that its tests drive it with."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from ag_ui.core import RunAgentInput
from ag_ui.encoder import EventEncoder
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import StreamingResponse
from semantic_kernel import Kernel
from semantic_kernel.exceptions import ServiceInvalidAuthError
from semantic_kernel.functions import kernel_function
from starlette.staticfiles import StaticFiles

from planner_ext import Budget, requires_approval
from planner_ext.ag_ui import ag_ui_kept_events, defer_front_end_tools
from planner_ext.durable import RetryPolicy
from planner_ext.hitl_manager import ApprovalSettings, DecisionRequest
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.durable import open_runs, planner_of
from support.inbox import served

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".front_end"
"""Where ``.ci/run`` installs the packages of ``samples/front_end``, and the newest client as ``newest``."""

needs_npm = pytest.mark.skipif(
    not (PACKAGES / "node_modules" / "newest").is_dir() or shutil.which("npm") is None,
    reason="no packages of the front end: .ci/run has npm install them",
)


def built_page(folder: Path) -> Path:
    """Build the sample's page in an empty folder, as its ``npm run build`` does."""
    page = shutil.copytree(ROOT / "samples" / "front_end", folder / "page")
    (page / "node_modules").symlink_to(PACKAGES / "node_modules")
    subprocess.run(["npm", "run", "build"], cwd=page, check=True, capture_output=True)
    return page


class Shop:
    """Functions that note what they did."""

    def __init__(self) -> None:
        self.paid: list[float] = []

    @kernel_function
    def price(self, article: str) -> str:
        return f"{article}: 42"

    @requires_approval(prompt="Really pay?")
    @kernel_function
    def pay(self, amount: float) -> str:
        self.paid.append(amount)
        return f"paid {amount}"

    @requires_approval(prompt="Refund it?", roles=["manager"])
    @kernel_function
    def refund(self, amount: float) -> str:
        self.paid.append(-amount)
        return f"refunded {amount}"


def clerk(request: ScriptedRequest) -> ScriptedReply:
    """Do what the user's last goal names, then answer with the results."""
    users = [
        place
        for place, one in enumerate(request.messages)
        if one["role"] == "user" and one["content"] in GOALS
    ]
    since = request.messages[users[-1] :]
    results = [str(one["content"]) for one in since if one["role"] == "tool"]
    goal = str(since[0]["content"])
    reply = GOALS[goal]
    if isinstance(reply, Exception):
        raise reply
    if results and goal != "Loop.":
        return say(f"Done: {', '.join(results)}")
    return reply


PAY = call("shop-pay", {"amount": 5})
GOALS: dict[str, ScriptedReply | Exception] = {
    "Hello.": say("Good morning."),
    "Price?": call("shop-price", {"article": "lamp"}),
    "Pay.": PAY,
    "Pay both.": calls(PAY, call("shop-pay", {"amount": 7})),
    "Ask me.": call("UserInteraction-AskUser", {"question": "Which one?"}),
    "Colour.": call("ag_ui-colour", {"colour": "red"}),
    "Loop.": call("shop-price", {"article": "bed"}),
    "Fail.": ServiceInvalidAuthError("at 10.0.0.7"),
    "Refund.": call("shop-refund", {"amount": 5}),
}


async def by_role(request: DecisionRequest) -> bool:
    """Let in whoever has a role of the call: mia alone is a manager."""
    return request.call is None or not request.call.roles or request.by == "mia"


@dataclass(frozen=True)
class Desk:
    """A service that is up.

    Attributes:
        agent: The address of its endpoint.
        page: The origin of the page, if it has one.
    """

    shop: Shop
    store: Path
    agent: str
    page: str


@asynccontextmanager
async def desk(store: Path, page: Path | None = None) -> AsyncGenerator[Desk]:
    """Serve the chat of eve, and its page from another origin."""
    shop = Shop()
    kernel = Kernel()
    kernel.add_plugin(shop, "shop")
    kernel.add_service(ScriptedChatCompletion(clerk))
    planner = planner_of(
        approval=ApprovalSettings(authorize=by_role),
        budget=Budget(max_tool_calls=2, on_limit="stop"),
        max_clarifications=1,
        interceptors=[defer_front_end_tools],
    )
    service = FastAPI()
    origins: list[str] = []
    service.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["POST"],
        allow_headers=["*"],
    )
    async with open_runs(
        store, poll_seconds=0.02, retry=RetryPolicy(attempts=1)
    ) as runs:

        @service.post("/agent")
        async def agent(run_input: RunAgentInput) -> StreamingResponse:
            encoder = EventEncoder()
            follow = 0.5 if "follow" in (run_input.forwarded_props or ()) else 0.0
            events = ag_ui_kept_events(
                runs, planner, kernel, run_input, by="eve", follow=follow
            )
            body = (encoder.encode(event) async for event in events)
            return StreamingResponse(body, media_type=encoder.get_content_type())

        working = asyncio.create_task(runs.work(planner, kernel))
        try:
            async with served(StaticFiles(directory=page or ROOT)) as origin:
                origins.append(origin)
                async with served(service) as address:
                    yield Desk(shop, store, f"{address}/agent", origin)
        finally:
            working.cancel()
