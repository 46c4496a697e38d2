"""Loops of other frameworks: programs, each with an environment of its own.

An adapter is one file with inline script metadata (PEP 723), which also name the
package whose version is shown, and what it offers beyond a budget of round trips:

    # /// script
    # dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
    # [tool.planner-ext]
    # name = "pydantic-ai"
    # short = "pyd. ai"
    # package = "pydantic-ai-slim"
    # offers = ["tool calls", "approval"]
    # ///

The program does as `planner_ext.compare.life`; see ``samples/peers``.
"""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner_ext.compare.report import OptionInfo
from planner_ext.compare.trial import Option
from planner_ext.sk.errors import PlannerInvalidConfigurationError

_METADATA = re.compile(r"^# /// script$\n(?P<lines>(?:^#(?: .*)?$\n)+?)^# ///$", re.M)


def peer_options(names: list[str], *, tell: Callable[[str], object]) -> list[Option]:
    """Make options of adapters, with an environment for each.

    Args:
        names: Adapters in ``samples/peers``, ``all`` of them, or your own files.
        tell: Called before an environment is made, which takes a while.

    Raises:
        PlannerInvalidConfigurationError: If an adapter is unknown, or its environment
            cannot be made.
    """
    known = adapters()
    files: list[Path] = []
    for name in names:
        if name == "all":
            files += known.values()
        elif name in known or Path(name).is_file():
            files.append(known.get(name) or Path(name))
        else:
            raise PlannerInvalidConfigurationError(
                f"--peer {name}: there is neither such a file nor such an adapter; there are "
                f"{', '.join(['all', *known])} (adapters are found in ./samples/peers and beside the package)."
            )
    return [_option(file, tell) for file in files]


def adapters() -> dict[str, Path]:
    """Find the adapters that come with the repository, by name."""
    for folder in (
        Path("samples/peers"),
        Path(__file__).parents[2] / "samples" / "peers",
    ):
        files = [
            file
            for file in sorted(folder.glob("*.py"))
            if _METADATA.search(file.read_text("utf-8"))
        ]
        if files:
            return {
                metadata_of(file)["tool"]["planner-ext"]["name"].replace(" ", "-"): file
                for file in files
            }
    return {}


def metadata_of(file: Path) -> dict[str, Any]:
    """Read an adapter's script metadata.

    Raises:
        PlannerInvalidConfigurationError: If it has none, or they lack an entry.
    """
    found = _METADATA.search(file.read_text("utf-8"))
    lines = found["lines"].splitlines() if found else []
    try:
        metadata = tomllib.loads(
            "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
        )
        _ = metadata["dependencies"], metadata["tool"]["planner-ext"]["name"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        problem = f"--peer {file}: expected script metadata with dependencies and [tool.planner-ext] name; {error}"
        raise PlannerInvalidConfigurationError(problem) from error
    return metadata


def _option(file: Path, tell: Callable[[str], object]) -> Option:
    metadata = metadata_of(file)
    said = metadata["tool"]["planner-ext"]
    python = _environment(said["name"], metadata["dependencies"], tell)
    version = ""
    if package := said.get("package"):
        ask = f"from importlib.metadata import version; print(version({package!r}))"
        done = subprocess.run(  # noqa: S603  (made here)
            [python, "-c", ask], capture_output=True, text=True, check=True
        )
        version = done.stdout.strip()
    code = file.read_text("utf-8")
    _, _, rest = code.partition('"""')
    doc, _, _ = rest.partition('"""')
    summary, _, _ = doc.partition("\n")
    info = OptionInfo(
        key=said["name"].replace(" ", "-"),
        name=f"{said['name']} {version}".strip(),
        short=said.get("short", said["name"]),
        about=summary.replace("`", ""),
        corrected=False,
        offers=tuple(said.get("offers", ())),
        code=code,
    )
    return Option(info, None, (str(python), str(file.resolve())))


def _environment(
    name: str, dependencies: list[str], tell: Callable[[str], object]
) -> Path:
    """Make an environment unless it is there; return its interpreter."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    needs = "\n".join([sys.version, *sorted(dependencies)])
    digest = hashlib.sha256(needs.encode()).hexdigest()
    key = f"{name.replace(' ', '-')}-{digest[:12]}"
    folder = cache / "planner-ext" / "peers" / key
    python = folder / "bin" / "python"
    made = folder / "made"
    if not made.exists():
        tell(f"Makes an environment for {name} in {folder}.")
        steps = (
            [sys.executable, "-m", "venv", "--clear", folder],
            [python, "-m", "pip", "install", "-q", *dependencies],
        )
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False)  # noqa: S603  (as the caller asked)
            if done.returncode:
                problem = f"--peer {name}: no environment could be made: {done.stderr.strip()[-600:]}"
                raise PlannerInvalidConfigurationError(problem)
        made.touch()
    return python
