"""Which small defects the tests find: a mutation score of the pure core, or of other packages and modules.

    python tests/benchmarks/mutations.py                                     a sample of planner_ext/core
    python tests/benchmarks/mutations.py engine approval                     a sample of both, judged by their tests
    python tests/benchmarks/mutations.py --sample 0 planner_ext/core/fold.py    every mutation of one module
    python tests/benchmarks/mutations.py --again survivors.txt               those that a saved output calls SURVIVED

A mutation changes one place inside a function: a comparison, ``and`` and ``or``, a sign, a number, True and False,
``not``, ``min`` and ``max``, ``any`` and ``all``; or it removes a condition, a keyword argument, an entry of a dict, a
statement, or what is returned. One process imports the tests and runs them once, with the lines that each executes. For
each mutation it forks; the child replaces the code of the live functions, and runs the tests that execute the changed
statement until one fails, first those that found much for little time. A test that takes far more processor time than
it should is caught in a loop, and one that does not end waits for nothing: the mutation is found. Property tests draw
the same examples every time, and do not shrink them.

A mutation that no test notices survives: it is a promise without a test, or a change without an effect.

What survives in the core changes no behaviour: a test for None that the type checker needs; a condition that only saves
time (when a `Tally` is merged, when a row has blocks, which limits are replaced); a value that nothing reads (a number
above 0 where only its sign counts, the iteration of a fact that the fold does not look at). Code that runs when a
module is imported is not judged.
"""

import argparse
import ast
import gc
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item

ROOT = Path(__file__).parents[2]
PAIRS: list[tuple[type[Any], type[Any]]] = [
    *(
        (ast.Lt, ast.LtE),
        (ast.Gt, ast.GtE),
        (ast.Eq, ast.NotEq),
        (ast.Is, ast.IsNot),
        (ast.In, ast.NotIn),
    ),
    *(
        (ast.And, ast.Or),
        (ast.Add, ast.Sub),
        (ast.Mult, ast.FloorDiv),
        (ast.Div, ast.Mod),
    ),
]
SWAPS = dict(PAIRS) | {second: first for first, second in PAIRS}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
BLOCKS = ("body", "orelse")
STRICT = "strict"
"""An argument of `zip` that changes nothing in code that is right."""
NOT_RUN = ("annotation", "returns", "args", "decorator_list", "type_params")
"""The fields of a function that its calls do not execute."""
MOST_MEMORY = 8 << 30
"""Bytes of address space; a mutation that asks for more was caught in a loop."""
MOST_SECONDS = 120.0
"""How long a child may take; a test that takes longer waits for what never comes."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change: its module, its place among the edits of that, its line, and the lines of the changed statement."""

    file: str
    at: int
    line: int
    change: str
    lines: range

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"


def changes(node: Any) -> Iterator[tuple[str, Any]]:
    """List the changes of one node: the field, and its new value."""
    match node:
        case ast.Compare(ops=[operator, *more]) if type(operator) in SWAPS:
            yield "ops", [SWAPS[type(operator)](), *more]
        case (
            ast.BoolOp(op=operator)
            | ast.BinOp(op=operator)
            | ast.AugAssign(op=operator)
        ) if type(operator) in SWAPS:
            yield "op", SWAPS[type(operator)]()
        case ast.UnaryOp(op=ast.Not()):
            yield "operand", ast.UnaryOp(op=ast.Not(), operand=node.operand)
        case ast.UnaryOp(op=ast.USub()):
            yield "op", ast.UAdd()
        case ast.Constant(value=bool() as value):
            yield "value", not value
        case ast.Constant(value=int() | float() as value):
            yield "value", value + 1
        case ast.Return(value=ast.expr() as value) if not (
            isinstance(value, ast.Constant) and value.value is None
        ):
            yield "value", ast.Constant(value=None)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if (
            isinstance(test, ast.Name | ast.Call)
        ):
            yield "test", ast.UnaryOp(op=ast.Not(), operand=test)
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            yield "id", NAMES[name]
        case ast.comprehension(ifs=[_, *more]):
            yield "ifs", more
        case ast.Call(keywords=[_, *_]):
            for at in (
                at for at, keyword in enumerate(node.keywords) if keyword.arg != STRICT
            ):
                yield "keywords", [*node.keywords[:at], *node.keywords[at + 1 :]]
        case ast.Dict():
            for at in range(len(node.keys)):
                yield (
                    "keys values",
                    [
                        [*items[:at], *items[at + 1 :]]
                        for items in (node.keys, node.values)
                    ],
                )
        case _:
            pass


def removed(node: Any) -> Iterator[tuple[str, Any]]:
    """List the statements of a block, each of which can be removed."""
    for name in BLOCKS:
        block = getattr(node, name, ())
        for at, statement in enumerate(block if isinstance(block, list) else ()):
            text = isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Constant
            )
            if (
                isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.If)
                and not text
            ):
                yield (
                    name,
                    [
                        *block[:at],
                        ast.copy_location(ast.Pass(), statement),
                        *block[at + 1 :],
                    ],
                )


def inside(
    node: ast.AST, statement: ast.stmt | None = None, within: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Walk the code of functions: each node, and the statement that it belongs to."""
    if isinstance(node, ast.stmt):
        statement = node
    within = within or isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    )
    if within:
        yield node, statement
    for name, value in ast.iter_fields(node):
        if name in (
            "annotation",
            "returns",
            "args",
            "decorator_list",
            "type_params",
        ) and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and getattr(child, "arg", None) != STRICT:
                yield from inside(child, statement, within)


def header(statement: Any) -> range:
    """Return the lines of a statement without the blocks inside it."""
    blocks = getattr(statement, "body", None) or getattr(statement, "cases", None)
    ends = (
        statement.end_lineno
        if blocks is None
        else max(statement.lineno, _first_line(blocks[0]) - 1)
    )
    return range(statement.lineno, ends + 1)


def _first_line(block: Any) -> int:
    return block.pattern.lineno if isinstance(block, ast.match_case) else block.lineno


def edits(tree: ast.Module) -> list[tuple[Any, Any, list[str], list[Any]]]:
    """List the edits of a module, always in the same order: node, its statement, fields and their new values."""
    found: list[tuple[Any, Any, list[str], list[Any]]] = []
    for node, statement in inside(tree):
        for names, value in (*changes(node), *removed(node)):
            fields = names.split()
            found.append(
                (node, statement, fields, value if len(fields) > 1 else [value])
            )
    return found


def mutations(file: str) -> Iterator[Mutation]:
    """List what can be changed in a module."""
    for at, (node, statement, fields, values) in enumerate(
        edits(ast.parse((ROOT / file).read_text("utf-8")))
    ):
        shown, before = node, statement
        if fields[0] in BLOCKS:
            gone = next(
                old
                for old, new in zip(getattr(node, fields[0]), values[0], strict=True)
                if old is not new
            )
            shown, before, change = gone, gone, f"removed {ast.unparse(gone)}"
        elif fields == ["test"]:
            change = f"if {ast.unparse(node.test)} -> if {ast.unparse(values[0])}"
        else:
            originals = [getattr(node, name) for name in fields]
            change = ast.unparse(node)
            _set(node, fields, values)
            change = f"{change} -> {ast.unparse(node)}"
            _set(node, fields, originals)
        line = getattr(shown, "lineno", before.lineno)
        yield Mutation(
            file=file,
            at=at,
            line=line,
            change=" ".join(change.split()),
            lines=header(before),
        )


def changed(mutation: Mutation) -> CodeType:
    """Compile a module with its mutation."""
    path = ROOT / mutation.file
    tree = ast.parse(path.read_text("utf-8"))
    node, _, fields, values = edits(tree)[mutation.at]
    _set(node, fields, values)
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


def _set(node: Any, fields: Sequence[str], values: Sequence[Any]) -> None:
    for name, value in zip(fields, values, strict=True):
        setattr(node, name, value)


def codes(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """List the code objects of a module by name and line."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield (constant.co_qualname, constant.co_firstlineno), constant
            yield from codes(constant)


def functions_of(files: set[str]) -> dict[str, list[FunctionType]]:
    """Find the live functions of modules."""
    gc.unfreeze()  # the suite freezes what was collected, and get_objects leaves that out
    found: dict[str, list[FunctionType]] = {file: [] for file in files}
    by_path = {str(ROOT / file): functions for file, functions in found.items()}
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename in by_path:
            by_path[one.__code__.co_filename].append(one)
    return found


def install(mutation: Mutation, functions: Sequence[FunctionType]) -> None:
    """Replace the code of the live functions of a module by the changed one."""
    code = dict(codes(changed(mutation)))
    for function in functions:
        function.__code__ = code[
            function.__code__.co_qualname, function.__code__.co_firstlineno
        ]


class Judge:
    """A pytest plugin that runs the collected tests once, and then those that matter for each mutation."""

    def __init__(self, drawn: Sequence[Mutation]) -> None:
        self.drawn = drawn
        self.score = Counter[str]()

    def pytest_configure(self) -> None:
        """Let property tests draw the same examples every time, and not shrink them."""
        from hypothesis import Phase, settings  # pytest prepares its plugin first

        same = settings(
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
        )
        settings.register_profile("same", same)
        settings.load_profile("same")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Judge the mutations, and print each with the score so far."""
        files = {mutation.file for mutation in self.drawn}
        covering, took = covering_tests(session.items, files)
        functions, found = functions_of(files), Counter[pytest.Item]()
        gc.freeze()
        for mutation in self.drawn:
            tests = {
                item
                for line in mutation.lines
                for item in covering[mutation.file, line]
            }
            items = sorted(
                tests, key=lambda item: took[item] / (1 + found[item])
            )  # what finds much for little comes first
            verdict, finder = judged(mutation, functions[mutation.file], items, took)
            if finder is not None:
                found[finder] += 1
            self.score[verdict] += 1
            total = self.score.total() - self.score["unjudged"]
            print(f"{self.score['killed']}/{total} {verdict} {mutation}", flush=True)
        return True


def covering_tests(
    items: Sequence[pytest.Item], files: set[str]
) -> tuple[dict[tuple[str, int], set[pytest.Item]], dict[pytest.Item, float]]:
    """Run the tests once: which of them execute each line, and how many seconds each takes."""
    measured = coverage.Coverage(
        data_file=None, config_file=False, include=[str(ROOT / file) for file in files]
    )
    measured.start()
    took, by_name = dict[pytest.Item, float](), {item.nodeid: item for item in items}
    for item in items:
        measured.switch_context(item.nodeid)
        began = time.process_time()
        for problem in problems(item):
            print(
                f"{item.nodeid} judges nothing, as it fails on the code as it is:\n{problem}"
            )
            by_name.pop(item.nodeid, None)
        took[item] = time.process_time() - began
    measured.stop()
    covering = defaultdict[tuple[str, int], set[pytest.Item]](set)
    for file in files:
        for line, names in (
            measured.get_data().contexts_by_lineno(str(ROOT / file)).items()
        ):
            covering[file, line] = {by_name[name] for name in names if name in by_name}
    return covering, took


def judged(
    mutation: Mutation,
    functions: Sequence[FunctionType],
    items: Sequence[pytest.Item],
    took: Mapping[pytest.Item, float],
) -> tuple[str, pytest.Item | None]:
    """Run tests on a mutation in a child; return the verdict, and the test that found it."""
    if not items:
        return "NO TEST", None
    sys.stdout.flush()
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            for ending in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(ending, signal.SIG_DFL)  # ends the process
            signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            install(mutation, functions)
            for at, item in enumerate(items):
                signal.setitimer(signal.ITIMER_PROF, 1 + 5 * took[item])
                if problems(item):
                    os.write(writes, b"%d" % at)
                    break
            else:
                os.write(writes, b"survived")
        except (ValueError, KeyError, SyntaxError):
            os.write(writes, b"unjudged")
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if said.isdigit():
        return "killed", items[int(said)]
    return {"survived": "SURVIVED", "": "killed"}.get(said, said), None


def problems(item: pytest.Item) -> list[str]:
    """Run one test with its fixtures and its filters of warnings, and tell what failed."""
    with catch_warnings_for_item(item.config, item.ihook, "runtest", item):
        reports = runtestprotocol(item, log=False, nextitem=None)
    return [report.longreprtext for report in reports if report.failed]


def modules_of(name: str) -> list[str]:
    """List the modules of a package, or the one with this path."""
    files = (
        [ROOT / name]
        if name.endswith(".py")
        else sorted((ROOT / "planner_ext" / name).glob("*.py"))
    )
    if not files:
        raise SystemExit(
            f"planner_ext/{name} has no modules; expected a package, such as engine, or a module's path"
        )
    return [str(file.relative_to(ROOT)) for file in files]


def main() -> None:
    """Draw mutations, and judge them."""
    parser = argparse.ArgumentParser(description="Print the mutation score of modules.")
    parser.add_argument(
        "judged",
        nargs="*",
        default=["core"],
        help="packages, core by default, or paths of modules",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        help="the tests that judge; those of the packages by default",
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=100,
        help="how many mutations, drawn at random; 0 for all",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--again",
        type=Path,
        help="an output of this program; only its survivors are judged",
    )
    options = parser.parse_args()
    files = [file for name in options.judged for file in modules_of(name)]
    tests = options.tests or sorted(
        {f"tests/{Path(file).parent.name}" for file in files}
    )
    drawn = [mutation for file in files for mutation in mutations(file)]
    print(f"{len(drawn)} mutations in {len(files)} modules")
    if options.again is not None:
        before = set(
            re.findall(
                r"(?:SURVIVED|NO TEST) (\S+?):\d+: (.*)",
                options.again.read_text("utf-8"),
            )
        )
        drawn = [
            mutation for mutation in drawn if (mutation.file, mutation.change) in before
        ]
    else:
        drawn = random.Random(options.seed).sample(
            drawn, min(options.sample or len(drawn), len(drawn))
        )
    os.chdir(ROOT)
    arguments = ["-q", "-s", "-n0", "-p", "no:cacheprovider", "-m", "fast"]
    sys.exit(pytest.main([*arguments, *tests], plugins=[Judge(drawn)]))


if __name__ == "__main__":
    main()
