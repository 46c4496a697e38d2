"""The options that commands share, with their help; nothing heavy is imported for it."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "EXIT_CODES",
    "STORE_VARIABLE",
    "Answers",
    "Approvals",
    "AskAll",
    "BaseUrl",
    "By",
    "Cancel",
    "CheckpointPath",
    "Denials",
    "Edits",
    "GoalText",
    "Json",
    "JsonDocument",
    "KeptIn",
    "KernelPath",
    "Limit",
    "MaxIterations",
    "MaxToolCalls",
    "Model",
    "MoreIterations",
    "Offset",
    "Plan",
    "Policy",
    "Questions",
    "ResumedFile",
    "RunId",
    "Store",
    "Stream",
    "Timeout",
    "decider",
]

EXIT_CODES = """\b
Exit codes:
  0    answered
  1    ended without: a limit, the timeout, a cancellation, a reply cut short
  2    something on the command line, in a file or in the kernel cannot be used
  3    a fault, such as a failed request
  4    paused: calls wait for a decision, or questions for an answer
  130  interrupted with Ctrl-C
"""

KernelPath = Annotated[
    str | None,
    typer.Option(
        "--kernel",
        metavar="MODULE:FACTORY",
        help="Where the kernel comes from: a function without arguments, async or not, that returns one, or a "
        "Kernel. The current directory is importable. Left out: no functions, the model can only talk.",
    ),
]
BaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="An OpenAI-compatible endpoint, such as http://localhost:8000/v1. Left out: OPENAI_BASE_URL, or "
        "OpenAI itself.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The model. With neither --model nor --base-url the kernel's own service is used. The key is "
        "OPENAI_API_KEY; an endpoint on this machine needs none.",
    ),
]
Policy = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A YAML file with an approval policy: which calls run, are denied, or wait."),
]
AskAll = Annotated[bool, typer.Option("--ask-all", help="Every call waits for a decision.")]
By = Annotated[str | None, typer.Option(metavar="NAME", help="Who decides, for the record. Left out: the login name.")]
Stream = Annotated[bool, typer.Option("--stream/--no-stream", help="Show text while it arrives.")]
Json = Annotated[bool, typer.Option("--json", help="Print the whole result as one JSON document on stdout.")]

JsonDocument = Annotated[bool, typer.Option("--json", help="Print it as one JSON document on stdout.")]

STORE_VARIABLE = "PLANNER_EXT_STORE"
"""The environment variable in place of ``--store``: other users of the machine can read a command line."""

_STORE = "A store of runs: an SQLite file on this machine, or a postgresql:// address."
Store = Annotated[str, typer.Option("--store", envvar=STORE_VARIABLE, metavar="FILE|URL", help=_STORE)]
Limit = Annotated[int, typer.Option(metavar="N", min=1, help="How many at most.")]
Offset = Annotated[int, typer.Option(metavar="N", min=0, help="How many of the first to leave out.")]

GoalText = Annotated[str, typer.Argument(metavar="GOAL", help="What is to be reached.", show_default=False)]
MaxIterations = Annotated[
    int,
    typer.Option(
        metavar="N", help="Most requests to the model, plan and answer included. The last offers no functions."
    ),
]
MaxToolCalls = Annotated[int | None, typer.Option(metavar="N", help="Most function calls, failed ones included.")]
Questions = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Let the model ask you this many questions. Left out: it is given no function to ask with."
    ),
]
Plan = Annotated[
    bool | None,
    typer.Option("--plan/--no-plan", help="Ask for a plan first. Left out: where the kernel has functions."),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Stop the run after this time; its history is kept. Waiting for a decision is free."
    ),
]
CheckpointPath = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Ask nobody: when calls wait, stop with exit code 4. FILE has the run as it stands, whatever its end, for "
        "planner-ext resume. It is signed, and anything else refused, where PLANNER_EXT_CHECKPOINT_KEY "
        "(or PLANNER_EXT_KEY) is set.",
    ),
]

KeptIn = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar=STORE_VARIABLE,
        metavar="FILE|URL",
        help=f"Keep the run there while it goes: a killed process loses nothing, and what waits is decided with "
        f"planner-ext approvals. {_STORE} Texts come whole.",
    ),
]
RunId = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --store: the run's name. An unfinished run of this name is continued; one that has ended gives its "
        "result. Left out: a new one.",
    ),
]

ResumedFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="What run --checkpoint wrote; it is written again.", show_default=False)
]
Approvals = Annotated[
    list[str] | None, typer.Option(metavar="ID", help="Let this call run. May be repeated, as the next two may.")
]
Answers = Annotated[
    list[str] | None, typer.Option("--answer", metavar="ID=TEXT", help="Answer this question. May be repeated.")
]
Denials = Annotated[
    list[str] | None, typer.Option(metavar="ID=REASON", help="Do not run this call; the model reads why.")
]
Edits = Annotated[
    list[str] | None, typer.Option(metavar="ID=JSON", help="Let this call run with these arguments instead.")
]
Cancel = Annotated[str | None, typer.Option(metavar="REASON", help="End the run; nothing that waits is run.")]
MoreIterations = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Round trips in place of the run's; those made count. Lets a run that spent them go on."
    ),
]


def decider(by: str | None) -> str | None:
    """Name who decides: as given, or by the login name, where there is one."""
    import getpass  # noqa: PLC0415  (only where a run is started)

    if by is not None:
        return by
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):
        return None
