"""Shared parts of the commands: the decorator of commands, the options, the exit codes. Imports nothing heavy."""

import asyncio
import getpass
import os
import re
import sys
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from enum import IntEnum
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.models import ParameterInfo

from planner_ext.cli.text import Terminal
from planner_ext.core.errors import PlannerExtError


class ExitCode(IntEnum):
    """How a command ended; the help of each command says what it means there."""

    ANSWERED = 0
    NO_ANSWER = 1
    UNUSABLE = 2
    FAULT = 3
    PAUSED = 4
    INTERRUPTED = 130


STORE_VARIABLE = "PLANNER_EXT_STORE"
"""The environment variable in place of ``--store``: other users of the machine can read a command line."""

_KEY_VARIABLES = ("PLANNER_EXT_CHECKPOINT_KEY", "PLANNER_EXT_KEY")
"""The environment variables with the key that signs exported runs: the first one that is set and not empty."""

Exit = int | Coroutine[None, None, int]
"""What a command's function returns: its exit code, or a coroutine that returns it."""


def command(
    group: typer.Typer, *, exit_codes: str = "", name: str | None = None
) -> Callable[[Callable[..., Exit]], Callable[..., Exit]]:
    """Register a function as a command, with its docstring as help.

    A parameter whose type is a dataclass becomes one option, or argument, for each of its fields. A parameter's help
    may be in the docstring's ``Options:``, a field's in the dataclass's ``Attributes:``. The docstring may end with
    ``Exit codes:``. An error of this package is printed as a paragraph on stderr, with exit code 2.

    Args:
        group: The group of the command.
        exit_codes: Exit codes that several commands share.
        name: The command's name; None takes the function's.
    """

    def register(function: Callable[..., Exit]) -> Callable[..., Exit]:
        doc, _, codes = (getdoc(function) or "").partition("\n\nExit codes:\n")
        doc, _, own = doc.partition("\n\nOptions:\n")
        bundles: dict[str, type[Any]] = {}
        options: list[Parameter] = []
        for parameter in signature(function).parameters.values():
            if isinstance(kind := parameter.annotation, type) and is_dataclass(kind):
                bundles[parameter.name] = kind
                attributes = (getdoc(each) or "" for each in reversed(kind.__mro__))
                texts = "\n".join(text.partition("Attributes:\n")[2] for text in attributes)
                options += _with_help(signature(kind).parameters.values(), texts)
            else:
                options += _with_help([parameter.replace(kind=Parameter.KEYWORD_ONLY)], own)

        @wraps(function)
        def run(**given: Any) -> None:
            for each, bundle in bundles.items():
                given[each] = bundle(**{item.name: given.pop(item.name) for item in fields(bundle)})
            raise typer.Exit(_exit_code(lambda: function(**given)))

        run.__signature__ = Signature(options)  # pyright: ignore[reportAttributeAccessIssue]  (PEP 362)
        run.__annotations__ = {option.name: option.annotation for option in options}
        text = re.sub(r"^Examples:", "\b\nExamples:", doc, flags=re.MULTILINE)  # \b: do not join its lines
        group.command(name, help=text, epilog=f"\b\nExit codes:\n{codes or exit_codes}")(run)
        return function

    return register


_TEXT = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""A name and its text in a section of a docstring."""


def _with_help(options: Iterable[Parameter], section: str) -> Iterable[Parameter]:
    """Read the options' help from a section of a docstring, unless their annotation has it."""
    texts: dict[str, str] = dict(_TEXT.findall(section))
    for option in options:
        for info in get_args(option.annotation):
            if isinstance(info, ParameterInfo) and info.help is None and option.name in texts:
                info.help = " ".join(texts[option.name].split())
        yield option


def _exit_code(call: Callable[[], Exit]) -> int:
    try:
        code = call()
        return code if isinstance(code, int) else asyncio.run(code)
    except PlannerExtError as error:
        Terminal(sys.stderr).complain(str(error))
        return ExitCode.UNUSABLE
    except KeyboardInterrupt:
        Terminal(sys.stderr).print("Interrupted.", style="red")
        return ExitCode.INTERRUPTED


def signing_key() -> bytes | None:
    """Return the key that signs exported runs; None without one."""
    return next((os.fsencode(key) for key in map(os.environ.get, _KEY_VARIABLES) if key), None)


def _login_name() -> str | None:
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):
        return None


_STORE = "A store of runs: an SQLite file on this machine, or a postgresql:// address."
_BY = "Who decides, for the record."

Store = Annotated[str, typer.Option("--store", envvar=STORE_VARIABLE, metavar="FILE|URL", help=_STORE)]
By = Annotated[
    str | None, typer.Option(default_factory=_login_name, metavar="NAME", help=_BY, show_default="login name")
]
_APP = (
    "The application whose authorize hook says who may do this, as for planner-ext worker. A run that began under a "
    "hook needs it."
)
App = Annotated[str | None, typer.Option("--app", metavar="MODULE:FACTORY", help=_APP)]
CallId = Annotated[
    str, typer.Argument(metavar="ID", help="The id in the list: run/iteration/call.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def _read_age(text: str) -> timedelta:
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    match = re.fullmatch(r"(\d{1,8})([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"expected a number and d, h, m or s, such as 30d; got {text!r}.")
    return timedelta(**{units[match[2]]: int(match[1])})


Age = Annotated[timedelta, typer.Option(parser=_read_age, metavar="AGE")]
MoreIterations = Annotated[
    int | None, typer.Option(metavar="N", help="A new limit of round trips, for a run that reached its own.")
]


@dataclass(frozen=True, kw_only=True)
class ApprovalArgs:
    """Which calls wait for a decision.

    Attributes:
        policy: A YAML file with an approval policy: which calls run, are denied, or wait.
        ask_all: Every call waits for a decision.
    """

    policy: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    ask_all: Annotated[bool, typer.Option("--ask-all")] = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(ApprovalArgs):
    """The kernel, model and endpoint of a run.

    Attributes:
        kernel: A Kernel, or a function without arguments, async or not, that returns one. The current directory is
            importable. Default: no functions, the model can only talk.
        base_url: An OpenAI-compatible endpoint, such as http://localhost:8000/v1. Default: OPENAI_BASE_URL, or OpenAI
            itself.
        model: The model. With neither --model nor --base-url the kernel's own service is used. The key is
            OPENAI_API_KEY; an endpoint on this machine needs none.
        stream: Show text while it arrives.
    """

    kernel: Annotated[str | None, typer.Option(metavar="MODULE:FACTORY")] = None
    base_url: Annotated[str | None, typer.Option(metavar="URL")] = None
    model: Annotated[str | None, typer.Option(metavar="NAME")] = None
    as_json: Json = False
    stream: Annotated[bool, typer.Option("--stream/--no-stream")] = True


@dataclass(frozen=True, kw_only=True, repr=False)  # a store's address may hold a password
class GoalArgs:
    """A new run: its goal, its limits, and its store.

    Attributes:
        goal: What is to be reached.
        max_iterations: Most requests to the model, plan and answer included. The last offers no functions.
        max_tool_calls: Most function calls, failed ones included. Default: no limit.
        questions: How many questions the model may ask you. Default: none, and no function to ask with.
        plan: Ask for a plan first. Default: if the kernel has functions.
        timeout: Stop the run after this time, and keep its history. Waiting for a decision does not count. Default: no
            timeout.
        store: Keep the run in this store while it works: it survives its process, and what is left undecided waits
            there for planner-ext approvals. An SQLite file on this machine, or a postgresql:// address.
        run_id: With --store: the run's name. An unfinished run of this name is continued; an ended one gives its
            result. Default: a new name.
    """

    goal: Annotated[str, typer.Argument(metavar="GOAL", show_default=False)]
    max_iterations: Annotated[int, typer.Option(metavar="N")] = 15
    max_tool_calls: Annotated[int | None, typer.Option(metavar="N")] = None
    questions: Annotated[int | None, typer.Option(metavar="N")] = None
    plan: Annotated[bool | None, typer.Option("--plan/--no-plan")] = None
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS")] = None
    store: Annotated[str | None, typer.Option(envvar=STORE_VARIABLE, metavar="FILE|URL")] = None
    run_id: Annotated[str | None, typer.Option(metavar="NAME")] = None


@dataclass(frozen=True, kw_only=True)
class LimitArgs:
    """Limits of a run that workers drive.

    Attributes:
        max_iterations: Most requests to the model, plan and answer included.
        max_tool_calls: Most function calls, failed ones included.
        max_total_tokens: Most tokens sent and received; checked before each request.
        max_cost: Most US dollars; checked before each request.
    """

    max_iterations: Annotated[int | None, typer.Option(metavar="N")] = None
    max_tool_calls: Annotated[int | None, typer.Option(metavar="N")] = None
    max_total_tokens: Annotated[int | None, typer.Option(metavar="N")] = None
    max_cost: Annotated[float | None, typer.Option(metavar="USD")] = None


@dataclass(frozen=True, kw_only=True, repr=False)  # a store's address may hold a password
class SubmitArgs(ApprovalArgs):
    """A run for the workers of a store, and what its worker must have; any other worker refuses it.

    Attributes:
        goal: What is to be reached.
        run_id: The run's name. Submitting it again with the same goal and arguments changes nothing. Default: a new
            name.
        argument: An argument of the application, as JSON or text; may be repeated. One that the worker's application
            sets itself is not replaced.
    """

    goal: Annotated[str, typer.Argument(metavar="GOAL", show_default=False)]
    store: Store
    run_id: Annotated[str | None, typer.Option(metavar="NAME")] = None
    argument: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None
    app: App = None


@dataclass(frozen=True, kw_only=True)
class ReplayArgs:
    """A cassette, and the functions to replay it with.

    Attributes:
        file: A file that planner_ext.testing.record wrote.
        kernel: A Kernel, or a function without arguments, async or not, that returns one; it needs no service. Default:
            functions made from their schemas in the cassette.
        functions: live calls functions; recorded returns their recorded results. Default: live with --kernel. Prompts
            and planners are always called.
    """

    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]
    kernel: Annotated[str | None, typer.Option(metavar="MODULE:FACTORY")] = None
    functions: Annotated[str | None, typer.Option(metavar="live|recorded")] = None
    as_json: Json = False


@dataclass(frozen=True, kw_only=True, repr=False)  # a store's address may hold a password
class ForkArgs:
    """The run's iteration to fork after, and the options of the fork.

    Attributes:
        at: The last iteration that is kept, from 0; -1 keeps the plan only.
        run_id: The fork's name. Default: a new name.
        instruction: A user message to add.
        html: Write a page with both timelines side by side.
    """

    store: Store
    at: Annotated[int, typer.Option(metavar="K", min=-1)]
    run_id: Annotated[str | None, typer.Option(metavar="NAME")] = None
    instruction: Annotated[str, typer.Option(metavar="TEXT")] = ""
    max_iterations: MoreIterations = None
    by: By
    app: App = None
    html: Annotated[Path | None, typer.Option(metavar="FILE")] = None


@dataclass(frozen=True, kw_only=True, repr=False)  # a store's address may hold a password
class ListArgs:
    """A part of a list.

    Attributes:
        limit: How many at most.
        offset: How many to skip.
    """

    store: Store
    limit: Annotated[int, typer.Option(metavar="N", min=1)] = 50
    offset: Annotated[int, typer.Option(metavar="N", min=0)] = 0
    as_json: Json = False


@dataclass(frozen=True, kw_only=True, repr=False)  # a store's address may hold a password
class BudgetArgs:
    """Which shared budgets to list, or to reset.

    Attributes:
        budget: Only the budget of this name.
        key: Only this user, tenant or other key.
        period: Only this hour, day or month, such as 2026-11-22.
        limit: The most rows.
        reset: Forget what was used by one key: needs --budget, and --key if the budget has keys. Without --period the
            newest period begins again.
    """

    store: Store
    budget: Annotated[str | None, typer.Option(metavar="NAME")] = None
    key: Annotated[str | None, typer.Option(metavar="KEY")] = None
    period: Annotated[str | None, typer.Option(metavar="PERIOD")] = None
    limit: Annotated[int, typer.Option(metavar="N", min=1)] = 50
    reset: Annotated[bool, typer.Option("--reset")] = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True, repr=False)  # a store's address may hold a password
class RunListArgs(ListArgs):
    """Which runs to list.

    Attributes:
        status: Only runs that are queued, running, paused, failed, quarantined, answered, incomplete, limit_reached or
            stopped. May be repeated. Default: all.
        goal: Only runs with this text in their goal.
        worker: Only runs that this worker drives.
        older_than: Only runs that have not changed for so long: 30d, 12h, 90m or 45s.
        newer_than: Only runs that changed within this time.
        created_after: Only runs created at this local time or later: 2026-01-31 or 2026-01-31T12:00:00.
        created_before: Only runs created before this local time.
    """

    status: Annotated[list[str] | None, typer.Option(metavar="STATUS")] = None
    goal: Annotated[str | None, typer.Option(metavar="TEXT")] = None
    worker: Annotated[str | None, typer.Option(metavar="NAME")] = None
    older_than: Annotated[timedelta | None, typer.Option(parser=_read_age, metavar="AGE")] = None
    newer_than: Annotated[timedelta | None, typer.Option(parser=_read_age, metavar="AGE")] = None
    created_after: Annotated[datetime | None, typer.Option(metavar="TIME")] = None
    created_before: Annotated[datetime | None, typer.Option(metavar="TIME")] = None


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """The options and scripts to compare, and where the results go.

    Attributes:
        max_iterations: Round trips that each run is allowed: requests to the model.
        only: Only this option or script, such as option-2, option-2-corrected, never-ending or chain; may be given
            several times. A key that does not exist is answered with the list.
        option: A loop of your own beside the others: an async function of a planner_ext.compare.Trial. May be given
            several times.
        script: A situation of your own beside the others, made with planner_ext.compare.scenario. May be given several
            times.
        peer: Another framework beside the others: agent-framework, bare-loop, langchain, openai-agents, pydantic-ai,
            all of them, or your own adapter file. Each has a separate environment, made at first use.
        cost: Measure the processor time of a round trip, too, at 1, 10, 50 and 200 round trips.
        details: Print a table for each script, too, with all figures.
        as_json: Print everything as one JSON document on stdout.
        html: Write a page with charts, tables and every message.
        markdown: Write the tables into this document, between the lines <!-- table: planner-ext compare --> and
            <!-- /table -->.
        base_url: Ask a real model at this OpenAI-compatible endpoint. The key is OPENAI_API_KEY.
        model: Ask this real model.
        kernel: Your own kernel, and --goal in place of the scripts. Its functions are run for real, by each option
            separately. Without --model and --base-url its own service is used.
        goal: The goal for your own kernel.
    """

    max_iterations: Annotated[int, typer.Option(metavar="N", min=1)] = 5
    only: Annotated[list[str] | None, typer.Option(metavar="KEY")] = None
    option: Annotated[list[str] | None, typer.Option(metavar="MODULE:FUNCTION")] = None
    script: Annotated[list[str] | None, typer.Option(metavar="MODULE:NAME")] = None
    peer: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    cost: Annotated[bool, typer.Option("--cost")] = False
    details: Annotated[bool, typer.Option("--details")] = False
    as_json: Annotated[bool, typer.Option("--json")] = False
    html: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    markdown: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    base_url: Annotated[str | None, typer.Option(metavar="URL")] = None
    model: Annotated[str | None, typer.Option(metavar="NAME")] = None
    kernel: Annotated[str | None, typer.Option(metavar="MODULE:FACTORY")] = None
    goal: Annotated[str | None, typer.Option(metavar="TEXT")] = None


@dataclass(frozen=True, kw_only=True)
class ActorArgs:
    """Who does something to a run, and the application that may refuse it."""

    by: By
    app: App = None


@dataclass(frozen=True, kw_only=True, repr=False)  # a store's address may hold a password
class DecisionArgs(ActorArgs):
    """A call or question that waits in a store, and who decides it."""

    id: CallId
    store: Store


@dataclass(frozen=True, kw_only=True, repr=False)  # a store's address may hold a password
class WorkerArgs(ApprovalArgs):
    """The application and the limits of a worker.

    Attributes:
        app: What drives the runs: a function without arguments, async or not, that returns (planner, kernel), or
            (planner, kernel, arguments_for): arguments_for(run_id) returns a run's arguments. Or an object that names
            these, and authorize: the hook that says who may decide. A kernel alone gets a planner with default options.
            The current directory is importable.
        once: Drive the runs that are due now, and end.
        worker_id: This worker's name, unique among living workers. Default: a new name.
        max_concurrency: How many runs to drive at once.
        retries: How often a run is retried after a fault, with growing delays, before it is failed.
        notify: Post a notice here, as JSON, when a run of the store pauses, ends or fails: an https:// URL. The key
            that signs it is read from PLANNER_EXT_NOTIFY_KEY.
        max_deaths: How often a run may end its worker's process, without progress between, before it is quarantined.
        lease: How long this worker may be frozen or cut off before others take its runs.
        grace: After SIGTERM or Ctrl-C, how long calls and requests in flight may take to end. No others start.
    """

    store: Store
    app: Annotated[str, typer.Option(metavar="MODULE:FACTORY")]
    once: Annotated[bool, typer.Option("--once")] = False
    worker_id: Annotated[str | None, typer.Option(metavar="NAME")] = None
    max_concurrency: Annotated[int, typer.Option(metavar="N", min=1)] = 100
    retries: Annotated[int, typer.Option(metavar="N", min=0)] = 4
    notify: Annotated[str | None, typer.Option(envvar="PLANNER_EXT_NOTIFY", metavar="URL")] = None
    max_deaths: Annotated[int, typer.Option(metavar="N", min=1)] = 3
    lease: Annotated[float, typer.Option(metavar="SECONDS", min=0.1)] = 30.0
    grace: Annotated[float, typer.Option(metavar="SECONDS", min=0)] = 30.0


@dataclass(frozen=True, kw_only=True, repr=False)  # a store's address may hold a password
class ServeArgs:
    """The store and the address of an inbox.

    Attributes:
        host: The address to listen on. Any other than this machine's own needs --allow-host, and a proxy with TLS.
        port: The port; 0 takes a free one.
        user: The recorded name of everyone who signs in. Default: each enters a name.
        allow_host: A name by which browsers reach the inbox, besides those of this machine. May be repeated.
    """

    store: Store
    host: Annotated[str, typer.Option(metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535)] = 8321
    user: Annotated[str | None, typer.Option(metavar="NAME")] = None
    allow_host: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    app: App = None
