"""The service among the samples, as its header starts it: over HTTP, with its workers."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx

import planner_ext
from planner_ext.durable import Runs

SAMPLES = Path(__file__).parents[2] / "samples"
SERVICE = SAMPLES / "step16_service.py"
GOAL = "One lamp of order A-1007 came broken. Refund it."


@contextmanager
def serving(folder: Path) -> Generator[tuple[httpx.Client, list[str]]]:
    """Run the service in a folder; at the end Ctrl-C ends it. Yields a client, and the lines that it printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PLANNER_EXT_"))}
    words = [sys.executable, "-m", "uvicorn", "--app-dir", str(SAMPLES), "step16_service:service", "--port", str(port)]
    env = own | {"PYTHONPATH": str(Path(planner_ext.__file__).parent.parent)}
    with (
        subprocess.Popen(words, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        assert process.stderr is not None
        try:
            printed = [next(line for line in process.stderr if "Uvicorn running" in line)]
            yield client, printed
        finally:
            process.send_signal(signal.SIGINT)
        printed += process.stderr
        assert process.wait() == 0


async def test_runs_are_submitted_decided_and_answered_over_http(tmp_path: Path) -> None:
    """A web request neither drives a run nor waits for it; what cannot be found or taken is a status and a sentence."""
    with serving(tmp_path) as (client, printed):
        submitted = client.post("/runs", json={"goal": GOAL})
        run_id = submitted.json()
        assert submitted.status_code == 202
        async with Runs.connect(tmp_path / "runs.db", poll_seconds=0.05) as runs:
            await runs.wait(run_id)
            paused = client.get(f"/runs/{run_id}").json()
            assert (paused["status"], paused["iterations"], paused["final_answer"]) == ("paused", 2, "")
            (waiting,) = client.get("/approvals").json()
            assert waiting["arguments"] == {"order": "A-1007", "amount": 128.0}
            assert [call["id"] for call in paused["pending"]] == [waiting["id"]]
            decision = {"approve": True, "by": "ann"}
            assert [client.post(f"/approvals/{waiting['id']}", json=decision).json() for _ in range(2)] == [True, False]
            await runs.wait(run_id)
        answered = client.get(f"/runs/{run_id}").json()
        assert answered["status"] == "answered"
        assert answered["final_answer"].endswith("128.00 euros refunded for A-1007.")

        unknown = client.get("/runs/order-8")
        assert (unknown.status_code, "no run 'order-8'" in unknown.json()) == (404, True)
        assert client.post("/approvals/order-8/0/pay", json=decision).status_code == 409
        assert client.post("/runs", json={"goal": " "}).status_code == 422
    assert "Traceback" not in "".join(printed)


def test_the_service_is_short_and_its_header_starts_it() -> None:
    """At most 60 lines, the header included."""
    text = SERVICE.read_text("utf-8")
    assert len(text.splitlines()) <= 60
    assert "\n    uvicorn --app-dir samples step16_service:service\n" in text
