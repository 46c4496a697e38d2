"""Step 16: a web service that submits runs, and worker processes that drive them with step 15's shop.

Run it, after ``pip install fastapi uvicorn``, and ask it from another terminal:

    uvicorn --app-dir samples step16_service:service
    curl localhost:8000/runs --json '{"goal": "One lamp of order A-1007 came broken. Refund it."}'
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse

from planner_ext import Approve, Deny
from planner_ext.durable import ApprovalRefusedError, Approvals, PendingApproval, RunResult, Runs, UnknownRunError

STORE = os.environ.get("PLANNER_EXT_STORE", str(Path("runs.db").resolve()))  # or postgresql://..., for many machines
WORKER = [sys.executable, "-m", "planner_ext", "worker", "--store", STORE, "--app", "step15_durable:application"]


@asynccontextmanager
async def lifespan(service: FastAPI) -> AsyncGenerator[None]:
    async with Runs.connect(STORE) as service.state.runs, Approvals.connect(STORE) as service.state.approvals:
        workers = [await asyncio.create_subprocess_exec(*WORKER, cwd=Path(__file__).parent) for _ in range(2)]
        yield
        for worker in workers:
            with suppress(ProcessLookupError):  # Ctrl-C in the terminal has reached it, too
                worker.terminate()
        await asyncio.gather(*(worker.wait() for worker in workers))


service = FastAPI(lifespan=lifespan)
for refused, status in ((UnknownRunError, 404), (ApprovalRefusedError, 409)):
    service.add_exception_handler(refused, lambda _, error, status=status: JSONResponse(str(error), status))


@service.post("/runs", status_code=202)
async def submit(goal: str = Body(embed=True, pattern=r"\S")) -> str:
    return (await service.state.runs.submit(goal)).run_id


@service.get("/runs/{run_id}")
async def show(run_id: str) -> RunResult:
    return await service.state.runs.result(run_id)


@service.get("/approvals")
async def pending() -> list[PendingApproval]:
    return await service.state.approvals.pending()


@service.post("/approvals/{approval_id:path}")
async def decide(approval_id: str, approve: bool = Body(), by: str = Body()) -> bool:  # in earnest, by who is signed in
    return await service.state.approvals.decide(approval_id, Approve(by=by) if approve else Deny(by=by))
