"""The options of the commands, each declared once. Imports nothing heavy."""

import getpass
import json
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, dataclass_transform

import typer

from planner_ext.approval.decisions import ApprovalSettings, Authorize
from planner_ext.core.errors import InvalidLimitError

if TYPE_CHECKING:
    from planner_ext.approval.policy import Grant
    from planner_ext.durable.listing import CallFilters, RunFilters

_T = TypeVar("_T")


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def _options(kind: type[_T]) -> type[_T]:
    """Make a dataclass without a ``repr``: the address of a store may hold a password."""
    return dataclass(frozen=True, kw_only=True, repr=False)(kind)


STORE_VARIABLE = "PLANNER_EXT_STORE"
"""In place of ``--store``: other users of the machine can read a command line."""

_KEY_VARIABLES = ("PLANNER_EXT_CHECKPOINT_KEY", "PLANNER_EXT_KEY")
"""The key that signs exported runs: the first of these that is not empty."""


def signing_key() -> bytes | None:
    """Return the key that signs exported runs; None without one."""
    return next(
        (os.fsencode(key) for key in map(os.environ.get, _KEY_VARIABLES) if key), None
    )


def value_of(written: str) -> object:
    """Read a value as JSON, or else as text."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):
        return ""


_STORE = "A store of runs: an SQLite file on this machine, or a postgresql:// address."
_BY = "Who decides, for the record."

Store = Annotated[
    str, typer.Option("--store", envvar=STORE_VARIABLE, metavar="FILE|URL", help=_STORE)
]
MaybeStore = Annotated[
    str | None, typer.Option(envvar=STORE_VARIABLE, metavar="FILE|URL")
]
By = Annotated[
    str,
    typer.Option(
        default_factory=_login_name, metavar="NAME", help=_BY, show_default="login name"
    ),
]
_APP = (
    "The application whose authorize hook says who may do this, as for planner-ext worker. A run that began under a "
    "hook needs it."
)
App = Annotated[str | None, typer.Option("--app", metavar="MODULE:FACTORY", help=_APP)]
CallId = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="The id in the list: run/iteration/call.", show_default=False
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout.")
]
File = Annotated[Path | None, typer.Option(metavar="FILE")]
Number = Annotated[int | None, typer.Option(metavar="N")]
Positive = Annotated[int, typer.Option(metavar="N", min=1)]
Count = Annotated[int, typer.Option(metavar="N", min=0)]
Name = Annotated[str | None, typer.Option(metavar="NAME")]
Words = Annotated[str | None, typer.Option(metavar="TEXT")]
Address = Annotated[str | None, typer.Option(metavar="URL")]
Factory = Annotated[str | None, typer.Option(metavar="MODULE:FACTORY")]
Goal = Annotated[str, typer.Argument(metavar="GOAL", show_default=False)]
Reason = Annotated[str, typer.Option(metavar="TEXT")]
InFile = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)
]
Conditions = Annotated[str, typer.Option(metavar="JSON")]
Moment = Annotated[datetime | None, typer.Option(metavar="TIME")]


def _read_age(text: str) -> timedelta:
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    match = re.fullmatch(r"(\d{1,8})([smhd])", text)
    if match is None:
        raise typer.BadParameter(
            f"expected a number and d, h, m or s, such as 30d; got {text!r}."
        )
    return timedelta(**{units[match[2]]: int(match[1])})


Age = Annotated[timedelta, typer.Option(parser=_read_age, metavar="AGE")]
Fingerprint = Annotated[str | None, typer.Option(metavar="DIGEST")]
Since = Annotated[timedelta | None, typer.Option(parser=_read_age, metavar="AGE")]
MoreIterations = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="A new limit of round trips, for a run that reached its own."
    ),
]


@_options
class ApprovalArgs:
    """Which calls wait for a decision.

    Attributes:
        policy: A YAML file with an approval policy: which calls run, are denied, or
            wait.
        ask_all: Every call waits for a decision.
    """

    policy: File = None
    ask_all: bool = False

    def planner_options(self) -> dict[str, Any]:
        """Return the planner's options for them; empty without one."""
        if self.policy is None:
            return (
                {"approval": ApprovalSettings(unmatched="defer")}
                if self.ask_all
                else {}
            )
        if self.ask_all:
            raise InvalidLimitError(
                "--ask-all and --policy contradict each other: a policy decides every call. Leave one of them out; a "
                "policy with only `default: ask` is --ask-all."
            )
        from planner_ext.approval.policy import ApprovalPolicy  # noqa: PLC0415  (slow, and only for a policy)

        try:
            return {"interceptors": (ApprovalPolicy.from_yaml(self.policy),)}
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise InvalidLimitError(
                f"--policy {self.policy} cannot be read: {reason}."
            ) from None


Hooks = Callable[[], Awaitable[tuple[Authorize, ...]]]
"""Returns an application's ``authorize`` hooks."""


async def no_hooks() -> tuple[Authorize, ...]:
    """Return no hook."""
    return ()


@_options
class AppArgs:
    """A store, and the application that may refuse an action on it.

    Its factory is called here, before an event loop runs, so that it may run its own.
    """

    store: Store
    app: App = None
    hooks: Hooks = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hooks", _hooks_of(self.app))


def _hooks_of(app: str | None) -> Hooks:
    if app is None:
        return no_hooks
    from planner_ext.cli.kernels import started_hook  # noqa: PLC0415  (imports Semantic Kernel)

    return started_hook(app)


@_options
class ActorArgs(AppArgs):
    """Who acts on a store, and the application that may refuse it."""

    by: By


@_options
class DecisionArgs(ActorArgs):
    """A call or question that waits in a store, and who decides it."""

    id: CallId


@_options
class GrantArgs:
    """The terms under which a decision answers the same question about later calls, too.

    Attributes:
        lifetime: Answer the same question about later calls of any run so, too, for
            this long, such as 1h: a grant.
        later_only: With --for: give the grant, and leave this call undecided.
        uses: How many later questions the grant answers. Default: any number.
        where: Conditions of the grant on a call's arguments, as in a policy: {"amount":
            {"le": 100}}.
        where_run: Conditions of the grant on the application's arguments of a run:
            {"tenant": {"equals": "acme"}}. Default: all runs of the store.
    """

    lifetime: Annotated[
        timedelta | None, typer.Option("--for", parser=_read_age, metavar="AGE")
    ] = None
    later_only: bool = False
    uses: Annotated[str, typer.Option(metavar="N")] = ""
    where: Conditions = ""
    where_run: Conditions = ""

    def grant(self) -> "Grant | None":
        """Return the grant; None without one."""
        from planner_ext.durable.grants import typed_grant  # noqa: PLC0415  (loads the store)

        seconds = ""
        if self.lifetime is not None:
            seconds = str(self.lifetime.total_seconds())
        return typed_grant(
            {
                "expires_in": seconds,
                "uses": self.uses,
                "arguments": self.where,
                "run_arguments": self.where_run,
            }
        )


@_options
class RunOptions(ApprovalArgs):
    """The kernel, model and endpoint of a run.

    Attributes:
        kernel: A Kernel, or a function without arguments, async or not, that returns
            one. The current directory is importable. Default: no functions, the model
            can only talk.
        base_url: An OpenAI-compatible endpoint, such as http://localhost:8000/v1.
            Default: OPENAI_BASE_URL, or OpenAI itself.
        model: The model. With neither --model nor --base-url the kernel's own service
            is used. The key is OPENAI_API_KEY; an endpoint on this machine needs none.
        stream: Show text while it arrives.
    """

    kernel: Factory = None
    base_url: Address = None
    model: Name = None
    as_json: Json = False
    stream: Annotated[bool, typer.Option("--stream/--no-stream")] = True


@_options
class GoalArgs:
    """A new run: its goal, its limits, and its store.

    Attributes:
        goal: What is to be reached.
        max_iterations: Most requests to the model, plan and answer included. The last
            offers no functions.
        max_tool_calls: Most function calls, failed ones included. Default: no limit.
        questions: How many questions the model may ask you. Default: none, and no
            function to ask with.
        plan: Ask for a plan first. Default: if the kernel has functions.
        timeout: Stop the run after this time, and keep its history. Waiting for a
            decision does not count. Default: no timeout.
        store: Keep the run in this store while it works: it survives its process, and
            what is left undecided waits there for planner-ext approvals. An SQLite file
            on this machine, or a postgresql:// address.
        run_id: With --store: the run's name. An unfinished run of this name is
            continued; an ended one gives its result. Default: a new name.
    """

    goal: Goal
    max_iterations: Annotated[int, typer.Option(metavar="N")] = 15
    max_tool_calls: Number = None
    questions: Number = None
    plan: Annotated[bool | None, typer.Option("--plan/--no-plan")] = None
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS")] = None
    store: MaybeStore = None
    run_id: Name = None


@_options
class LimitArgs:
    """Limits of a run that workers drive.

    Attributes:
        max_iterations: Most requests to the model, plan and answer included.
        max_tool_calls: Most function calls, failed ones included.
        max_total_tokens: Most tokens sent and received; checked before each request.
        max_cost: Most US dollars; checked before each request.
    """

    max_iterations: Number = None
    max_tool_calls: Number = None
    max_total_tokens: Number = None
    max_cost: Annotated[float | None, typer.Option(metavar="USD")] = None

    def given(self) -> dict[str, Any]:
        """Return those that are set."""
        return {
            name: value for name, value in asdict(self).items() if value is not None
        }


@_options
class SubmitArgs(ApprovalArgs, AppArgs):
    """A run for the workers of a store, and what its worker must have; any other worker refuses it.

    Attributes:
        goal: What is to be reached.
        run_id: The run's name. Submitting it again with the same goal and arguments
            changes nothing. Default: a new name.
        argument: An argument of the application, as JSON or text; may be repeated. One
            that the worker's application sets itself is not replaced.
        tag: A text by which to find the run; may be repeated.
        priority: Of due runs a worker takes those with the highest first. Default: 0.
        not_before: When a worker may begin it at the earliest, such as
            2026-12-01T06:00; without a zone, of this machine's.
        create: Create the store if it does not exist.
        reuse: The name may be that of a deleted run.
    """

    goal: Goal
    run_id: Name = None
    argument: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None
    tag: Annotated[list[str] | None, typer.Option(metavar="TEXT")] = None
    priority: Annotated[int, typer.Option(metavar="N")] = 0
    not_before: Moment = None
    create: bool = False
    reuse: bool = False


@_options
class ReplayArgs:
    """A cassette, and the functions to replay it with.

    Attributes:
        file: A file that planner_ext.testing.record wrote.
        kernel: A Kernel, or a function without arguments, async or not, that returns
            one; it needs no service. Default: functions made from their schemas in the
            cassette.
        functions: live calls functions; recorded returns their recorded results.
            Default: live with --kernel. Prompts and planners are always called.
    """

    file: InFile
    kernel: Factory = None
    functions: Annotated[str | None, typer.Option(metavar="live|recorded")] = None
    as_json: Json = False


@_options
class ForkArgs(ActorArgs):
    """The run's iteration to fork after, and the options of the fork.

    Attributes:
        at: The last iteration that is kept, from 0; -1 keeps the plan only.
        run_id: The fork's name. Default: a new name.
        instruction: A user message to add.
        html: Write a page with both timelines side by side.
    """

    at: Annotated[int, typer.Option(metavar="K", min=-1)]
    run_id: Name = None
    instruction: Annotated[str, typer.Option(metavar="TEXT")] = ""
    max_iterations: MoreIterations = None
    html: File = None


@_options
class ListArgs:
    """A part of a list.

    Attributes:
        limit: How many at most.
        offset: How many to skip.
    """

    store: Store
    limit: Positive = 50
    offset: Count = 0
    as_json: Json = False


@_options
class CallListArgs(ListArgs, AppArgs):
    """Which of the calls and questions that wait in a store to list.

    Attributes:
        text: Only those with this text in their goal, function or arguments.
        function: Only calls of this function, such as bank-pay.
        role: Only those that ask this role, or will.
        run_id: Only those of this run.
        tag: Only those of runs with this tag.
        expires_in: Only those that expire within this time: 12h, 90m or 45s.
        person: Only what this person may decide of the 500 oldest, as the hook of --app
            says.
    """

    text: Words = None
    function: Name = None
    role: Name = None
    run_id: Annotated[str | None, typer.Option("--run", metavar="RUN")] = None
    tag: Words = None
    expires_in: Since = None
    person: Name = None

    def filters(self) -> "CallFilters":
        """Return the filters of calls that are given."""
        given: CallFilters = {
            "text": self.text,
            "function": self.function,
            "role": self.role,
            "tag": self.tag,
        }
        if self.expires_in is not None:
            given["expires_before"] = time.time() + self.expires_in.total_seconds()
        return given


@_options
class BudgetArgs:
    """Which shared budgets to list, or to reset.

    Attributes:
        budget: Only the budget of this name.
        key: Only this user, tenant or other key.
        period: Only this hour, day or month, such as 2026-11-22.
        limit: The most rows.
        reset: Forget what was used by one key: needs --budget, and --key if the budget
            has keys. Without --period the newest period begins again.
    """

    store: Store
    budget: Name = None
    key: Annotated[str | None, typer.Option(metavar="KEY")] = None
    period: Annotated[str | None, typer.Option(metavar="PERIOD")] = None
    limit: Positive = 50
    reset: bool = False
    as_json: Json = False


@_options
class FilterArgs:
    """Which runs of a store.

    Attributes:
        status: Only runs that are queued, running, paused, failed, quarantined,
            answered, incomplete, limit_reached or stopped. May be repeated. Default:
            all; of a command that changes runs, those that it can change.
        goal: Only runs with this text in their goal.
        worker: Only runs that this worker drives.
        function: Only runs whose model asked for this function, such as bank-pay.
        error: Only runs with this text in their last fault.
        tag: Only runs that were submitted with this tag.
        older_than: Only runs that have not changed for so long: 30d, 12h, 90m or 45s.
        newer_than: Only runs that changed within this time.
        created_after: Only runs created at this local time or later: 2026-01-31 or
            2026-01-31T12:00:00.
        created_before: Only runs created before this local time.
    """

    status: Annotated[list[str] | None, typer.Option(metavar="STATUS")] = None
    goal: Words = None
    worker: Name = None
    function: Name = None
    error: Words = None
    tag: Words = None
    older_than: Since = None
    newer_than: Since = None
    created_after: Moment = None
    created_before: Moment = None

    def filters(self) -> "RunFilters":
        """Return the filters that are given, besides the status."""
        now = time.time()
        times = {
            "created_after": self.created_after and self.created_after.timestamp(),
            "created_before": self.created_before and self.created_before.timestamp(),
            "updated_after": _before(now, self.newer_than),
            "updated_before": _before(now, self.older_than),
        }
        texts = {name: getattr(self, name) for name in _TEXT_FILTERS}
        given = {
            name: value
            for name, value in {**texts, **times}.items()
            if value is not None
        }
        return cast("RunFilters", given)


_TEXT_FILTERS = ("goal", "worker", "function", "error", "tag")


def _before(now: float, age: timedelta | None) -> float | None:
    return None if age is None else now - age.total_seconds()


@_options
class RunListArgs(FilterArgs, ListArgs):
    """Which runs to list."""


@_options
class ChosenArgs(FilterArgs, ActorArgs):
    """The runs to act on: one by its name, or all that filters let pass.

    Attributes:
        run: The run's name; or give filters, such as --status.
        dry_run: With filters: only say how many runs there are.
        yes: With filters: do not ask first.
    """

    run: Annotated[str | None, typer.Argument(metavar="RUN", show_default=False)] = None
    dry_run: bool = False
    yes: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        has_filters = bool(self.status or self.filters())
        if (self.run is None) is not has_filters:
            raise typer.BadParameter(
                "give the name of one run, or filters such as --status failed for all that they let pass.",
                param_hint="RUN",
            )


@_options
class CompareArgs:
    """The options and scripts to compare, and where the results go.

    Attributes:
        max_iterations: Round trips that each run is allowed: requests to the model.
        only: Only this option or script, such as option-2, option-2-corrected,
            never-ending or chain; may be given several times. A key that does not exist
            is answered with the list.
        option: A loop of your own beside the others: an async function of a
            planner_ext.compare.Trial. May be given several times.
        script: A situation of your own beside the others, made with
            planner_ext.compare.scenario. May be given several times.
        peer: Another framework beside the others: agent-framework, bare-loop,
            langchain, openai-agents, pydantic-ai, all of them, or your own adapter
            file. Each has a separate environment, made at first use.
        cost: Measure the processor time of a round trip, too, at 1, 10, 50 and 200
            round trips.
        details: Print a table for each script, too, with all figures.
        html: Write a page with charts, tables and every message.
        markdown: Write the tables into this document, between the lines <!-- table:
            planner-ext compare --> and <!-- /table -->.
        base_url: Ask a real model at this OpenAI-compatible endpoint. The key is
            OPENAI_API_KEY.
        model: Ask this real model.
        kernel: Your own kernel, and --goal in place of the scripts. Its functions are
            run for real, by each option separately. Without --model and --base-url its
            own service is used.
        goal: The goal for your own kernel.
    """

    max_iterations: Positive = 5
    only: Annotated[list[str] | None, typer.Option(metavar="KEY")] = None
    option: Annotated[list[str] | None, typer.Option(metavar="MODULE:FUNCTION")] = None
    script: Annotated[list[str] | None, typer.Option(metavar="MODULE:NAME")] = None
    peer: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    cost: bool = False
    details: bool = False
    as_json: Json = False
    html: File = None
    markdown: File = None
    base_url: Address = None
    model: Name = None
    kernel: Factory = None
    goal: Words = None


@_options
class WorkerArgs(ApprovalArgs):
    """The application and the limits of a worker.

    Attributes:
        app: What drives the runs: a function without arguments, async or not, that
            returns (planner, kernel), or (planner, kernel, arguments_for):
            arguments_for(run_id) returns a run's arguments. Or an object that names
            these, and authorize: the hook that says who may decide. A kernel alone gets
            a planner with default options. The current directory is importable.
        once: Drive the runs that are due now, and end.
        worker_id: This worker's name, unique among living workers. Default: a new name.
        max_concurrency: How many runs to drive at once.
        retries: How often a run is retried after a fault, with growing delays, before
            it is failed.
        notify: Post a notice here, as JSON, when a run of the store pauses, ends or
            fails: an https:// URL. The key that signs it is read from
            PLANNER_EXT_NOTIFY_KEY.
        heads: Append the head of a journal to this file outside the store at each pause
            for a person and each end, for runs verify. The key that signs it, an
            Ed25519 private key in PEM, is read from PLANNER_EXT_HEADS_KEY.
        max_deaths: How often a run may end its worker's process in a call, without a
            new result, before it is quarantined; in a request, the square of it.
        lease: How long this worker may be frozen or cut off before others take its
            runs.
        grace: After SIGTERM or Ctrl-C, how long calls and requests in flight may take
            to end. No others start. Keep it below the time after which your supervisor
            kills: 30 s in Kubernetes.
        health: Answer HTTP probes at this port of all addresses, or at HOST:PORT: 200
            while the event loop works, 503 if it is blocked for 5 s.
    """

    store: Store
    app: Annotated[str, typer.Option(metavar="MODULE:FACTORY")]
    once: bool = False
    worker_id: Name = None
    max_concurrency: Positive = 100
    retries: Count = 4
    notify: Annotated[
        str | None, typer.Option(envvar="PLANNER_EXT_NOTIFY", metavar="URL")
    ] = None
    heads: File = None
    max_deaths: Positive = 3
    lease: Annotated[float, typer.Option(metavar="SECONDS", min=0.1)] = 30.0
    grace: Annotated[float, typer.Option(metavar="SECONDS", min=0)] = 25.0
    health: Annotated[str | None, typer.Option(metavar="PORT")] = None


@_options
class ServeArgs(AppArgs):
    """The store and the address of an inbox.

    Attributes:
        host: The address to listen on. Any other than this machine's own needs
            --allow-host, and a proxy with TLS.
        port: The port; 0 takes a free one.
        user: The recorded name of everyone who signs in. Default: each enters a name.
        allow_host: A name by which browsers reach the inbox, besides those of this
            machine. May be repeated.
        public_url: The address at which browsers reach the inbox, such as
            https://inbox.example.com; its name is allowed, too. The notices of the
            store then name each call's page. A proxy removes the address's path.
        token: Who has it may sign in: at least 20 characters. Better in
            PLANNER_EXT_INBOX_TOKEN, which other users of this machine cannot read.
            Default: a random one.
    """

    host: Annotated[str, typer.Option(metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535)] = 8321
    user: Name = None
    allow_host: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    public_url: Address = None
    token: Annotated[
        str | None, typer.Option(metavar="TEXT", envvar="PLANNER_EXT_INBOX_TOKEN")
    ] = None
