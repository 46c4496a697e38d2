"""The tree: imports only point down, and every module says what it exports and promises.

One test for each rule; it lists every module that breaks it.
"""

import ast
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from itertools import filterfalse
from pathlib import Path

from support.surface import MODULES

SPEC = find_spec("planner_ext")
assert SPEC is not None
assert SPEC.submodule_search_locations
PACKAGE = Path(SPEC.submodule_search_locations[0])

FLOORS: dict[str, float] = {
    "core": 0,
    "approval": 1,
    "readable": 1.5,
    "engine": 2,
    "timeline": 2,
    "durable": 2.5,
    "budgets": 2.75,
    "sk": 3,
    "testing": 3,
    "pytest_plugin": 3,
    "compare": 5,
    "cli": 6,
    "inbox": 6,
}
"""The floor of each folder; every other module of the root is a door."""
DOORS = 4.0
ROOF = 4.5
"""The root passes on names of the doors and of what is below; whoever stands above may use it."""
CRASH_POINTS = "planner_ext.testing.crash"
"""The one test tool that the stores look for, where the environment asks for it."""
FREE_OF_SEMANTIC_KERNEL = (
    *("core", "readable", "approval", "engine", "durable", "inbox", "timeline"),
)
"""Folders that do not import Semantic Kernel."""

NO_BUSINESS_OF_THE_CORE = {
    *(
        "asyncio",
        "logging",
        "time",
        "uuid",
        "random",
        "secrets",
        "threading",
        "io",
        "os",
        "socket",
    ),
}
MAY_SCRIPT = ("testing", "pytest_plugin", "compare", "cli")
"""What may stand on the scripted services: the tools of the tests, the comparison, and the demonstration."""

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    """Name a file's module."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """Name the folder or root module that a module of the package belongs to; "" for the root itself."""
    return [*module.split("."), ""][1]


def floor_of(module: str) -> float:
    """Say on which floor a module of the package stands."""
    part = part_of(module)
    return FLOORS.get(part, DOORS) if part else ROOF


@cache
def tree_of(file: Path) -> ast.Module:
    """Parse a file, once for all tests."""
    return ast.parse(file.read_text("utf-8"))


@cache
def imports_of(file: Path) -> tuple[str, ...]:
    """List the modules that a file imports, anywhere in it, also for type checkers alone."""
    found: list[str] = []
    package = (
        name_of(file).split(".")
        if file.name == "__init__.py"
        else name_of(file).split(".")[:-1]
    )
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            named = [f"{source}.{alias.name}" for alias in node.names]
            found += [name if is_module(name) else source for name in named]
    return tuple(dict.fromkeys(found))


def is_module(name: str) -> bool:
    """Whether a dotted name is a module of this package."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    return name.startswith("planner_ext.") and (
        path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    )


def own(file: Path) -> list[str]:
    """List what a file imports of this package."""
    imports = imports_of(file)
    return [
        name
        for name in imports
        if name == "planner_ext" or name.startswith("planner_ext.")
    ]


def in_parts(*parts: str) -> list[Path]:
    """List the files of some folders and root modules."""
    return [file for file in FILES if part_of(name_of(file)) in parts]


def check(rule: str, broken: Iterable[str]) -> None:
    """Fail with the rule and a line for each break of it."""
    lines = list(broken)
    assert not lines, "\n    ".join([rule, *lines])


def test_imports_point_down() -> None:
    """No module imports one of a higher floor."""
    check(
        "A module imports only what is on its own floor or below (FLOORS):",
        (
            f"{name_of(file)} (floor {floor_of(name_of(file))}) imports {name} (floor {floor_of(name)})"
            for file in FILES
            for name in own(file)
            if floor_of(name) > floor_of(name_of(file))
            and (part_of(name_of(file)), name) != ("durable", CRASH_POINTS)
        ),
    )


ROOMS = ("functions", "chat", "charging", "run", "filter")
"""The rooms of ``sk``, from the bottom."""


def room_of(module: str) -> int:
    """Number the room of a module of ``sk`` from 1 on; 0 for what all rooms use."""
    room = [*module.split("."), ""][2]
    return ROOMS.index(room) + 1 if room in ROOMS else 0


def test_rooms_of_the_adapters_import_those_below() -> None:
    """No room of ``sk`` imports one above it."""
    check(
        "A module of sk imports only its own room, those below, and what all of them use (ROOMS):",
        (
            f"{name_of(file)} imports {name}"
            for file in in_parts("sk")
            for name in own(file)
            if part_of(name) == "sk" and room_of(name) > room_of(name_of(file))
        ),
    )


def test_the_core_imports_the_standard_library_alone() -> None:
    """The core knows nothing of pydantic, Semantic Kernel or the floors above it, nor of clocks, loops and logs."""
    allowed = sys.stdlib_module_names - NO_BUSINESS_OF_THE_CORE
    check(
        "The core is pure: it imports itself and what computes, of the standard library alone:",
        (
            f"{name_of(file)} imports {name}"
            for file in in_parts("core")
            for name in imports_of(file)
            if part_of(name) != "core" and name.split(".")[0] not in allowed
        ),
    )


def test_the_lower_floors_do_not_name_semantic_kernel() -> None:
    """Only the adapters, the test tools and what stands on them may import Semantic Kernel."""
    check(
        "Semantic Kernel is imported by the adapters and what stands on them:",
        (
            f"{name_of(file)} imports {name}"
            for file in in_parts(*FREE_OF_SEMANTIC_KERNEL)
            for name in imports_of(file)
            if name.split(".")[0] == "semantic_kernel"
        ),
    )


IMPORT_WITHOUT_SEMANTIC_KERNEL = """
import importlib, json, sys
sys.modules["semantic_kernel"] = None  # so that an import of it, or of anything in it, fails
failed = []
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception as error:
        failed.append(f"{name}: {error!r}")
print(json.dumps(failed))
"""


def test_the_lower_floors_can_be_imported_without_semantic_kernel() -> None:
    """Core, approval, engine and stores work in a process in which Semantic Kernel cannot be imported in any way."""
    modules = [name_of(file) for file in in_parts(*FREE_OF_SEMANTIC_KERNEL)]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_SEMANTIC_KERNEL],
        input=json.dumps(modules),
        capture_output=True,
        text=True,
        check=True,
    )
    check(
        "These modules cannot be imported where Semantic Kernel is missing:",
        json.loads(done.stdout),
    )


LOADED_BY_THE_PLANNER = """
import json, sys
from planner_ext import FunctionCallingStepwisePlanner
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "planner_ext")))
"""


@cache
def loaded_by_the_planner() -> tuple[str, ...]:
    """List the modules of the package in a process that has imported the planner, and nothing else of the package."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED_BY_THE_PLANNER],
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(json.loads(done.stdout))


LOOP = ("", "core", "approval", "engine", "sk", "planner")
"""The parts of the package that the planner may load: neither stores nor pages, neither tools nor the other doors."""
BESIDE_THE_LOOP = {
    "approval.policy": "only for a policy",
    "approval.record": "only to list a run's decisions",
    "core.results": "only where results are limited",
    "engine.activation": "only for a run from a store",
    "engine.background": "only where code that is not async waits",
    "engine.fork": "only to fork a run",
    "engine.review": "only where something decides calls",
    "engine.shared": "only for shared budgets",
    "engine.telemetry": "only where somebody traces",
    "engine.timeline": "only to show a run",
    "sk.filter.approval_filter": "only for a kernel that has one",
    "sk.chat.openai": "only for OpenAI's connectors",
    "sk.chat.clarifier": "only where a model answers questions",
    "sk.chat.resumed": "only for the history of a resumed run",
    "sk.chat.rewritten": "only for connectors that take messages otherwise",
    "planner.kept": "only for a run from a store",
    "sk.charging.again": "only where a function is called again",
    "sk.charging.view": "only where a function asks a model",
    "sk.chat.faults": "only where a request fails",
    "sk.run.form": "only where an answer has a form",
    "sk.run.inside": "only to decide in a run inside another one",
    "sk.run.resume": "only to resume or cancel, or after a fault",
    "sk.run.returned": "only for the service and agents",
    "sk.run.service": "only for the service",
    "sk.filter.waiting_results": "only for the approval filter",
}
"""What a run needs where a feature is used, and imports then."""
MOST_MODULES = 60
MOST_TOKENS = 94_500
"""What importing the planner may load; tokens are counted without comments and docstrings."""


def test_importing_the_planner_loads_the_loop_only() -> None:
    """An application that only runs the planner loads what every run needs; a feature loads the rest when used."""
    loaded = loaded_by_the_planner()
    beside = {f"planner_ext.{name}" for name in BESIDE_THE_LOOP}
    check(
        "The planner loads the loop only:",
        (name for name in loaded if part_of(name) not in LOOP or name in beside),
    )
    check(
        "These are loaded with a feature, and do not exist:",
        sorted(filterfalse(is_module, beside)),
    )


def test_importing_the_planner_loads_little() -> None:
    """The loop has a size that can be read: so many modules, and so many tokens of code."""
    loaded = loaded_by_the_planner()
    assert len(loaded) <= MOST_MODULES
    if sys.version_info < (3, 12):  # since then an f-string is many tokens
        assert (
            sum(tokens_of(file) for file in FILES if name_of(file) in loaded)
            <= MOST_TOKENS
        )


WITHOUT_MEANING = {
    *(
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
    ),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def tokens_of(file: Path) -> int:
    """Count a file's tokens of code, without docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        node.body[0]
        for node in ast.walk(tree_of(file))
        if isinstance(node, documented)
        and ast.get_docstring(node, clean=False) is not None
    ]
    skipped = {
        line
        for one in docstrings
        for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)
    }
    with file.open("rb") as source:
        tokens = list(tokenize.tokenize(source.readline))
    return sum(
        token.type not in WITHOUT_MEANING and token.start[0] not in skipped
        for token in tokens
    )


def test_production_code_does_not_import_test_tools() -> None:
    """What runs in an application does not pull in scripted services, but for the crash points of the stores."""
    check(
        "Scripted services are for tests, the comparison and the demonstration:",
        (
            f"{name_of(file)} imports {name}"
            for file in FILES
            for name in own(file)
            if part_of(name) == "testing"
            and part_of(name_of(file)) not in MAY_SCRIPT
            and (part_of(name_of(file)), name) != ("durable", CRASH_POINTS)
        ),
    )


def test_the_root_shows_doors_alone() -> None:
    """The root only passes names on, when they are asked for, of nothing above the doors, sorted, each of them once."""
    file = PACKAGE / "__init__.py"
    ours = [name for name in imports_of(file) if name not in ("importlib", "typing")]
    check(
        "The root passes on names of the doors and of what is below them:",
        (
            name
            for name in ours
            if floor_of(name) > DOORS or not name.startswith("planner_ext.")
        ),
    )
    functions = [
        node.name for node in tree_of(file).body if isinstance(node, ast.FunctionDef)
    ]
    assert functions == ["__getattr__"]
    exported = exported_by(file)
    assert exported is not None
    assert exported == sorted(set(exported))


def test_no_modules_import_each_other_in_a_circle() -> None:
    """The modules can be put in an order in which each needs those before it alone, for its types, too."""
    waiting = {name_of(file): set(own(file)) - {name_of(file)} for file in FILES}
    while ready := [
        name for name, needs in waiting.items() if not needs & waiting.keys()
    ]:
        for name in ready:
            del waiting[name]
    circle = (
        f"{name} imports {', '.join(sorted(needs & waiting.keys()))}"
        for name, needs in waiting.items()
    )
    check("These modules import each other, or such as do:", circle)


def test_no_module_imports_another_by_a_text() -> None:
    """No module imports another by its name as text; only an ``__init__`` does."""
    check(
        "These import a module of the package by a text:",
        (
            f"{name_of(file)}:{node.lineno}"
            for file in FILES
            if file.name != "__init__.py"
            for node in ast.walk(tree_of(file))
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
            and "planner_ext" in ast.unparse(node)
        ),
    )


def test_the_modules_that_users_import_say_what_they_export() -> None:
    """Each of them has an ``__all__``, which names what is in it, once each; no other module has one."""
    broken: list[str] = []
    for file in FILES:
        name, exported = name_of(file), exported_by(file)
        if (exported is None) is (name in MODULES):
            broken.append(f"{name} has {'none' if name in MODULES else 'one'}")
        for each in set(exported or ()):
            if (exported or []).count(each) > 1:
                broken.append(f"{name} names {each} twice")
            if each not in names_in(tree_of(file).body):
                broken.append(f"{name} names {each}, which is not there")
    check(
        "The modules that users import, and they alone, have an __all__ of what is in them:",
        broken,
    )


def test_a_module_says_what_it_promises() -> None:
    """Each module opens with a docstring."""
    check(
        "Each module opens with a docstring:",
        (name_of(file) for file in FILES if not ast.get_docstring(tree_of(file))),
    )


def test_the_map_names_what_is_there() -> None:
    """Each file and each name in the map of the code, the docstring of the core, is there."""
    text = ast.get_docstring(tree_of(PACKAGE / "core" / "__init__.py")) or ""
    where = text.partition("Where is what")[2].partition("Glossary")[0]
    files = re.findall(r"``([a-z_/]+\.py)``", where)
    there = [PACKAGE / file for file in files if not file.startswith("tests/")]
    check(
        "The map names these files, which do not exist:",
        (str(file) for file in there if not file.is_file()),
    )
    sources = "\n".join(file.read_text("utf-8") for file in FILES)
    names = {name.rpartition(".")[2] for name in re.findall(r"(?<!`)`([\w.]+)`", where)}
    check(
        "The map names these, which no module defines:",
        (
            name
            for name in sorted(names)
            if not re.search(
                rf"^ *(async def|def|class) {name}\b", sources, re.MULTILINE
            )
        ),
    )


def test_the_floors_are_those_of_the_tree() -> None:
    """The names in the floor plan are names of the package."""
    standing = {part_of(name_of(file)) for file in FILES}
    check(
        "These have a floor in FLOORS, or are free of Semantic Kernel, and do not exist:",
        (sorted({*FLOORS, *FREE_OF_SEMANTIC_KERNEL, *MAY_SCRIPT} - standing)),
    )


def exported_by(file: Path) -> list[str] | None:
    """Read a module's ``__all__``, or None."""
    for node in tree_of(file).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Name) and one.id == "__all__" for one in targets
        ):
            return list(ast.literal_eval(node.value))
    return None


def names_in(body: list[ast.stmt]) -> set[str]:
    """List the names that a module's top level binds, also under an if or a try."""
    found: set[str] = set()
    for node in body:
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {
                    target.id for target in targets if isinstance(target, ast.Name)
                }
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in names}
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                found |= names_in(inner) | names_in(other)
            case _:
                pass
    return found
