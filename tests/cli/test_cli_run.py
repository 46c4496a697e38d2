"""``planner-ext run``: what goes to stdout, what to stderr, and the exit code, against a real endpoint."""

import re
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from planner_ext.testing import (
    Script,
    ScriptedFault,
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.command_line import COMMAND, Command, Outcome
from support.processes import Lives

PRICE = call("shop-price", {"article": "lamp"})
SHOP_AT = ("--kernel", "shop:make", "--no-plan")


def at(server: ScriptedOpenAIServer) -> tuple[str, ...]:
    """The options for a scripted endpoint."""
    return ("--base-url", server.url, "--model", "scripted")


def always_calls(request: ScriptedRequest) -> ScriptedReply:
    """A model that calls whenever it may."""
    return PRICE if request.tools else say("It is 42, I think.")


def escapes(outcome: Outcome) -> list[str]:
    """The control characters in what a command printed."""
    return re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", outcome.out + outcome.err)


# In a separate process: streams, signals and imports.


def test_an_answered_run_prints_the_answer_alone_on_stdout(process: Command) -> None:
    """Exit code 0; stdout has the answer and nothing else, stderr the progress, plain and 80 columns wide."""
    with ScriptedOpenAIServer([say("1. Ask."), PRICE, say("It is 42.")]) as server:
        outcome = process(
            "run", "What is a lamp?", "--kernel", "shop:make", *at(server)
        )
        assert (outcome.code, outcome.out) == (0, "It is 42.\n")
        assert len(server.requests) == 3
    assert 'shop-price(article="lamp")' in outcome.err
    assert re.search(r'✓ shop-price +\d\.\d\d s  {"price":42}', outcome.err)
    assert "answered: 3 round trips, 1 function call," in outcome.err
    assert "Traceback" not in outcome.err
    assert escapes(outcome) == []
    assert max(map(len, outcome.err.splitlines())) <= 80


def test_ctrl_c_cancels_and_keeps_what_happened(lives: Lives, here: Path) -> None:
    """Exit code 130 at once, although a function blocks; its call is answered in the history, nothing is sent again."""
    with ScriptedOpenAIServer([call("shop-wait"), say("never")]) as server:
        with lives.program(
            *COMMAND, "run", "Wait", *SHOP_AT, *at(server), "--json", cwd=here
        ) as running:
            assert any(
                "shop-wait()" in shown for shown in iter(running.stderr.readline, "")
            )
            running.send_signal(signal.SIGINT)
            err, out = running.stderr.read(), running.stdout.read()
            assert running.wait() == 130
        assert len(server.requests) == 1
    outcome = Outcome(code=130, out=out, err=err)
    assert outcome.document["status"] == "stopped"
    assert [message["role"] for message in outcome.document["chat_history"]] == [
        "user",
        "assistant",
        "tool",
    ]
    assert "Interrupted from the keyboard." in err
    assert "Traceback" not in err


def test_without_the_extra_the_command_says_how_to_install_it(here: Path) -> None:
    """Exit code 2 and one line where typer is missing."""
    program = "import sys; sys.modules['typer'] = None; from planner_ext.cli.__main__ import main; main()"
    line = [sys.executable, "-c", program]
    done = subprocess.run(
        line, cwd=here, capture_output=True, text=True, encoding="utf-8", timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == 'planner-ext needs typer. Install it with: pip install "planner-ext[cli]"\n'
    )


# In this process.


def test_json_is_one_document_even_if_the_kernel_prints(command: Command) -> None:
    """Exit code 1 at a limit; stdout is one JSON document with the usage and the history as it was sent."""
    with ScriptedOpenAIServer(always_calls) as server:
        outcome = command(
            "run", "Go on", *SHOP_AT, *at(server), "--max-iterations", "3", "--json"
        )
        document = outcome.document
        assert len(server.requests) == document["iterations"] == 3
        assert document["usage"]["total_tokens"] == server.total_tokens
        assert document["chat_history"][:-1] == server.requests[-1].messages
    assert outcome.code == 1
    assert (document["status"], document["limit"], document["tool_calls"]) == (
        "limit_reached",
        "max_iterations",
        2,
    )
    assert document["chat_history"][-1] == {
        "role": "assistant",
        "content": document["final_answer"],
    }
    assert document["reason"] == "The limit max_iterations=3 was reached."
    assert list(document) == [
        "status",
        "final_answer",
        "iterations",
        "tool_calls",
        "usage",
        "limit",
        "reason",
        "pending",
        "decisions",
        "plan",
        "chat_history",
    ]
    assert "looked up" in outcome.err


@pytest.mark.parametrize("way", ["--stream", "--no-stream"])
def test_streamed_and_plain_runs_show_and_answer_the_same(
    command: Command, way: str
) -> None:
    """Both print the same story, apart from durations."""
    script: Script = [calls(PRICE, text="I look it up."), say("It is 42.")]
    with ScriptedOpenAIServer(script) as server:
        outcome = command("run", "What is a lamp?", *SHOP_AT, *at(server), way)
        assert [request.stream for request in server.requests] == [
            way == "--stream"
        ] * 2
    assert (outcome.code, outcome.out) == (0, "It is 42.\n")
    shown = re.sub(r"\d+\.\d\d s", "0.00 s", outcome.err)
    for noise in ("imported\n", "made\n", "looked up\n"):
        shown = shown.replace(noise, "")
    assert shown.startswith(
        "Round trip 1 of 15\n"
        "    I look it up.\n"
        '    → shop-price(article="lamp")\n'
        '    ✓ shop-price   0.00 s  {"price":42}\n'
        "Round trip 2 of 15\n"
        "    It is 42.\n"
        "answered: 2 round trips, 1 function call, "
    )


@pytest.mark.parametrize("factory", ["shop:make", "shop:make_async", "shop:kernel"])
def test_a_kernel_comes_from_a_function_a_coroutine_or_is_there(
    command: Command, factory: str
) -> None:
    """Each form gives its functions to the model."""
    with ScriptedOpenAIServer([say("Fine.")]) as server:
        outcome = command("run", "Hello", "--kernel", factory, "--no-plan", *at(server))
        assert outcome.code == 0
        assert server.requests[0].tools == ("shop-price", "shop-wait")


def test_a_kernels_own_service_is_used_where_none_is_named(command: Command) -> None:
    """Without --model and --base-url no endpoint and no key is needed."""
    outcome = command(
        "run", "What is a lamp?", "--kernel", "shop:with_service", "--no-plan"
    )
    assert (outcome.code, outcome.out) == (0, "It is 42.\n")


def test_without_a_kernel_the_model_can_only_talk_and_the_run_says_so(
    command: Command,
) -> None:
    """No functions, no plan request, and a word about it."""
    with ScriptedOpenAIServer([say("Hello.")]) as server:
        outcome = command("run", "Hello", *at(server))
        assert server.requests[0].tools == ()
    assert (outcome.code, outcome.out) == (0, "Hello.\n")
    assert outcome.err.startswith(
        "The kernel has no functions: the model can only talk. See --kernel.\n"
    )


def test_a_plan_is_made_where_there_are_functions(command: Command) -> None:
    """The first request asks for the plan, which the document then has."""
    with ScriptedOpenAIServer([say("1. Look."), say("Done.")]) as server:
        outcome = command(
            "run", "Hello", "--kernel", "shop:make", *at(server), "--json"
        )
    assert outcome.document["plan"] == "1. Look."
    assert "Round trip 1 of 15: the plan\n    1. Look.\n" in outcome.err


def test_function_calls_are_limited(command: Command) -> None:
    """Of a batch over --max-tool-calls none runs, each says why, and the model still answers."""
    with ScriptedOpenAIServer([calls(PRICE, PRICE), say("No idea.")]) as server:
        outcome = command(
            "run",
            "What is a lamp?",
            *SHOP_AT,
            *at(server),
            "--max-tool-calls",
            "1",
            "--json",
        )
    assert (
        outcome.code,
        outcome.document["limit"],
        outcome.document["tool_calls"],
    ) == (1, "max_tool_calls", 0)
    assert (
        outcome.err.count(
            "✗ shop-price  not run  The limit max_tool_calls=1 was reached."
        )
        == 2
    )
    assert "functions were withdrawn: max_tool_calls" in outcome.err


def test_a_timeout_stops_the_run_and_keeps_what_happened(command: Command) -> None:
    """Exit code 1, status stopped, and the call that was running is answered."""
    with ScriptedOpenAIServer([call("shop-wait")]) as server:
        outcome = command(
            "run", "Wait", *SHOP_AT, *at(server), "--timeout", "0.5", "--json"
        )
    assert outcome.code == 1
    assert (outcome.document["status"], outcome.document["reason"]) == (
        "stopped",
        "The timeout of 0.5 s was reached.",
    )
    assert outcome.document["chat_history"][-1]["role"] == "tool"


def test_a_person_gets_the_answer_in_a_frame(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stdout is a terminal."""
    monkeypatch.setattr(
        "planner_ext.cli.streams._Output.isatty", lambda stream: stream is sys.stdout
    )
    monkeypatch.setenv("TERM", "dumb")  # no colours in between
    outcome = command(
        "run", "What is a lamp?", "--kernel", "shop:with_service", "--no-plan"
    )
    assert outcome.code == 0
    assert re.search(r"╭─ Answer ─+╮.*It is 42\..*╰─+╯", outcome.out, re.DOTALL)


def test_a_reply_cut_short_does_not_answer(command: Command) -> None:
    """Exit code 1, stdout empty, and the reason on stderr."""
    with ScriptedOpenAIServer(
        [ScriptedReply(text="Half of", finish_reason="length")]
    ) as server:
        outcome = command("run", "Hello", *at(server))
    assert (outcome.code, outcome.out) == (1, "")
    assert (
        "The reply was cut short: finish_reason is length.\nincomplete: 1 round trip"
        in outcome.err
    )


def test_a_models_escape_sequences_do_not_reach_the_terminal(command: Command) -> None:
    """Text and arguments are shown without control characters; the answer for a pipe is left as it is."""
    evil = "\x1b[2Jgone"
    with ScriptedOpenAIServer(
        [calls(call("shop-price", {"article": evil}), text=evil), say(evil)]
    ) as server:
        outcome = command("run", "Hello", *SHOP_AT, *at(server))
    assert (outcome.code, outcome.out) == (0, f"{evil}\n")
    assert "\x1b" not in outcome.err
    assert "    \N{REPLACEMENT CHARACTER}[2Jgone\n" in outcome.err


def test_an_endpoint_that_cannot_be_reached_is_a_fault(command: Command) -> None:
    """Exit code 3, stdout empty, one paragraph that names the endpoint, and what was spent."""
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        outcome = command(
            "run", "Hello", *SHOP_AT, "--base-url", url, "--model", "scripted", "--json"
        )
    assert (outcome.code, outcome.out) == (3, "")
    assert (
        "Error: The request to OpenAIChatCompletion 'scripted' failed: APIConnectionError"
        in outcome.err
    )
    assert f"The endpoint is {url}/\nfailed: 0 round trips" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_fault_after_some_work_says_what_was_spent(command: Command) -> None:
    """The round trips, the failed request included, and the calls are on stderr."""
    with ScriptedOpenAIServer([PRICE, ScriptedFault(status=400)]) as server:
        outcome = command("run", "Hello", *SHOP_AT, *at(server))
    assert (outcome.code, outcome.out) == (3, "")
    assert "failed: 2 round trips, 1 function call, " in outcome.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--model", "gpt"],
            "No API key for api.openai.com: set OPENAI_API_KEY. Only an endpoint on this machine",
        ),
        (
            ["--model", "m", "--base-url", "https://llm.example/v1"],
            "No API key for llm.example: set OPENAI_API_KEY.",
        ),
        (
            ["--base-url", "http://127.0.0.1:9/v1"],
            "No model is named: give --model, or set OPENAI_CHAT_MODEL_ID.",
        ),
        ([], "No model is named: give --model, or set OPENAI_CHAT_MODEL_ID."),
        (
            ["--model", "m", "--base-url", "localhost"],
            "--base-url must look like http://localhost:8000/v1; got 'loc",
        ),
        (
            ["--kernel", "shop"],
            "--kernel must be module:factory, for instance shop.kernel:make_kernel; got 'shop'.",
        ),
        (
            ["--kernel", "shoe:make"],
            "--kernel shoe:make: there is no module 'shoe', neither installed nor in /",
        ),
        (
            ["--kernel", "shop:mak"],
            "--kernel shop:mak: the module 'shop' has no 'mak'. Did you mean make",
        ),
        (
            ["--kernel", "shop:number"],
            "--kernel shop:number must be a semantic_kernel.Kernel, or a function",
        ),
        (
            ["--kernel", "shop:broken"],
            "--kernel shop:broken: the factory raised LookupError: no such shop (",
        ),
        (
            ["--kernel", "shop:broken_later"],
            "--kernel shop:broken_later: the factory raised SystemExit: closed (",
        ),
        (
            ["--kernel", "shop:make"],
            "The kernel of shop:make has no service: give --model (and --base-url), or add",
        ),
        (
            ["--kernel", "shop:with_service", "--max-iterations", "0"],
            "max_iterations must be a whole number, 1 or more",
        ),
        (
            ["--kernel", "shop:with_service", "--max-tool-calls", "-1"],
            "max_tool_calls must be a whole number, 0 or",
        ),
        (
            ["--kernel", "shop:with_service", "--timeout", "0"],
            "--timeout must be a number of seconds above 0; got 0.",
        ),
    ],
)
def test_what_cannot_be_used_is_reported_in_a_paragraph(
    command: Command, arguments: list[str], complaint: str
) -> None:
    """Exit code 2, stdout empty, and one paragraph that names the option and the way out."""
    outcome = command("run", "Hello", *arguments, "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"Error: {complaint}" in outcome.err
    assert len(outcome.err.split("Error: ")[1].splitlines()) == 1


def test_an_empty_goal_is_refused(command: Command) -> None:
    """Exit code 2 before anything is asked."""
    outcome = command("run", " ", "--kernel", "shop:with_service")
    assert outcome.code == 2
    assert (
        "Error: The goal must be a text that is not empty and valid Unicode; got ' '."
        in outcome.err
    )


def test_a_module_that_fails_says_where(command: Command, here: Path) -> None:
    """An exception on import, a missing dependency included, is reported with file and line."""
    (here / "lost.py").write_text("import os\nimport no_such_package_here\n")
    outcome = command("run", "Hello", "--kernel", "lost:make")
    assert outcome.code == 2
    assert (
        "the module raised ModuleNotFoundError: No module named 'no_such_package_here'"
        in outcome.err
    )
    assert f"({here / 'lost.py'}, line 2)" in outcome.err


def test_a_wrong_option_is_a_usage_error(command: Command) -> None:
    """Exit code 2, with the way to the help."""
    outcome = command("run", "Hello", "--no-such-option")
    assert outcome.code == 2
    assert "Try 'planner-ext run -h' for help." in outcome.err


def test_the_help_has_the_exit_codes(command: Command) -> None:
    """Every exit code has a separate line."""
    outcome = command("run", "--help")
    assert outcome.code == 0
    assert re.findall(r"^ +(\d+) ", outcome.out, re.MULTILINE) == [
        "0",
        "1",
        "2",
        "3",
        "4",
        "130",
    ]


def test_the_version_is_the_packages(command: Command) -> None:
    """``--version`` prints the name and the version that is installed."""
    outcome = command("--version")
    assert (outcome.code, outcome.out) == (0, f"planner-ext {version('planner-ext')}\n")
