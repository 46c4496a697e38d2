"""Step 19: step 15's shop behind CopilotKit, assistant-ui or any other front end of the AG-UI protocol.

Run it, after ``pip install "planner-ext[ag-ui,cli]" fastapi uvicorn``:

    uvicorn --app-dir samples step19_ag_ui:service

and connect the front end: ``new HttpAgent({url: "http://localhost:8000/agent"})``; ``samples/front_end`` is a page. The
refund waits for the user: the run ends with an interrupt, and the user's answer continues it; so does one from
``planner-ext serve --store runs.db``. A reload of the page and a restart of the server lose nothing.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ag_ui.core import RunAgentInput
from ag_ui.encoder import EventEncoder
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import StreamingResponse
from step15_durable import application

from planner_ext.ag_ui import ag_ui_kept_events
from planner_ext.durable import Runs

planner, kernel = application()


@asynccontextmanager
async def lifespan(service: FastAPI) -> AsyncGenerator[None]:
    async with Runs.sqlite("runs.db") as service.state.runs:
        working = asyncio.create_task(service.state.runs.work(planner, kernel))  # what the inbox decides continues here
        yield
        working.cancel()


service = FastAPI(lifespan=lifespan)
service.add_middleware(  # the front end's own origin
    CORSMiddleware, allow_origins=["http://localhost:3000"], allow_methods=["POST"], allow_headers=["*"]
)


@service.post("/agent")
async def agent(run_input: RunAgentInput) -> StreamingResponse:
    encoder = EventEncoder()
    user = "ann"  # in earnest, who is signed in; their name in the run's keeps other users out
    run_id = f"{user}:{run_input.thread_id}"
    follow = 20.0 if "follow" in (run_input.forwarded_props or ()) else 0.0  # of the page, while only others can decide
    runs = service.state.runs
    events = ag_ui_kept_events(runs, planner, kernel, run_input, run_id=run_id, by=user, follow=follow)
    return StreamingResponse((encoder.encode(event) async for event in events), media_type=encoder.get_content_type())
