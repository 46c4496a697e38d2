"""The public names: those of ``surface.txt``, sorted, importable, each with a docstring."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import get_args, get_origin, get_type_hints

import pytest

import planner_ext
from planner_ext import errors
from support.surface import MODULES, surface
from support.values import each_of

PACKAGE = Path(planner_ext.__file__).parent
README = Path(__file__).parents[1] / "README.md"

GUIDE = Path(__file__).parents[1] / "samples" / "guides" / "troubleshooting.md"
SURFACE = Path(__file__).parent / "surface.txt"

public = each_of("name", MODULES)


def test_the_public_surface_is_the_one_in_the_file() -> None:
    """No public name, parameter, default or member appears, changes or goes unless ``tests/surface.txt`` says so."""
    assert surface() == SURFACE.read_text(encoding="utf-8")


@each_of(
    ("name", "module"),
    [
        *(
            ("ToolCall", "hitl_manager"),
            ("SharedBudget", "budgets"),
            ("Approvals", "durable"),
            ("effect", "durable"),
        ),
        *(
            ("LimitReachedError", "errors"),
            ("TextDelta", "events"),
            ("say", "testing"),
            ("ag_ui_events", "ag_ui"),
        ),
    ],
)
def test_a_name_that_the_root_lacks_is_found(name: str, module: str) -> None:
    """An import of another public name from the root says where it is; the attribute does not exist."""
    line = f"from planner_ext.{module} import {name}"
    with pytest.raises(ImportError, match=line):
        exec(f"from planner_ext import {name}")
    with pytest.raises(AttributeError, match=line):
        getattr(planner_ext, name)
    assert not hasattr(planner_ext, name)


def test_an_unknown_name_of_the_root_is_unknown() -> None:
    """A name that no public module has is refused as Python does; modules are imported as ever."""
    with pytest.raises(ImportError, match="cannot import name 'Agent'"):
        exec("from planner_ext import Agent")
    exec("from planner_ext import durable, testing")


@public
def test_public_names_are_sorted_and_can_be_imported(name: str) -> None:
    """``__all__`` is sorted, without duplicates, and everything in it is there."""
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(set(module.__all__))
    for each in module.__all__:
        assert hasattr(module, each), each


@public
def test_everything_public_has_a_docstring(name: str) -> None:
    """Modules, classes, functions, public methods and type aliases say what they are."""
    module = importlib.import_module(name)
    assert module.__doc__
    without = [each for each in module.__all__ if not documented(module, each)]
    assert without == []


def documented(module: ModuleType, name: str) -> bool:
    value = getattr(module, name)
    if inspect.isclass(value):
        return has_own_docstring(value) and all(
            getattr(method, "__doc__", None)
            for key, method in vars(value).items()
            if not key.startswith("_")
            and (inspect.isroutine(method) or isinstance(method, property))
        )
    if inspect.isroutine(value):
        return bool(value.__doc__)
    return name in documented_assignments()


def has_own_docstring(value: type) -> bool:
    """A dataclass without a docstring gets its signature for one."""
    return bool(value.__doc__) and not value.__doc__.startswith(f"{value.__name__}(")


@cache
def documented_assignments() -> set[str]:
    """List the names in the package that are assigned on the top level with a docstring below."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        body = ast.parse(path.read_text()).body
        for statement, below in pairwise(body):
            target = statement.target if isinstance(statement, ast.AnnAssign) else None
            if isinstance(statement, ast.Assign):
                target = statement.targets[0]
            described = (
                isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            )
            if isinstance(target, ast.Name) and described:
                names.add(target.id)
    return names


def test_every_error_is_one_of_ours() -> None:
    """There is one root of all errors, and each class says when it is raised."""
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.PlannerExtError)
    assert not issubclass(errors.PlannerInvalidConfigurationError, ValueError)


def test_the_tree_of_errors_is_drawn() -> None:
    """The docstring of planner_ext.errors names every class that the module exports."""
    assert errors.__doc__ is not None
    assert [name for name in errors.__all__ if name not in errors.__doc__] == []


def test_the_guide_says_of_each_error_when_it_is_raised_and_the_way_out() -> None:
    """Its table has a row for each error, in the words of the class, and something to do."""
    rows = re.findall(
        r"^\| `(\w+Error|\w+Exception)` \| (.+?) \| (.+) \|$",
        GUIDE.read_text("utf-8"),
        re.MULTILINE,
    )
    assert [(name, when) for name, when, _ in rows] == [
        (name, first_paragraph(getattr(errors, name))) for name in errors.__all__
    ]


def first_paragraph(error: type) -> str:
    text = inspect.getdoc(error) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("``", "`")


def blocks() -> list[str]:
    return (
        re.findall(
            r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE
        )
        if README.exists()
        else []
    )


@pytest.mark.skipif(not blocks(), reason="the README has no Python code")
def test_the_readmes_code_compiles() -> None:
    """Every Python block of the README is Python, ``await`` outside a function included."""
    for block in blocks():
        compile(block, str(README), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_help_of_the_package_is_a_page() -> None:
    """``help(planner_ext)`` fits on one page: what there is and where, without the classes' own documentation."""
    code = "import planner_ext, pydoc; print(len(pydoc.plain(pydoc.render_doc(planner_ext)).splitlines()))"
    lines = int(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
    )
    assert lines <= 80


def test_every_public_name_is_in_the_overview() -> None:
    """The package's docstring names everything that the root exports."""
    assert [
        name for name in planner_ext.__all__ if name not in (planner_ext.__doc__ or "")
    ] == []


INTERNAL = {
    "FunctionInvokingChatCompletion.charged_to",  # the view of the kernel that functions get
    "FunctionInvokingChatCompletion.options",
    "FunctionCallingStepwisePlanner.journaled",  # the stores
    "DurablePlanner.journaled",
    "Checkpoint.state",  # the fold of its facts
    "Runs.__init__",  # Runs.sqlite and Runs.postgres make them
    "RunsClient.__init__",  # connect makes it
    "Approvals.__init__",
    "SubmittedRun.__init__",  # submit makes it
    "RunHandle.__init__",  # Runs.start, resume and recover make them
    "ApprovalFilter.decide",  # the gate of a run
}
"""What is public by its name alone: other floors of the package call it, applications do not."""


def signatures() -> Iterator[tuple[str, object]]:
    """Give every public class, method and function with the annotations of its fields or parameters."""
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            if not getattr(value, "__module__", "").startswith("planner_ext"):
                continue
            yield name, value
            members = tuple(vars(value).items()) if inspect.isclass(value) else ()
            for key, member in members:
                plain = (
                    member.fget
                    if isinstance(member, property)
                    else getattr(member, "__func__", member)
                )
                if inspect.isfunction(plain) and (
                    not key.startswith("_") or key in ("__init__", "__call__")
                ):
                    yield f"{name}.{key}", plain


def types_in(annotation: object) -> Iterator[type]:
    """Give the classes that an annotation names, at any depth."""
    for inner in get_args(annotation):
        yield from (
            each
            for part in (inner if isinstance(inner, list | tuple) else [inner])
            for each in types_in(part)
        )
    kind = get_origin(annotation) or annotation
    if inspect.isclass(kind):
        yield kind


def test_every_type_in_a_public_signature_is_public() -> None:
    """The type of each parameter and result of the package can be imported from a public module."""
    modules = [importlib.import_module(module) for module in MODULES]
    public = {
        id(getattr(module, name)) for module in modules for name in module.__all__
    }
    missing: set[str] = set()
    for where, value in signatures():
        if where in INTERNAL or not (
            inspect.isclass(value) or inspect.isfunction(value)
        ):
            continue
        try:
            hints = get_type_hints(value)
        except NameError:  # a name that is imported for type checkers alone
            continue
        for name, annotation in hints.items():
            missing |= {
                f"{where}({name}: {kind.__name__})"
                for kind in types_in(annotation)
                if kind.__module__.startswith("planner_ext")
                and id(kind) not in public
                and not name.startswith("_")
            }
    assert not missing, "\n".join(sorted(missing))
