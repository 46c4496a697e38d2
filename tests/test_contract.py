"""The public names: those of the contract, sorted, importable, each with a docstring; and the README's code."""

import ast
import importlib
import importlib.util
import inspect
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import planner_ext
from planner_ext import Budget, FunctionCallingStepwisePlanner

PACKAGE = Path(planner_ext.__file__).parent
README = PACKAGE.parent / "README.md"

ROOT = [
    "ApprovalFilter",
    "ApprovalPolicy",
    "Approve",
    "BoundedFunctionChoiceBehavior",
    "Budget",
    "Deny",
    "FunctionCallingStepwisePlanner",
    "FunctionCallingStepwisePlannerOptions",
    "FunctionCallingStepwisePlannerResult",
    "FunctionInvokingChatCompletion",
    "ToolCallHandler",
    "UserInteraction",
    "requires_approval",
]
"""What a newcomer finds in the root, and nothing else."""

MODULES = {
    "planner_ext.errors": {"PlannerExtError", "PlannerException", "PlannerInvalidConfigurationError"},
    "planner_ext.events": {"ResultReady", "TextDelta", "PlannerEvent", "ModelReplied", "CallStarted", "Ended"},
    "planner_ext.iteration": {"FunctionInvocationIterationContext", "StopHandle", "ToolExecution", "Usage"},
    "planner_ext.testing": {"ScriptedChatCompletion", "ScriptedOpenAIServer", "call", "calls", "say"},
    "planner_ext.hitl_manager": {
        "ApprovalSettings",
        "Checkpoint",
        "Defer",
        "PendingCall",
        "Supply",
        "ToolCall",
        "check_for_intervention",
    },
    "planner_ext.session": {"AutomaticToolUseConfig", "ToolUseSession"},
    "planner_ext.plugin": {"PlannerPlugin"},
    "planner_ext.durable": {"Approvals", "Runs", "effect"},
}
"""The public modules, and names that the contract says are in them."""

there = [name for name in MODULES if importlib.util.find_spec(name) is not None]
public = pytest.mark.parametrize("name", ["planner_ext", *there])


def test_the_modules_that_every_application_needs_are_there() -> None:
    """Errors, events, the loop's and the approver's types, the session, and the test doubles exist."""
    assert {
        f"planner_ext.{name}" for name in ("errors", "events", "hitl_manager", "iteration", "session", "testing")
    } <= set(there)


def test_the_root_holds_the_contract_and_nothing_else() -> None:
    """The root exports the names of the contract, sorted."""
    assert planner_ext.__all__ == ROOT


@pytest.mark.parametrize("name", there)
def test_a_public_module_has_the_names_of_the_contract(name: str) -> None:
    """Each public module exports what the contract promises of it."""
    assert set(importlib.import_module(name).__all__) >= MODULES[name]


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
            if not key.startswith("_") and (inspect.isroutine(method) or isinstance(method, property))
        )
    if inspect.isroutine(value):
        return bool(value.__doc__)
    return name in documented_assignments()


def has_own_docstring(value: type) -> bool:
    """A dataclass without a docstring gets its signature for one."""
    return bool(value.__doc__) and not value.__doc__.startswith(f"{value.__name__}(")


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


def test_every_module_says_what_it_exports() -> None:
    """Every module of the package has ``__all__``, and a docstring."""
    silent = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {
            target.id
            for statement in tree.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        bare_package = path.name == "__init__.py" and len(tree.body) <= 1
        if not ast.get_docstring(tree) or not ("__all__" in names or bare_package):
            silent.append(str(path.relative_to(PACKAGE)))
    assert silent == []


def test_every_error_is_one_of_ours() -> None:
    """There is one root of all errors, and each class says when it is raised."""
    from planner_ext import errors

    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.PlannerExtError)
    assert not issubclass(errors.PlannerInvalidConfigurationError, ValueError)


def test_the_tree_of_errors_is_drawn() -> None:
    """The docstring of planner_ext.errors names every class that the module exports."""
    from planner_ext import errors

    assert errors.__doc__ is not None
    assert [name for name in errors.__all__ if name not in errors.__doc__] == []


def test_the_budget_has_the_limits_of_the_contract() -> None:
    """Budget's fields and defaults are those that the contract writes down, as far as they exist."""
    contract: dict[str, object] = {
        "max_iterations": None,
        "max_tool_calls": None,
        "max_total_tokens": None,
        "max_cost": None,
        "max_active_seconds": None,
        "deadline": None,
        "max_calls_per_function": {},
        "max_consecutive_errors": None,
        "max_repeated_calls": None,
        "max_repeated_denials": None,
        "max_calls_per_reply": 1024,
        "on_limit": "answer",
        "batch_over_limit": "reject_batch",
        "last_trip": "withdraw",
        "tell_budget": False,
        "price": None,
    }
    budget = Budget()
    has = {item.name: getattr(budget, item.name) for item in fields(budget)}
    assert has.items() <= contract.items()
    assert set(has) >= set(contract) - {"tell_budget", "price"}


@pytest.mark.parametrize("name", ["invoke", "invoke_stream"])
def test_the_planners_doors_have_the_signature_of_the_contract(name: str) -> None:
    """``(kernel, question, arguments=None, *, chat_history=None, stop=None, **kwargs)``, plain and streamed."""
    parameters = inspect.signature(getattr(FunctionCallingStepwisePlanner, name)).parameters
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_position == ["self", "kernel", "question", "arguments"]
    assert {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY} >= {"chat_history", "stop"}
    assert parameters["arguments"].default is None
    assert any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize("name", ["resume", "resume_stream"])
def test_resuming_has_the_same_parameters_plain_and_streamed(name: str) -> None:
    """``(kernel, checkpoint, decisions=None, *, arguments=None, budget=None, stop=None)``, plain and streamed."""
    parameters = inspect.signature(getattr(FunctionCallingStepwisePlanner, name)).parameters
    assert list(parameters) == ["self", "kernel", "checkpoint", "decisions", "arguments", "budget", "stop"]
    assert all(parameter.default is None for parameter in list(parameters.values())[3:])


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE) if README.exists() else []


@pytest.mark.skipif(not blocks(), reason="the README has no Python code")
def test_the_readmes_code_compiles() -> None:
    """Every Python block of the README is Python, ``await`` outside a function included."""
    for block in blocks():
        compile(block, str(README), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
