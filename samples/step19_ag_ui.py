"""Step 19: step 15's shop behind CopilotKit, assistant-ui or any other front end of the AG-UI protocol.

Run it, after ``pip install "planner-ext[ag-ui]" fastapi uvicorn``:

    uvicorn --app-dir samples step19_ag_ui:service

and connect the front end: ``new HttpAgent({url: "http://localhost:8000/agent"})``. Texts and calls are streamed. The
refund waits for the user: the run ends with an interrupt, and the user's answer continues it.
"""

from ag_ui.core import RunAgentInput
from ag_ui.encoder import EventEncoder
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import StreamingResponse
from step15_durable import application

from planner_ext import Checkpoint
from planner_ext.ag_ui import ag_ui_events

planner, kernel = application()
waiting: dict[str, Checkpoint] = {}  # for one user; keep a separate one for each signed-in user
service = FastAPI()
service.add_middleware(CORSMiddleware, allow_origins=["http://localhost:3000"], allow_headers=["*"])  # its origin


@service.post("/agent")
async def agent(run_input: RunAgentInput) -> StreamingResponse:
    encoder, events = EventEncoder(), ag_ui_events(planner, kernel, run_input, waiting=waiting)
    return StreamingResponse((encoder.encode(event) async for event in events), media_type=encoder.get_content_type())
