"""The services among the samples, as their headers start them: over HTTP."""

import os
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from ag_ui.core import Event, RunAgentInput
from pydantic import TypeAdapter

import planner_ext
from planner_ext.durable import Runs
from support.ag_ui import FrontEnd
from support.processes import Lives
from support.values import each_of

SAMPLES = Path(__file__).parents[2] / "samples"
SERVICES = ("step16_service", "step19_ag_ui")
EVENT: TypeAdapter[Any] = TypeAdapter(Event)
GOAL = "One lamp of order A-1007 came broken. Refund it."


@contextmanager
def serving(
    lives: Lives, folder: Path, service: str
) -> Generator[tuple[httpx.Client, list[str]]]:
    """Run a service in a folder; at the end Ctrl-C ends it. Yields a client, and the lines that it printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "PLANNER_EXT_"))
    }
    words = (
        "-m",
        "uvicorn",
        "--app-dir",
        str(SAMPLES),
        f"{service}:service",
        "--port",
        str(port),
    )
    env = own | {"PYTHONPATH": str(Path(planner_ext.__file__).parent.parent)}
    with (
        lives.program(*words, cwd=folder, env=env) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        try:
            printed = [
                next(line for line in process.stderr if "Uvicorn running" in line)
            ]
            yield client, printed
        finally:
            process.send_signal(signal.SIGINT)
        printed += process.stderr
        assert process.wait() == 0


async def test_runs_are_submitted_decided_and_answered_over_http(
    lives: Lives, tmp_path: Path
) -> None:
    """A web request neither drives a run nor waits for it; what cannot be found or taken is a status and a sentence."""
    with serving(lives, tmp_path, "step16_service") as (client, printed):
        submitted = client.post("/runs", json={"goal": GOAL})
        run_id = submitted.json()
        assert submitted.status_code == 202
        async with Runs.connect(tmp_path / "runs.db", poll_seconds=0.05) as runs:
            await runs.wait(run_id)
            paused = client.get(f"/runs/{run_id}").json()
            assert (paused["status"], paused["iterations"], paused["final_answer"]) == (
                "paused",
                2,
                "",
            )
            (waiting,) = client.get("/approvals").json()
            assert waiting["arguments"] == {"order": "A-1007", "amount": 128.0}
            assert [call["id"] for call in paused["pending"]] == [waiting["id"]]
            decision = {"approve": True, "by": "ann"}
            assert [
                client.post(f"/approvals/{waiting['id']}", json=decision).json()
                for _ in range(2)
            ] == [True, False]
            await runs.wait(run_id)
        answered = client.get(f"/runs/{run_id}").json()
        assert answered["status"] == "answered"
        assert answered["final_answer"].endswith("128.00 euros refunded for A-1007.")

        unknown = client.get("/runs/order-8")
        assert (unknown.status_code, "no run 'order-8'" in unknown.json()) == (
            404,
            True,
        )
        assert client.post("/approvals/order-8/0/pay", json=decision).status_code == 409
        assert client.post("/runs", json={"goal": " "}).status_code == 422
    assert "Traceback" not in "".join(printed)


def send(client: httpx.Client, front: FrontEnd, run_input: RunAgentInput) -> Any:
    """Post one input of a front end; return the last event."""
    response = client.post(
        "/agent", json=run_input.model_dump(by_alias=True, mode="json")
    )
    assert (response.status_code, response.headers["content-type"]) == (
        200,
        "text/event-stream; charset=utf-8",
    )
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    front.take([EVENT.validate_json(line) for line in lines])
    return front.events[-1]


async def test_a_front_end_approves_over_http(lives: Lives, tmp_path: Path) -> None:
    """Server-sent events of the AG-UI protocol: an interrupt, its answer in the next request, and the result."""
    front = FrontEnd()
    with serving(lives, tmp_path, "step19_ag_ui") as (client, printed):
        assert send(client, front, front.ask(GOAL)).outcome.type == "interrupt"
        (interrupt,) = front.interrupts
        assert interrupt.message == "May this money go back?"
        edited = {"order": "A-1007", "amount": 100}
        answer = front.answer({"approved": True, "editedArgs": edited})
        ended = send(client, front, answer)
        assert ended.outcome.type == "success"
        assert ended.result.endswith("100.00 euros refunded for A-1007.")
        send(client, front, answer)
        assert "decided before" in str(front.messages[-1].content)
        assert client.post("/agent", json={"threadId": "t"}).status_code == 422
    assert "Traceback" not in "".join(printed)


async def test_a_front_end_survives_a_restart(lives: Lives, tmp_path: Path) -> None:
    """The server is killed while the refund waits: the next one shows the thread to a page that was loaded again."""
    front = FrontEnd()
    with serving(lives, tmp_path, "step19_ag_ui") as (client, _):
        send(client, front, front.ask(GOAL))
    page = FrontEnd()
    with serving(lives, tmp_path, "step19_ag_ui") as (client, _):
        send(client, page, page.look())
        assert [one.id for one in page.messages] == [one.id for one in front.messages]
        ended = send(client, page, page.answer({"approved": True}))
    assert ended.result.endswith("128.00 euros refunded for A-1007.")


def test_a_browser_may_ask_the_front_ends_service(lives: Lives, tmp_path: Path) -> None:
    """From the page's origin alone: what a browser asks before it posts JSON to another origin is granted."""
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    with serving(lives, tmp_path, "step19_ag_ui") as (client, _):
        for origin, status in (("http://localhost:3000", 200), ("http://evil", 400)):
            answer = client.options("/agent", headers={"Origin": origin, **asked})
            assert answer.status_code == status


@each_of("service", SERVICES)
def test_a_service_is_short_and_its_header_starts_it(service: str) -> None:
    """At most 60 lines, the header included."""
    text = (SAMPLES / f"{service}.py").read_text("utf-8")
    assert len(text.splitlines()) <= 60
    assert f"\n    uvicorn --app-dir samples {service}:service\n" in text
