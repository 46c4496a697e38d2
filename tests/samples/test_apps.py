"""The apps that adopt the package: before and after, over HTTP, as their users see them; and the guide's diffs."""

import difflib
import itertools
import os
import re
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import planner_ext
from planner_ext.testing import (
    Script,
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.processes import Lives
from support.values import each_of

SAMPLES = Path(__file__).parents[2] / "samples"
APPS = SAMPLES / "apps"
GUIDE = (SAMPLES / "guides" / "adopt.md").read_text("utf-8")
IN_TERMINAL, IN_SHOP, OVER_HTTP, SPANS = re.findall(
    r"^```text\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE
)
SIZES = {"help_desk": 16, "shop_chat": 15, "billing_api": 19}
"""How many lines an adoption adds and removes."""

both_forms = pytest.mark.parametrize("form", ["before", "after"])


def environment(server: ScriptedOpenAIServer) -> dict[str, str]:
    """Point an app to a server."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "PLANNER_EXT_"))
    }
    package = str(Path(planner_ext.__file__).parent.parent)
    return {
        **own,
        "PYTHONPATH": package,
        "OPENAI_BASE_URL": server.url,
        "OPENAI_API_KEY": "any",
    }


def chat(
    lives: Lives, file: Path, folder: Path, script: Script, *typed: str
) -> tuple[str, list[ScriptedRequest]]:
    """Type lines into an app; return what it printed, and what the model was asked."""
    with ScriptedOpenAIServer(script) as server:
        text = "".join(f"{line}\n" for line in (*typed, "exit"))
        done = lives.run(str(file), cwd=folder, env=environment(server), typed=text)
        assert (done.returncode, done.stderr, server.refused) == (0, "", [])
        return done.stdout.strip(), list(server.requests)


def without(shown: str, *typed: str) -> str:
    """Take out of a session what was typed, which a program does not print."""
    for line in typed:
        shown = shown.replace(f" {line}\n", " ", 1)
    return shown


def read(request: ScriptedRequest) -> list[str]:
    """List the results of functions that a request holds."""
    return [
        str(message["content"])
        for message in request.messages
        if message["role"] == "tool"
    ]


# The help desk.

RESET = call("AccountPlugin-reset_password", {"login": "ada"})
TICKET = call("TicketPlugin-open_ticket", {"login": "ada", "summary": "No password"})
DESK = (
    call("AccountPlugin-find_login", {"name": "Ada"}),
    calls(call("TicketPlugin-open_tickets", {"login": "ada"}), RESET),
    TICKET,
    say("Ticket 1 is open."),
    say("You are ada."),
)


@both_forms
def test_the_help_desk_resets_a_password(
    lives: Lives, tmp_path: Path, form: str
) -> None:
    """Its functions run, SQLite has the ticket, the thread remembers; afterwards the technician is asked first."""
    yes = ("y",) if form == "after" else ()
    printed, requests = chat(
        lives,
        APPS / f"help_desk/{form}.py",
        tmp_path,
        DESK,
        "I am Ada.",
        *yes,
        "Who am I?",
    )
    assert "[directory] password of ada reset" in printed
    assert "HelpDesk: Ticket 1 is open.\n" in printed
    assert "HelpDesk: You are ada." in printed
    assert read(requests[3]) == [
        "ada",
        "[]",
        "A temporary password is on its way to the phone of ada.",
        "1",
    ]
    assert ("Reset the password? {'login': 'ada'} [y/n]" in printed) is (
        form == "after"
    )
    assert {"role": "assistant", "content": "Ticket 1 is open."}.items() <= dict(
        requests[4].messages[-2]
    ).items()


def test_a_password_that_the_technician_refuses_is_not_reset(
    lives: Lives, tmp_path: Path
) -> None:
    """The other functions run, the model reads the refusal, and the session is that of the guide."""
    script = (*DESK[:3], say("Your password was not reset; ticket 1 is open."))
    typed = "I am Ada. I forgot my password.", "n"
    printed, requests = chat(
        lives, APPS / "help_desk/after.py", tmp_path, script, *typed
    )
    assert printed.removesuffix("You:") == without(IN_TERMINAL, *typed)
    refused = "The call was refused and did not run: The technician refused."
    assert read(requests[3]) == ["ada", "[]", refused, "1"]


# The shop's chat.

SHOP = (
    call("catalog-list_teas"),
    say("Sencha, Darjeeling and two more."),
    call("orders-place_order", {"tea": "Darjeeling", "bags": 9}),
    call("orders-place_order", {"tea": "Darjeeling", "bags": 2}),
    say("Two bags are on their way."),
)


@both_forms
def test_the_shop_takes_an_order(lives: Lives, tmp_path: Path, form: str) -> None:
    """Answers stream, both filters work, errors reach the model; afterwards the customer is asked first."""
    yes = ("y", "y") if form == "after" else ()
    typed = ("Which teas?", "9 bags of Darjeeling, or what you have", *yes)
    printed, requests = chat(
        lives, APPS / f"shop_chat/{form}.py", tmp_path, SHOP, *typed
    )
    assert "Shop: [list_teas ...] Sencha, Darjeeling and two more.\n" in printed
    assert printed.count("[place_order ...]") == 2
    assert "Two bags are on their way." in printed
    assert "only 3 bags of Darjeeling are in stock" in read(requests[3])[1]
    assert read(requests[4])[2] == "2 x Darjeeling: 22.00 euros charged"
    assert printed.count("Charge your card?") == len(yes)
    assert (
        len(
            re.findall(
                "INFO shop orders-place_order",
                (tmp_path / "chat.log").read_text("utf-8"),
            )
        )
        == 2
    )


def test_the_guides_sessions_run_without_a_key(lives: Lives, tmp_path: Path) -> None:
    """``offline.py`` plays the model; a question stands in the stream."""
    own = {name: value for name, value in os.environ.items() if "OPENAI" not in name}
    env = {**own, "PYTHONPATH": str(Path(planner_ext.__file__).parent.parent)}
    for app, shown, prompt, *typed in (
        ("help_desk", IN_TERMINAL, "You:", "I am Ada. I forgot my password.", "n"),
        ("shop_chat", IN_SHOP, "Customer:", "Two bags of Darjeeling.", "y"),
    ):
        text = "\n".join([*typed, "exit\n"])
        words = str(APPS.parent / "offline.py"), f"{app}/after.py"
        done = lives.run(*words, cwd=tmp_path, env=env, typed=text)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip().removesuffix(prompt) == without(shown, *typed)


def test_a_card_is_not_charged_if_the_customer_says_no(
    lives: Lives, tmp_path: Path
) -> None:
    """Neither the function nor the application's filters around it run."""
    script = (*SHOP[3:4], say("Then not."))
    printed, requests = chat(
        lives,
        APPS / "shop_chat/after.py",
        tmp_path,
        script,
        "2 bags of Darjeeling",
        "n",
    )
    assert ("[place_order" in printed, "Then not." in printed) == (False, True)
    assert read(requests[1]) == [
        "The call was refused and did not run: The customer said no."
    ]


@pytest.mark.parametrize(("app", "trips"), [("help_desk", 6), ("shop_chat", 5)])
def test_a_model_that_never_stops_is_stopped_with_an_answer(
    lives: Lives, tmp_path: Path, app: str, trips: int
) -> None:
    """The server receives as many requests as the budget allows, and the last one brings an answer."""
    function = {"help_desk": "TimePlugin-today", "shop_chat": "catalog-list_teas"}[app]

    def never_stops(request: ScriptedRequest) -> ScriptedReply:
        return call(function) if request.tools else say("That is all I know.")

    printed, requests = chat(
        lives, APPS / app / "after.py", tmp_path, never_stops, "Go on and on"
    )
    assert (len(requests), "That is all I know." in printed) == (trips, True)


TRACED = """
import runpy
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=lambda span: f"span: {span.name}\\n")))
trace.set_tracer_provider(provider)
runpy.run_path(APP, run_name="__main__")
"""
"""Sets a tracer provider, as ``opentelemetry-instrument`` does, and starts an app."""


def test_an_app_is_traced_without_a_change_to_it(lives: Lives, tmp_path: Path) -> None:
    """A provider from outside gets a span of the run, of each iteration and of each function."""
    program = tmp_path / "traced.py"
    program.write_text(
        TRACED.replace("APP", repr(str(APPS / "help_desk/after.py"))), "utf-8"
    )
    printed, _ = chat(
        lives,
        program,
        tmp_path,
        (DESK[0], RESET, say("It is reset.")),
        "I am Ada.",
        "y",
    )
    assert re.findall("span: (.*)", printed) == SPANS.splitlines()


# The billing API.


@contextmanager
def serving(
    lives: Lives, form: str, server: ScriptedOpenAIServer
) -> Generator[httpx.Client]:
    """Run the API, as its header starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = APPS / "billing_api"
    words = (
        "-m",
        "uvicorn",
        "--app-dir",
        str(folder),
        f"{form}:app",
        "--port",
        str(port),
    )
    with (
        lives.program(*words, cwd=folder, env=environment(server)) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        try:
            assert any("Uvicorn running" in line for line in process.stderr)
            yield client
        finally:
            process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()


REFUND = (
    call("BillingAgent-BillingAgent", {"messages": "C-7 was charged twice for March."}),
    call("InvoicePlugin-list_invoices", {"customer": "C-7"}),
    call("InvoicePlugin-refund", {"invoice": "INV-1002", "amount": 49.0}),
)
QUESTION = {"customer": "C-7", "question": "Why was I charged twice?"}


def test_the_api_refunds_at_once_before(lives: Lives) -> None:
    """One agent asks the other, and the money is gone."""
    with ScriptedOpenAIServer(
        [*REFUND, say("Refunded."), say("You have 49 euros back.")]
    ) as server:
        with serving(lives, "before", server) as client:
            answer = client.post("/ask", json=QUESTION)
        assert (answer.status_code, answer.json()) == (
            200,
            {"answer": "You have 49 euros back."},
        )
        assert read(server.requests[3])[1] == "49.00 euros of INV-1002 refunded"


def test_the_api_waits_for_a_clerk_after(lives: Lives) -> None:
    """A refund runs only after a clerk approved this amount of this invoice, and then once."""
    asked = [
        [*REFUND, say("It waits."), say(text)]
        for text in ("A clerk decides about INV-1002.", "Not yet.")
    ]
    runs = [
        [*REFUND, say("Refunded."), say(text)]
        for text in ("You have 49 euros back.", "You had it before.")
    ]
    with ScriptedOpenAIServer(itertools.chain(*asked, *runs)) as server:
        with serving(lives, "after", server) as client:
            grant = {"clerk": "ann", "invoice": "INV-1002", "amount": 49.0}
            answers = [client.post("/ask", json=QUESTION)]
            assert client.post("/approve", params={**grant, "amount": 20.0}).is_success
            assert client.post("/ask", json=QUESTION).json() == {"answer": "Not yet."}
            answers += [
                client.post("/approve", params=grant),
                *(client.post("/ask", json=QUESTION) for _ in "12"),
            ]
        shown = [line.split(maxsplit=3)[2:] for line in OVER_HTTP.splitlines()]
        assert [[str(one.status_code), one.text] for one in answers[:3]] == shown
    refused = "The call was refused and did not run: A clerk decides."
    results = [read(request)[1] for request in server.requests[3::5]]
    assert results == [refused, refused, "49.00 euros of INV-1002 refunded", refused]


def test_both_agents_of_the_api_share_a_budget(lives: Lives) -> None:
    """A billing agent that never stops leaves one request for the answer of the front desk."""

    def never_stops(request: ScriptedRequest) -> ScriptedReply:
        if "BillingAgent-BillingAgent" in request.tools:
            return REFUND[0]
        return REFUND[1] if request.tools else say("That is all we know.")

    with ScriptedOpenAIServer(never_stops) as server:
        with serving(lives, "after", server) as client:
            answer = client.post("/ask", json=QUESTION)
        assert (len(server.requests), answer.json()["answer"]) == (
            10,
            "That is all we know.",
        )


# The diffs.


def diff_of(app: str) -> str:
    """Compare the forms of an app, as the guide shows it: without its headers, and with no line around a change."""
    before, after = (
        (APPS / app / f"{form}.py").read_text("utf-8").splitlines()
        for form in ("before", "after")
    )
    return (
        "\n".join(list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:])
        + "\n"
    )


def test_the_guide_shows_the_difference_of_the_files() -> None:
    """Each diff of the guide is that of its app."""
    assert re.findall(r"^```diff\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE) == list(
        map(diff_of, SIZES)
    )


@each_of("app", SIZES)
def test_an_adoption_is_as_small_as_it_is_said_to_be(app: str) -> None:
    """Added and removed lines, blank ones, imports and docstrings included."""
    assert (
        sum(line.startswith(("+", "-")) for line in diff_of(app).splitlines())
        == SIZES[app]
    )
