"""How a person edits arguments: by ``NAME=VALUE``, as JSON, or a value in an editor."""

import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from planner_ext.cli.options import value_of
from planner_ext.core.errors import shown
from planner_ext.engine.schemas import read_json
from planner_ext.readable.text import is_shown_whole


def editor() -> str:
    """Return the editor's command, from ``VISUAL`` or ``EDITOR``; "" without one."""
    return os.environ.get("VISUAL") or os.environ.get("EDITOR", "")


def edited_value(value: Any) -> Any:
    """Let a person edit a value.

    A text with characters that an editor would not show is edited as JSON.

    Raises:
        ValueError: If the editor fails, or what is saved is not of this kind.
    """
    if isinstance(value, str) and is_shown_whole(value):
        return _edited(value)
    return read_json(_saved(json.dumps(value, indent=2), ".json"))


def edited_object(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Let a person edit all arguments as JSON.

    Raises:
        ValueError: If the editor fails, or what is saved is no JSON object.
    """
    edited: object = edited_value(dict(arguments))
    if not isinstance(edited, dict):
        raise ValueError("is no JSON object")
    return cast("dict[str, Any]", edited)


def changed_arguments(
    arguments: Mapping[str, Any], changes: Sequence[str]
) -> dict[str, Any]:
    """Apply ``NAME=VALUE`` to arguments, or replace them all by one JSON object.

    Text stays text: an order named 7 does not become a number.

    Raises:
        ValueError: If a change is neither, or the editor fails.
    """
    first, *more = changes
    if not more and first.lstrip().startswith("{"):
        try:
            return json.loads(first)
        except (ValueError, RecursionError) as error:
            problem = f"Expected the arguments as one JSON object: {error}. Quote it for the shell."
            raise ValueError(problem) from None
    changed = dict(arguments)
    for change in changes:
        if change in arguments and editor():
            changed[change] = _in_editor(arguments[change])
            continue
        name, sign, written = change.partition("=")
        if not sign or not name:
            raise ValueError(
                "Expected NAME=VALUE, such as amount=20, one JSON object with all arguments, or the NAME of one to "
                f"edit in the editor that EDITOR names; got {shown(change)}."
            )
        is_text = isinstance(arguments.get(name), str)
        changed[name] = written if is_text else value_of(written)
    return changed


def _in_editor(value: Any) -> Any:
    try:
        return edited_value(value)
    except ValueError as error:
        raise ValueError(f"The value {error}. Nothing was changed.") from None


def _edited(text: str) -> str:
    saved = _saved(text, ".txt")
    # An editor ends the last line; the text may have ended without.
    if text.endswith("\n"):
        return saved
    return saved.removesuffix("\n")


def _saved(text: str, extension: str) -> str:
    """Let the editor change a file, which is removed afterwards."""
    with TemporaryDirectory() as folder:
        file = Path(folder, f"argument{extension}")
        file.write_bytes(text.encode())
        command = [*shlex.split(editor()), str(file)]
        try:
            subprocess.run(command, check=True)  # noqa: S603  (the person's own)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(f"cannot be edited: {error}") from error
        saved = file.read_bytes().decode("utf-8-sig")
        return saved.replace("\r\n", "\n")
