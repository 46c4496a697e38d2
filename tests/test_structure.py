"""The tree: imports only point down, every module says what it exports, no file is too long."""

import ast
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

SPEC = find_spec("planner_ext")
assert SPEC is not None
assert SPEC.submodule_search_locations
PACKAGE = Path(SPEC.submodule_search_locations[0])
LINES_OF_CODE = 400

FLOORS: dict[str, float] = {
    "core": 0,
    "approval": 1,
    "engine": 2,
    "sk": 3,
    "durable": 3.5,
    "testing": 3.5,
    "compare": 5,
    "cli": 6,
    "inbox": 6,
}
"""The floor of each folder; every other module of the root is a door."""
DOORS = 4.0
ROOF = 4.5
"""The root passes on names of the doors and of what is below; whoever stands above may use it."""
FREE_OF_SEMANTIC_KERNEL = ("core", "approval", "engine", "durable")

MAY_SCRIPT = ("testing", "compare", "cli")
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
def imports_of(file: Path, *, of_types: bool = True) -> tuple[str, ...]:
    """List the modules that a file imports, anywhere in it; those imported for type checkers alone on request."""
    found: list[str] = []
    package = name_of(file).split(".") if file.name == "__init__.py" else name_of(file).split(".")[:-1]
    tree = ast.parse(file.read_text("utf-8"))
    left_out = set() if of_types else _for_types(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in left_out:
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node not in left_out:
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            named = [f"{source}.{alias.name}" for alias in node.names]
            found += [name if is_module(name) else source for name in named]
    return tuple(dict.fromkeys(found))


def _for_types(tree: ast.Module) -> set[ast.AST]:
    """Collect what stands under ``if TYPE_CHECKING``."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def is_module(name: str) -> bool:
    """Whether a dotted name is a module of this package."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    return name.startswith("planner_ext.") and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def own(file: Path, *, of_types: bool = True) -> list[str]:
    """List what a file imports of this package."""
    imports = imports_of(file, of_types=of_types)
    return [name for name in imports if name == "planner_ext" or name.startswith("planner_ext.")]


def label(file: Path) -> str:
    """Name a test after its file."""
    return str(file.relative_to(PACKAGE))


every_file = pytest.mark.parametrize("file", FILES, ids=label)


def in_part(*parts: str) -> list[Path]:
    """List the files of some folders and root modules; those that do not exist yet have none."""
    return [file for file in FILES if part_of(name_of(file)) in parts]


@every_file
def test_imports_point_down(file: Path) -> None:
    """No module imports one of a higher floor."""
    floor = floor_of(name_of(file))
    assert [name for name in own(file) if floor_of(name) > floor] == []


@pytest.mark.parametrize("file", in_part("core"), ids=label)
def test_the_core_imports_the_standard_library_alone(file: Path) -> None:
    """The core knows nothing of pydantic, Semantic Kernel or the floors above it, nor of clocks, loops and logs."""
    foreign = {"asyncio", "logging", "time", "uuid", "random", "secrets", "threading", "io", "os", "socket"}
    for name in imports_of(file):
        root = name.split(".")[0]
        assert name.startswith("planner_ext.core") or (root in sys.stdlib_module_names and root not in foreign), name


@pytest.mark.parametrize("file", in_part(*FREE_OF_SEMANTIC_KERNEL), ids=label)
def test_semantic_kernel_is_known_above_the_engine_alone(file: Path) -> None:
    """Only the kernel's folder, the test tools and what stands on them may import Semantic Kernel."""
    assert [name for name in imports_of(file) if name.split(".")[0] == "semantic_kernel"] == []


@pytest.mark.parametrize("file", [file for file in FILES if part_of(name_of(file)) not in MAY_SCRIPT], ids=label)
def test_production_code_does_not_import_test_tools(file: Path) -> None:
    """What runs in an application does not pull in scripted services, but for the crash points of the stores."""
    allowed = "planner_ext.testing.crash" if part_of(name_of(file)) == "durable" else "nothing"
    assert [n for n in own(file) if part_of(n) == "testing" and not n.startswith(allowed)] == []


@pytest.mark.parametrize("file", [PACKAGE / "__init__.py"] if (PACKAGE / "__init__.py").is_file() else [], ids=label)
def test_the_root_shows_doors_alone(file: Path) -> None:
    """The root only passes names on, when they are asked for, of nothing above the doors, sorted, each of them once."""
    ours = [name for name in imports_of(file) if name not in ("importlib", "typing")]
    assert [name for name in ours if floor_of(name) > DOORS or not name.startswith("planner_ext.")] == []
    functions = [node.name for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    assert functions == ["__getattr__", "__dir__"]
    exported = _exported(file)
    assert exported is not None
    assert exported == sorted(set(exported))


def test_no_modules_import_each_other_in_a_circle() -> None:
    """The modules can be put in an order in which each runs after those that it imports; types may look back."""
    waiting = {name_of(file): set(own(file, of_types=False)) for file in FILES}
    while ready := [name for name, needs in waiting.items() if not needs & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert waiting == {}


@every_file
def test_a_module_says_what_it_exports(file: Path) -> None:
    """Each module with code has an ``__all__``, which names what is in it, once each."""
    body = ast.parse(file.read_text("utf-8")).body
    code = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if file.name == "__main__.py" or (file.name == "__init__.py" and not code):
        return
    exported = _exported(file)
    assert exported is not None, f"{label(file)} has no __all__"
    assert len(exported) == len(set(exported))
    assert set(exported) <= _names(body)


@every_file
def test_a_module_says_what_it_promises(file: Path) -> None:
    """Each module opens with a docstring."""
    assert ast.get_docstring(ast.parse(file.read_text("utf-8")))


@every_file
def test_a_file_can_be_held_in_mind(file: Path) -> None:
    """No file has more than 400 lines of code: blank lines, comments and docstrings do not count."""
    text = file.read_text("utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    code = [line for number, line in lines if line and number not in documented and not line.startswith("#")]
    assert len(code) <= LINES_OF_CODE


def test_the_floors_are_those_of_the_tree() -> None:
    """The names in the floor plan are names of the package, or of what is still to come."""
    to_come = {"inbox"}
    standing = {part_of(name_of(file)) for file in FILES}
    assert set(FLOORS) - to_come <= standing


def _exported(file: Path) -> list[str] | None:
    for node in ast.parse(file.read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))
    return None


def _names(body: list[ast.stmt]) -> set[str]:
    """List the names that a module's top level binds, also under an if or a try."""
    found: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in names}
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                found |= _names(inner) | _names(other)
            case _:
                pass
    return found
