"""A run as JSON text: what an approver's answer, a larger budget or another process resumes."""

import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Any, Self, cast

from pydantic import ValidationError
from semantic_kernel.exceptions import ContentException

from planner_ext.core.errors import IllegalTransitionError, InvalidJournalError
from planner_ext.core.facts import Fact, RunStarted
from planner_ext.core.fold import fold
from planner_ext.core.state import Phase, State
from planner_ext.journal import SCHEMA, check_schema, dump_facts, load_facts, messages_of
from planner_ext.kernel.errors import PlannerException, PlannerInvalidConfigurationError
from planner_ext.kernel.messages import dump_message, load_message

__all__ = ["Checkpoint", "InvalidCheckpointError"]


class InvalidCheckpointError(PlannerException, InvalidJournalError):
    """A checkpoint is truncated, altered, unsigned, wrongly signed, or newer than this package; nothing was run."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run's journal. It holds the run's messages and its budget, and never the application's arguments.

    Attributes:
        facts: The journal's facts.
    """

    facts: tuple[Fact, ...]

    @property
    def run_id(self) -> str:
        """The run it is of."""
        return next((fact.run_id for fact in self.facts if isinstance(fact, RunStarted)), "")

    def state(self) -> State:
        """Fold the facts.

        Raises:
            InvalidCheckpointError: If they do not make a run.
        """
        try:
            return fold(self.facts)
        except (IllegalTransitionError, IndexError) as error:
            raise InvalidCheckpointError(f"Expected the journal of a run; its facts contradict: {error}") from error

    def to_json(self, key: bytes | None = None) -> str:
        """Write the checkpoint as JSON text.

        Args:
            key: Signs the text (HMAC-SHA256), so that `from_json` with the same key refuses any other. None signs not.

        Raises:
            PlannerInvalidConfigurationError: If the key is none.
        """
        _check_key(key)
        data: dict[str, Any] = {"schema": SCHEMA, "facts": dump_facts(self.facts, dump_message)}
        if key is not None:
            data["signature"] = _sign(data, key)
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, key: bytes | None = None) -> Self:
        """Read a checkpoint.

        Args:
            text: What `to_json` wrote.
            key: With a key, text that is unsigned, or signed with another one, is refused. Without, a signature is not
                looked at.

        Raises:
            InvalidCheckpointError: If the text is none of ours, damaged, refused by its signature, or newer than this
                version reads.
            PlannerInvalidConfigurationError: If the key is none.
        """
        _check_key(key)
        try:
            data: object = json.loads(text)
        except (ValueError, RecursionError, TypeError) as error:
            raise InvalidCheckpointError(f"Expected a checkpoint as JSON text; this is not JSON: {error}.") from error
        if not isinstance(data, dict) or not {"schema", "facts"} <= cast("dict[str, object]", data).keys():
            raise InvalidCheckpointError("Expected a checkpoint: a JSON object with the keys schema and facts.")
        return cls._of(cast("dict[str, object]", data), key)

    @classmethod
    def _of(cls, data: dict[str, object], key: bytes | None) -> Self:
        signature = data.pop("signature", None)
        if key is not None and not _signed(data, signature, key):
            raise InvalidCheckpointError(
                "Expected a checkpoint signed with this key; it is unsigned, altered or signed with another one. "
                "Read it with the key that it was written with."
            )
        try:
            check_schema(data["schema"])
            checkpoint = cls(load_facts(data["facts"]))
        except InvalidJournalError as error:
            raise InvalidCheckpointError(str(error)) from error
        return checkpoint.checked()

    def checked(self) -> Self:
        """Return this checkpoint, if its facts are those of a run and its messages can be read.

        Raises:
            InvalidCheckpointError: Naming what is wrong.
        """
        if self.state().phase is Phase.NEW:
            raise InvalidCheckpointError("Expected the journal of a run; this one has no facts.")
        self._check_messages()
        return self

    def _check_messages(self) -> None:
        for fact in self.facts:
            for message in messages_of(fact):
                try:
                    load_message(message)
                except (ValidationError, TypeError, ValueError, ContentException) as error:
                    raise InvalidCheckpointError(
                        f"Expected messages of Semantic Kernel; one in {fact.type} cannot be read: {error}"
                    ) from error


def _check_key(key: object) -> None:
    """Refuse a key that would protect nothing; the error does not show it."""
    if key is not None and not (isinstance(key, bytes) and key):
        raise PlannerInvalidConfigurationError(
            f"key must be bytes, at least one, or None for no signature; got {type(key).__name__}."
        )


def _sign(data: dict[str, Any], key: bytes) -> str:
    text = json.dumps({"schema": data["schema"], "facts": data["facts"]}, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode("ascii"), hashlib.sha256).hexdigest()


def _signed(data: dict[str, object], signature: object, key: bytes) -> bool:
    if not isinstance(signature, str):
        return False
    return hmac.compare_digest(_sign(data, key).encode(), signature.encode(errors="replace"))
