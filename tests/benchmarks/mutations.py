"""How many small defects in ``planner_ext/core`` its tests find: a mutation score.

    python tests/benchmarks/mutations.py --sample 60

Each mutation changes one place in a temporary copy: a comparison, ``and`` and ``or``, a 1 that is added or subtracted,
a ``not``, a returned value. The tests of the core must then fail. A mutation that they do not notice survives: it is a
promise without a test, or a change without an effect.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "-m", "fast", "tests/core"]
PAIRS: list[tuple[type[Any], type[Any]]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub)),
]
SWAPS = dict(PAIRS) | {second: first for first, second in PAIRS}


def mutations(tree: ast.AST) -> Iterator[tuple[Any, str, Any]]:
    """List what can be changed in a module: the node, its field, and the new value of the field."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[operator, *more]) if type(operator) in SWAPS:
                yield node, "ops", [SWAPS[type(operator)](), *more]
            case ast.BoolOp(op=operator) | ast.BinOp(op=ast.Add() | ast.Sub() as operator, right=ast.Constant(value=1)):
                yield node, "op", SWAPS[type(operator)]()
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, "operand", ast.UnaryOp(op=ast.Not(), operand=operand)
            case ast.Return(value=ast.expr()):
                yield node, "value", ast.Constant(value=None)


def passes(folder: str) -> bool:
    """Run the tests on the copy; a mutation that never ends is noticed."""
    environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return not subprocess.run(PYTEST, cwd=folder, env=environment, capture_output=True, timeout=300).returncode
    except subprocess.TimeoutExpired:
        return False


def main() -> None:
    """Mutate, test and print each mutation with the score so far."""
    parser = argparse.ArgumentParser(description="Print the mutation score of planner_ext/core.")
    parser.add_argument("--sample", type=int, default=60, help="how many mutations, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    options, killed = parser.parse_args(), 0
    sources = {file: file.read_text() for file in sorted((ROOT / "planner_ext/core").glob("*.py"))}
    places = [(file, at) for file, text in sources.items() for at, _ in enumerate(mutations(ast.parse(text)))]
    with TemporaryDirectory() as folder:
        for part in ("planner_ext", "tests", "adr", "pyproject.toml"):
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, Path(folder, part))
        assert passes(folder), "the tests fail on the code as it is"
        drawn = random.Random(options.seed).sample(places, min(options.sample, len(places)))
        for done, (file, at) in enumerate(drawn, 1):
            tree, copy = ast.parse(sources[file]), Path(folder, file.relative_to(ROOT))
            node, field, value = list(mutations(tree))[at]
            place = f"{file.name}:{node.lineno}: {ast.unparse(node)}"
            setattr(node, field, value)
            copy.write_text(ast.unparse(tree))
            survived = passes(folder)
            copy.write_text(sources[file])
            killed += not survived
            print(f"{killed}/{done} {'SURVIVED' if survived else 'killed'} {place} -> {ast.unparse(node)}", flush=True)


if __name__ == "__main__":
    main()
