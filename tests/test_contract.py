"""The public names: those of the contract, sorted, importable, with their signatures, each with a docstring."""

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
from typing import Any, get_args, get_origin, get_type_hints

import pytest

import planner_ext
from planner_ext import errors
from support.values import each_of

PACKAGE = Path(planner_ext.__file__).parent
README = PACKAGE.parent / "README.md"

ROOT = [
    "ApprovalFilter",
    "ApprovalPolicy",
    "ApprovalSettings",
    "Approve",
    "BoundedFunctionChoiceBehavior",
    "Budget",
    "Checkpoint",
    "Defer",
    "Deny",
    "FunctionCallingStepwisePlanner",
    "FunctionCallingStepwisePlannerOptions",
    "FunctionCallingStepwisePlannerResult",
    "FunctionInvokingChatCompletion",
    "PlannerPlugin",
    "Runs",
    "StopHandle",
    "Supply",
    "ToolCallHandler",
    "ToolExecution",
    "ToolUseSession",
    "Usage",
    "UserInteraction",
    "requires_approval",
]
"""What a newcomer finds in the root, and nothing else."""

MODULES = {
    "planner_ext": " ".join(ROOT),
    "planner_ext.errors": """
        ApprovalRefusedError DecisionRefusedError IllegalTransitionError InvalidCheckpointError InvalidHistoryError
        InvalidJournalError InvalidLimitError InvalidOptionError InvalidPolicyError InvalidPriceError InvalidReplyError
        InvalidBehaviorError InvalidSettingsError
        LimitReachedError RunEndedError RunRefusedError ServiceNotFoundError
        NestedRunRefusedError NewerSchemaError NotAFunctionError PlannerException PlannerExtError
        PlannerInvalidConfigurationError PromptTooLargeError RunConflictError RunFencedError RunNotAnsweredError
        ServiceCallError SessionBusyError StoreError ToolExecutionError TurnPausedError UnknownRunError
        WorkerInUseError
        """,
    "planner_ext.events": """
        AnswerChecked BudgetChanged CallDecided CallFinished CallLeft CallStarted CallsWithheld Clarified
        Ended Fact HappenedInside IterationCompleted MessageAdded ModelAsked ModelReplied NestedCallStarted
        Paused Planned PlannerEvent RequestFailed ResultReady Resumed RunInfo RunStarted SharedBudgetsChecked
        StopRequested TextDelta
        """,
    "planner_ext.iteration": """
        FunctionInvocationIterationContext IterationCallback StopHandle ToolExecution Usage after_seconds all_of at_cost
        at_token_fraction when_flagged
        """,
    "planner_ext.testing": """
        CassetteError Difference ReplayDifferenceError Tape fork record replay
        Script ScriptExhaustedError ScriptedAnswer ScriptedCall ScriptedChatCompletion ScriptedFault
        ScriptedOpenAIServer ScriptedPromptExecutionSettings ScriptedReply ScriptedRequest call calls say
        """,
    "planner_ext.hitl_manager": """
        ApprovalSettings Approve Checkpoint Clarification Clarifier Decision DecisionRefusedError Defer Deny Interceptor
        ModelClarifier PendingCall Question Supply ToolCall check_for_intervention
        """,
    "planner_ext.session": "AutomaticToolUseConfig Messages OpenCall ToolUseSession",
    "planner_ext.plugin": "PlannerPlugin",
    "planner_ext.agent": "cancel_agent resume_agent resume_agent_stream",
    "planner_ext.ag_ui": "ag_ui_events ag_ui_kept_events defer_front_end_tools",
    "planner_ext.durable": """
        ApprovalRefusedError Approvals DecisionRecord DecisionRequest NoEffect PendingApproval RetryPolicy
        RunConflictError RunFencedError RunFilters RunHandle RunInputs RunRecord RunRefusedError RunResult RunStats Runs
        RunsClient StoreError StoredRun SubmittedRun TookEffect UnknownRunError WorkerInUseError WorkerRecord effect
        NoticeRecord RunNotice WorkerOptions Next Due
        """,
    "planner_ext.durable.hosts": "DbosHost TemporalHost",
    "planner_ext.budgets": "BudgetStore BudgetUsage SharedBudget",
    "planner_ext.inbox": "SignIn Token app",
    "planner_ext.timeline": """
        CallAttempt CallOutcome EventKind FailedRequest Gap ModelRequest Spending Timeline TimelineCall TimelineEvent
        TimelineIteration TimelineMessage fragment_of page_of timeline_of
        """,
}
"""The public modules, and the names that each exports at least."""

SIGNATURES = """
def Approve(arguments=None, always=None, by=None, fingerprint=None): ...
def Deny(reason="", by=None): ...
def Supply(result, by=None): ...
def Defer(prompt=None, expires_in=None, roles=()): ...
def requires_approval(function=None, /, *, prompt=None, expires_in=None, roles=()): ...
def check_for_intervention(call): ...
def effect(kind="once", *, probe=None): ...
def PlannerPlugin(planner, *, kernel=None, function_name="reach_goal"): ...
def resume_agent(agent, thread, checkpoint, decisions, *, kernel=None, late="refuse"): ...
def resume_agent_stream(agent, thread, checkpoint, decisions, *, kernel=None, late="refuse"): ...
def cancel_agent(agent, thread, checkpoint, *, kernel=None, by="", reason=""): ...
def ModelClarifier(kernel, *, service_id=None, settings=None, price=None): ...
def AutomaticToolUseConfig(*, enabled=True, max_tool_calls=8): ...
def Usage(*, prompt_tokens=0, completion_tokens=0, cost=None, active_seconds=0.0): ...
def after_seconds(seconds): ...
def all_of(*callbacks): ...
def at_cost(max_cost): ...
def at_token_fraction(context_window, fraction=0.5, then=None): ...
def when_flagged(flag): ...
def call(name, arguments=None, *, id=None): ...
def calls(*replies, text=None): ...
def say(text): ...

def Budget(
    *,
    max_iterations=None, max_tool_calls=None, max_total_tokens=None, max_cost=None, max_active_seconds=None,
    deadline=None, max_calls_per_function=..., max_consecutive_errors=None, max_repeated_calls=None,
    max_repeated_denials=None, max_calls_per_reply=1024, max_result_tokens=None,
    on_limit="answer", batch_over_limit="reject_batch", last_trip="withdraw", tell_budget=False,
): ...
def ApprovalSettings(
    *, unmatched="approve", on_denial="refuse", on_deferred="hold_all", expires_in=None, interceptor_timeout=30.0
): ...
def ToolExecution(
    *, max_concurrency=None, timeout=None, on_error="report", include_error_detail=False,
    stop_on_unknown_function=False, threads=True, max_threads=64,
): ...
def PendingCall(*, id, fully_qualified_name, arguments, fingerprint, expires_at=None): ...
def ToolCall(
    *, id, path="", plugin_name="", function_name="", fully_qualified_name, arguments, raw_arguments="", iteration=0,
    index=0, batch_size=1, fingerprint, prompt="", roles=(), expires_at=None, in_doubt=False,
): ...
def FunctionCallingStepwisePlannerOptions(
    *,
    max_iterations=15, budget=None, control="iterations_metadata", plan=True, charge_plan=True,
    require_final_answer_function=False, response_format=None, price=None, execution=None, approval=None,
    interceptors=(), pre_invoke=None, approver=None, iteration_completed=None, clarifier=None, max_clarifications=None,
    observers=(), clock=None, min_iteration_time_ms=0, excluded_plugins=..., excluded_functions=...,
    get_available_functions=None, get_initial_plan=None, get_step_prompt=None, execution_settings=None, max_tokens=None,
    max_tokens_ratio=0.1, max_completion_tokens=None, max_prompt_tokens=None, on_invalid_history="refuse",
    strict_finish_reason=False, checkpoint_key=None,
): ...
def FunctionCallingStepwisePlannerResult(
    *, final_answer="", value=None, chat_history=None, iterations=0, status="answered", tool_calls=0, limit=None,
    pending=(), reason="", plan="", facts=(),
): ...

class FunctionCallingStepwisePlanner:
    def __init__(self, service_id=None, options=None): ...
    def invoke(self, kernel, question, arguments=None, *, chat_history=None, stop=None, **kwargs): ...
    def invoke_sync(self, kernel, question, arguments=None, *, chat_history=None, stop=None, **kwargs): ...
    def invoke_stream(self, kernel, question, arguments=None, *, chat_history=None, stop=None, **kwargs): ...
    def resume(self, kernel, checkpoint, decisions=None, *, arguments=None, budget=None, stop=None): ...
    def resume_stream(self, kernel, checkpoint, decisions=None, *, arguments=None, budget=None, stop=None): ...
    def resume_sync(self, kernel, checkpoint, decisions=None, *, arguments=None, budget=None, stop=None): ...
    def cancel(self, checkpoint, *, by="", reason=""): ...

class BoundedFunctionChoiceBehavior:
    def Auto(auto_invoke=True, *, maximum_use_attempts=..., pre_invoke_callback=None, filters=None, **kwargs): ...
    def Required(auto_invoke=True, *, maximum_use_attempts=..., pre_invoke_callback=None, filters=None, **kwargs): ...
    def NoneInvoke(*, maximum_use_attempts=None, pre_invoke_callback=None, filters=None, **kwargs): ...
    def from_dict(data): ...

class FunctionInvokingChatCompletion:
    def __init__(
        self, inner, *,
        budget=None, execution=None, approval=None, interceptors=(), pre_invoke=None, check_for_intervention=None,
        approver=None, iteration_completed=None, clarifier=None, max_clarifications=None, observers=(), clock=None,
        min_iteration_time_ms=0, max_prompt_tokens=None, on_invalid_history="refuse", strict_finish_reason=False,
        checkpoint_key=None, service_id=None,
    ): ...
    def resume(
        self, chat_history, checkpoint, decisions, settings, *,
        kernel, arguments=None, budget=None, stop=None, store_final=False, late="refuse",
    ): ...
    def resume_streaming(
        self, chat_history, checkpoint, decisions, settings, *,
        kernel, arguments=None, budget=None, stop=None, store_final=False, late="refuse",
    ): ...

class ToolCallHandler:
    def __init__(
        self, kernel, *,
        arguments=None, settings=None, service_id=None, check_for_intervention=None, interceptors=(), budget=None,
        approver=None, approval=None, execution=None, pre_invoke=None, iteration_completed=None, clarifier=None,
        max_clarifications=None, observers=(), clock=None, min_iteration_time_ms=0, max_prompt_tokens=None,
        on_invalid_history="refuse", strict_finish_reason=False, checkpoint_key=None,
    ): ...
    def invoke(self, history, *, stop=None): ...
    def invoke_stream(self, history, *, stop=None): ...
    def resume(self, history, checkpoint, decisions, *, budget=None, stop=None, late="refuse"): ...
    def resume_stream(self, history, checkpoint, decisions, *, budget=None, stop=None, late="refuse"): ...

class ToolUseSession:
    def __init__(
        self, kernel, *,
        initial_prompts=(), tool_use_config=..., service_id=None, settings=None, arguments=None, budget=None,
        execution=None, approval=None, interceptors=(), pre_invoke=None, check_for_intervention=None,
        approver=None, iteration_completed=None, observers=(), clock=None, min_iteration_time_ms=0,
        max_prompt_tokens=None, strict_finish_reason=False, checkpoint_key=None,
    ): ...
    def append(self, messages): ...
    def history(self): ...
    def prompt(self, prompt=None, *, response_format=None, stop=None): ...
    def prompt_streaming(self, prompt=None, *, response_format=None, stop=None): ...

class Checkpoint:
    def to_json(self, key=None): ...
    def from_json(text, key=None): ...

class StopHandle:
    def stop(self, reason="The caller asked the run to stop.", *, now=False): ...

class ApprovalFilter:
    def __init__(self, policy, approver=None, timeout=None): ...
    def pending(self, history): ...
    def resume(self, kernel, history, decisions, *, arguments=None): ...

class ApprovalPolicy:
    def from_dict(data): ...
    def from_yaml(path): ...

class Runs:
    def sqlite(path, *, worker_id=None, in_doubt="person", poll_seconds=0.25, clock=None): ...
    def postgres(url, *, worker_id=None, in_doubt="person", poll_seconds=0.25, clock=None): ...
    def start(self, planner, kernel, goal, *, run_id=None, arguments=None, streaming=False): ...
    def resume(self, run_id, planner, kernel, *, decisions=None, budget=None, arguments=None): ...
    def cancel(self, run_id, *, by="", reason=""): ...
    def recover(self, planner, kernel, *, arguments_for=None, limit=100): ...
    def work(self, planner, kernel, *, arguments_for=None, max_concurrency=100): ...
    def drive_with(self, planner, kernel, arguments_for=None): ...
    def activate(self, run_id): ...
    def due(self, limit=100, *, again_after=30.0): ...
    def hint(self, timeout): ...
    def delete(self, run_id, *, force=False): ...
    def prune(self, *, older_than, status, dry_run=False): ...
    def count(self, *, status=None): ...
    def list(self, *, status=None, limit=50, offset=0): ...
    def stats(self): ...
    def load(self, run_id): ...

class DbosHost:
    def __init__(self, runs, *, queue, options=None, again_after=30.0): ...
    def wake(self, run_id): ...

class TemporalHost:
    def __init__(self, runs, client, *, task_queue, options=None, again_after=30.0): ...
    def wake(self, run_id): ...

class RunHandle:
    def result(self): ...

class Approvals:
    def connect(where, *, clock=None): ...
    def pending(self, run_id=None, *, limit=50, offset=0): ...
    def count(self, run_id=None): ...
    def show(self, approval_id): ...
    def refused(self, run_id): ...
    def decide(self, approval_id, decision): ...

class ScriptedChatCompletion:
    def __init__(
        self, script, *,
        ai_model_id="scripted", service_id="scripted", chunk_size=8, metadata=None, before_reply=None,
    ): ...

class ScriptedOpenAIServer:
    def __init__(self, script, *, chunk_size=8, models=("scripted",)): ...
    def start(self): ...
    def stop(self): ...
"""
"""Parameters that may be relied upon, with their defaults; ``...`` is any default. Others may be there, by keyword."""

public = each_of("name", MODULES)


def test_the_root_holds_the_contract_and_nothing_else() -> None:
    """The root exports the names of the contract, sorted."""
    assert planner_ext.__all__ == ROOT


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
def test_a_public_module_has_the_names_of_the_contract(name: str) -> None:
    """Each public module is there, and exports what the contract promises of it."""
    missing = set(MODULES[name].split()) - set(importlib.import_module(name).__all__)
    assert missing == set()


def promised() -> list[tuple[str, inspect.Signature]]:
    """List the callables of the contract by name, methods as ``Class.method``."""
    contract: dict[str, Any] = {}
    exec(SIGNATURES, contract)  # it holds nothing but signatures
    found: list[tuple[str, inspect.Signature]] = []
    for name, value in contract.items():
        if inspect.isfunction(value):
            found.append((name, inspect.signature(value)))
        elif inspect.isclass(value):
            methods = (
                (key, method)
                for key, method in vars(value).items()
                if inspect.isfunction(method)
            )
            found += [
                (f"{name}.{key}", inspect.signature(method)) for key, method in methods
            ]
    return found


def find(name: str) -> Any:
    """Find a public class, function or method by its name."""
    owner, _, method = name.partition(".")
    module = next(module for module, names in MODULES.items() if owner in names.split())
    found = getattr(importlib.import_module(module), owner)
    return getattr(found, method) if method else found


@each_of(
    ("name", "contract"),
    promised(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_signature_is_that_of_the_contract(
    name: str, contract: inspect.Signature
) -> None:
    """Parameters keep their names, their kinds and their defaults; a further one can only be given by keyword."""
    seen = inspect.signature(find(name)).parameters
    for promised in contract.parameters.values():
        assert promised.name in seen, f"{name} has no parameter {promised.name}"
        known = seen[promised.name]
        assert known.kind is promised.kind
        assert promised.default is ... or known.default == promised.default
    by_position = [
        one.name for one in seen.values() if one.kind <= one.POSITIONAL_OR_KEYWORD
    ]
    assert by_position == [one for one in contract.parameters if one in by_position]


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
