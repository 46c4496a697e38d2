"""What the README says."""

import re
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel

from planner_ext.durable import Approvals
from planner_ext.testing import ScriptedChatCompletion, call, say

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    """All Python of the README, as one program."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile("\n".join(BLOCKS), "README.md", "exec"), names)
    return names


def kernel_of(program: dict[str, Any], *script: Any) -> Kernel:
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(script, service_id="chat"))
    kernel.add_plugin(program["Weather"](), "weather")
    kernel.add_plugin(program["Payments"](), "payments")
    return kernel


async def test_watching_prints_every_event(program: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The README's stream shows facts, and the result at the end."""
    await program["watch"](kernel_of(program, say("1. ask"), call("weather-temperature", {"city": "Oslo"}), say("4.5")))
    printed = capsys.readouterr().out
    assert "CallFinished" in printed
    assert "ResultReady" in printed.splitlines()[-1]


async def test_a_refund_waits_and_is_resumed_from_text(
    program: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The README's approval pauses before the refund, and goes on from signed JSON."""
    refund = call("payments-refund", {"order": "7", "amount": 50.0})
    await program["pause_and_resume"](kernel_of(program, say("1. refund"), refund, say("done")))
    assert "payments-refund" in capsys.readouterr().out


async def test_a_question_is_answered_at_once_or_later(
    program: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's clarifier is asked in the terminal; its other run waits, and is answered with Supply."""
    monkeypatch.setattr("builtins.input", lambda _: "In Oslo.")
    look, ask = call("weather-temperature", {"city": "Oslo"}), call("UserInteraction-AskUser", {"question": "Where?"})
    assert await program["answered"](kernel_of(program, say("1. ask"), say("Where?"), look, say("4.5"))) == "4.5"
    assert await program["answered_later"](kernel_of(program, say("1. ask"), ask, look, say("4.5"))) == "4.5"


async def test_a_payment_is_kept_in_a_store(
    program: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The README's kept run pauses before the payment, and is listed under the id that the README decides."""
    monkeypatch.chdir(tmp_path)
    kernel = kernel_of(program, say("1. pay"), call("bank-pay", {"amount": 50.0}))
    kernel.add_plugin(program["Bank"](), "bank")
    await program["keep"](kernel)
    assert capsys.readouterr().out == "paused\n"
    async with Approvals.connect("runs.db") as approvals:
        assert [item.id for item in await approvals.pending()] == ["bill-7/0/call_1"]


def test_the_wrapper_takes_the_place_of_a_service(program: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's wrapper is what the kernel then selects."""
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    kernel = Kernel()
    program["bounded"](kernel)
    assert type(kernel.get_service("chat")).__name__ == "FunctionInvokingChatCompletion"


def test_the_guard_is_a_filter(program: dict[str, Any]) -> None:
    """The README's guard registers with a stock kernel."""
    kernel = Kernel()
    program["guard"](kernel, program["ApprovalPolicy"].from_dict({"default": "ask"}))
    assert len(kernel.auto_function_invocation_filters) == 1


async def test_the_scripted_service_answers(program: dict[str, Any]) -> None:
    """The README's scripted model drives a run."""
    kernel = kernel_of(program)
    kernel.add_service(program["scripted"](), overwrite=True)
    options = program["FunctionCallingStepwisePlannerOptions"](plan=False)
    result = await program["FunctionCallingStepwisePlanner"]("scripted", options).invoke(kernel, "Oslo?")
    assert result.final_answer == "4.5 degrees."


def test_links_lead_somewhere() -> None:
    """Every relative link of the README names a file of the repository."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_decision_has_its_own_number() -> None:
    """ADR numbers are unique, and the README links every ADR."""
    names = sorted(path.name for path in (ROOT / "adr").glob("*.md"))
    assert len({name[:4] for name in names}) == len(names)
    assert [name for name in names if f"adr/{name}" not in README] == []
