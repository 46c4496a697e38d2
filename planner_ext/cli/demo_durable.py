"""The demo's last part: a run that survives its process. Real processes, a real file, a real SIGKILL."""

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from planner_ext.cli.demo_page import Ledger, paragraph, table, title
from planner_ext.cli.demo_refund import GOAL, LEDGER, refund_script
from planner_ext.cli.durable_store import opened_store
from planner_ext.cli.show import Signs
from planner_ext.core.facts import CallFinished
from planner_ext.durable import StoredRun
from planner_ext.durable.rows import fold_journal
from planner_ext.testing import ScriptedOpenAIServer

__all__ = ["survival"]

_RUN = "order-7"
_STORE = "runs.db"
_STORED = ("--store", _STORE)
_CRASH = {"PLANNER_EXT_CRASH_AT": "after_tool"}
_UNWANTED = ("FORCE_COLOR", "TTY_COMPATIBLE", "PLANNER_EXT_CRASH_ONCE")


async def survival(console: Console) -> bool:
    """Pause, edit, approve, kill and finish; return whether the refund was made once, and the ledger is exact."""
    title(console, "3", "A refund that waits for a person, and a process that is killed")
    if sys.platform == "win32":
        paragraph(console, "Shown on systems with SIGKILL only.")
        return True
    paragraph(console, f"Each line is a process of its own; {_STORE} is all that they share.", after=False)
    with TemporaryDirectory() as folder, ScriptedOpenAIServer(refund_script) as server:
        place = Path(folder)
        place.joinpath("shop.py").write_text("from planner_ext.cli.demo_refund import app, kernel\n", encoding="utf-8")
        survived = await _story(_Shell(console, place, server.url))
        if not survived:
            return False
        async with opened_store(str(place / _STORE)) as store:
            stored = await store.load(_RUN)
        return _told(console, stored, server, (place / LEDGER).read_text(encoding="utf-8").splitlines())


async def _story(shell: "_Shell") -> bool:
    """Run the commands; False where one of them ended otherwise than it should."""
    start = ("run", GOAL, "--kernel", "shop:kernel", "--no-plan", "--run-id", _RUN)
    if await shell.run(*start, code=4, note="paused; the process has ended") is None:
        return False
    waiting = await shell.run("approvals", "list", code=0, lines=2)
    if waiting is None:
        return False
    edit = ("approvals", "edit", waiting[0], "amount=24.5", "--by", "ann")
    if await shell.run(*edit, code=0, lines=1) is None:
        return False
    killed = "killed, after the money went out and before that was recorded"
    work = ("worker", "--app", "shop:app", "--once")
    if await shell.run(*work, code=-signal.SIGKILL, note=killed, more=_CRASH) is None:
        return False
    note = "the refund is asked for again under the same key, so it is not made again"
    return await shell.run(*work, code=0, note=note) is not None


def _told(console: Console, stored: StoredRun, server: ScriptedOpenAIServer, lines: list[str]) -> bool:
    """Set what the run was charged beside what others counted."""
    state = fold_journal(_RUN, stored.facts)
    paid = [fact for fact in stored.facts if isinstance(fact, CallFinished) and fact.function == "shop-refund"]
    amounts = ", ".join(f"{json.loads(line)['amount']:.2f}" for line in lines)
    answer = state.ended.answer if state.ended is not None else ""
    console.print()
    paragraph(console, f'answer: "{answer}"; refunds in the shop\'s own file: {amounts}', style="bold", after=False)
    ledger = Ledger(
        (
            ("round trips", state.ledger.iterations, "the server", len(server.requests)),
            ("tokens", state.ledger.usage.total_tokens, "the server", server.total_tokens),
            ("refunds", len(paid), "the shop", len(lines)),
        )
    )
    table(console, ledger.table(Signs(console)))
    return ledger.agrees and len(lines) == 1 and stored.record.status == "answered"


@dataclass(frozen=True, slots=True)
class _Shell:
    """Runs commands in a folder, and prints each with what came of it."""

    console: Console
    folder: Path
    endpoint: str

    async def run(
        self, *words: str, code: int, note: str = "", lines: int = 0, more: Mapping[str, str] | None = None
    ) -> list[str] | None:
        """Run a command.

        Args:
            *words: What stands after ``planner-ext``, and before the store.
            code: The exit code that is expected.
            note: What is said of it.
            lines: How many lines of its output are shown.
            more: Variables of the environment.

        Returns:
            Its output, or None where it ended otherwise; then that is shown.
        """
        given = [f"{name}={value}" for name, value in (more or {}).items()]
        self.console.print()
        written = shlex.join([*given, "planner-ext", *words, *_STORED])
        paragraph(self.console, f"$ {written}", style="bold", after=False)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "planner_ext.cli", *words, *_STORED),
            cwd=self.folder,
            env=self._environment(more or {}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        shown = out.decode("utf-8").splitlines()
        if process.returncode != code:
            told = f"ended with {process.returncode}, not {code}: {err.decode('utf-8')}"
            paragraph(self.console, told, style="red", indent=6)
            return None
        for text in [*shown[:lines], *([note] if note else [])]:
            paragraph(self.console, text, indent=6, after=False)
        return shown

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
        endpoint = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": self.endpoint, "OPENAI_CHAT_MODEL_ID": "scripted"}
        return {**kept, **endpoint, "PYTHONIOENCODING": "utf-8", **more}
