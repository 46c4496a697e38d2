"""How a command is declared: the decorator, and the exit codes. Imports nothing heavy."""

import asyncio
import re
import sys
from collections.abc import Callable, Coroutine, Iterable
from copy import copy
from dataclasses import is_dataclass
from enum import IntEnum
from functools import cache, wraps
from importlib import import_module
from inspect import Parameter, Signature, getdoc, signature
from typing import Annotated, Any, TypeVar, get_args

import typer
from typer.core import TyperGroup
from typer.main import get_group

from planner_ext.cli.text import Terminal
from planner_ext.core.errors import PlannerExtError

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A bounded, interruptible, auditable agent loop for Semantic Kernel.",
)


def add_group(name: str, module: str, help: str) -> None:
    """Add the commands of a module's ``group``, which is imported when one is asked for."""

    @cache
    def loaded() -> Any:
        return get_group(import_module(module).group).commands

    class Group(TyperGroup):
        # The base class sets it to an empty one.
        commands: Any = property(lambda _: loaded(), lambda _, __: None)

    app.add_typer(
        typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None, help=help),
        name=name,
        short_help=help,
    )


class ExitCode(IntEnum):
    """How a command ended; each command's help says what that means."""

    ANSWERED = 0
    NO_ANSWER = 1
    UNUSABLE = 2
    FAULT = 3
    PAUSED = 4
    INTERRUPTED = 130


RUN = """\
  0    answered
  1    ended without an answer: a limit, the timeout, a cancellation, a reply cut short
  2    something on the command line, in a file or in the kernel cannot be used
  3    a fault, such as a failed request
  4    paused: calls wait for a decision, or questions for an answer
  130  interrupted with Ctrl-C
"""
"""Exit codes of a command that drives a run."""

DONE = """\
  0    done
  2    the store, the run or an option cannot be used
"""
"""Exit codes of a command that reads or changes a store."""

Exit = int | Coroutine[None, None, int | None] | None
"""A command's exit code, None for 0, or a coroutine that returns one of these."""

F = TypeVar("F", bound=Callable[..., Exit])


def command(
    group: typer.Typer, *, exit_codes: str = DONE, name: str | None = None
) -> Callable[[F], F]:
    """Register a function as a command, with its docstring as help.

    A parameter that is a dataclass becomes an option for each of its fields, whose help
    is in its ``Attributes:``. A plain ``bool`` is a flag. The docstring's ``Options:``
    has the help of other parameters; ``Exit codes:`` may end it. An error of this
    package is printed on stderr, with exit code 2.

    Args:
        group: The group of the command.
        exit_codes: Those that several commands share, where the docstring has none.
        name: Default: the function's.
    """

    def register(function: F) -> F:
        doc = getdoc(function) or ""
        doc, _, codes = doc.partition("\n\nExit codes:\n")
        doc, _, own = doc.partition("\n\nOptions:\n")
        bundles: dict[str, type[Any]] = {}
        options: list[Parameter] = []
        for parameter in signature(function).parameters.values():
            if isinstance(kind := parameter.annotation, type) and is_dataclass(kind):
                bundles[parameter.name] = kind
                attributes = (getdoc(each) or "" for each in reversed(kind.__mro__))
                texts = "\n".join(
                    text.partition("Attributes:\n")[2] for text in attributes
                )
                options += _with_help(signature(kind).parameters.values(), texts)
            else:
                options += _with_help(
                    [parameter.replace(kind=Parameter.KEYWORD_ONLY)], own
                )

        def call(given: dict[str, Any]) -> Exit:
            for each, bundle in bundles.items():
                names = signature(bundle).parameters
                own = {name: given.pop(name) for name in names}
                given[each] = bundle(**own)
            return function(**given)

        @wraps(function)
        def run(**given: Any) -> None:
            raise typer.Exit(_exit_code(lambda: call(given)))

        run.__signature__ = Signature(options)  # pyright: ignore[reportAttributeAccessIssue]  (PEP 362)
        run.__annotations__ = {option.name: option.annotation for option in options}
        # \b keeps the lines of a paragraph apart.
        text = re.sub(r"^Examples:", "\b\nExamples:", doc, flags=re.MULTILINE)
        # Without one, a group's help cuts the docstring's sentence off.
        summary, _, _ = doc.partition("\n\n")
        group.command(
            name,
            help=text,
            short_help=summary,
            epilog=f"\b\nExit codes:\n{codes or exit_codes}",
        )(run)
        return function

    return register


_TEXT = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""A name and its text in a section of a docstring."""


def _with_help(options: Iterable[Parameter], section: str) -> Iterable[Parameter]:
    """Add the help in a docstring's section to the options that have none."""
    texts: dict[str, str] = dict(_TEXT.findall(section))
    for option in options:
        flag = Annotated[bool, typer.Option(f"--{option.name.replace('_', '-')}")]
        given = flag if option.annotation is bool else option.annotation
        kind, info = get_args(given)
        if info.help is None:
            info = copy(info)
            words = texts[option.name].split()
            info.help = " ".join(words)
        yield option.replace(annotation=Annotated[kind, info])


def _exit_code(call: Callable[[], Exit]) -> int:
    try:
        code = call()
        if isinstance(code, Coroutine):
            code = asyncio.run(code)
        return code or ExitCode.ANSWERED
    except PlannerExtError as error:
        Terminal(sys.stderr).complain(str(error))
        return ExitCode.UNUSABLE
    except KeyboardInterrupt:
        Terminal(sys.stderr).print("Interrupted.", style="red")
        return ExitCode.INTERRUPTED
