"""Checkpoints: a run's journal as JSON text, signed on request, from which the run is resumed.

The planner, service or handler that resumes one remembers its decisions. Other objects
and processes do not: a run store does.
"""

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from planner_ext.approval.decisions import InvalidDecisionError
from planner_ext.core.errors import (
    InvalidJournalError,
    InvalidLimitError,
    UnusableCheckpointError,
    reading,
)
from planner_ext.core.facts import CallStarted, Fact, RunStarted, unwrapped
from planner_ext.core.fold import fold
from planner_ext.core.state import Phase, State
from planner_ext.engine.document import (
    check_signature,
    document_of,
    dump_facts,
    load_facts,
    messages_of,
    read_document,
)
from planner_ext.engine.engine import Engine
from planner_ext.sk.messages import load_message


class SharedByCopies:
    """A value that copies of its owner share; pickling drops its content."""

    def __deepcopy__(self, memo: object = None) -> Self:
        return self

    __copy__ = __deepcopy__

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return type(self), ()


class SigningKey(SharedByCopies, bytes):
    """A key that signs checkpoints; printing hides it, pickling drops it."""

    @classmethod
    def of(cls, key: object, name: str = "checkpoint_key") -> "SigningKey | None":
        """Read the key given for an option; None signs nothing."""
        if key is None or isinstance(key, SigningKey):
            return key
        if not isinstance(key, bytes) or not key:
            shown_kind = "b''" if key == b"" else type(key).__name__
            raise InvalidLimitError(
                f"{name} must be bytes, at least one, or None for no signature; got {shown_kind}."
            )
        return cls(key)

    def __repr__(self) -> str:
        return "SigningKey(...)"

    __str__ = __repr__

    def checked(self) -> Self:
        """Return the key; refuse one that pickling has dropped."""
        if not self:
            raise InvalidLimitError(
                "The checkpoint_key is missing: a key is left behind where its object is pickled. Set it again."
            )
        return self


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """A run's journal, with its messages and budget, and never the application's arguments.

    A planner, service or handler with a ``checkpoint_key`` signs its checkpoints and
    refuses every other; one made of facts is unsigned. Anyone who can write an unsigned
    one can put an approval in it: without a key, keep checkpoints where only approvers
    can write.
    """

    facts: tuple[Fact, ...]
    _signature: str | None = field(default=None, kw_only=True, compare=False)
    _stays_signed: bool = field(default=False, kw_only=True, compare=False)

    def __repr__(self) -> str:
        return f"Checkpoint(run_id={self.run_id!r}, {len(self.facts)} facts)"  # short, and without the conversation

    @classmethod
    def of_run(cls, facts: Sequence[Fact], key: SigningKey | None) -> Self:
        """@private Build the checkpoint that a door returns."""
        return cls.signed_as(facts, journal_signature(facts, key))

    @classmethod
    def signed_as(cls, facts: Sequence[Fact], signature: str | None) -> Self:
        """@private Make a checkpoint with the signature that its facts had."""
        return cls(
            tuple(facts), _signature=signature, _stays_signed=signature is not None
        )

    def verified(self, key: SigningKey | None) -> Self:
        """@private Return this checkpoint, if the key signed it and nothing was altered; None checks nothing.

        Raises:
            InvalidCheckpointError: If it is unsigned, altered, or signed with another
                key.
        """
        if key is not None:
            document = {**_document(self.facts), "signature": self._signature}
            try:
                check_signature(document, "checkpoint", key.checked())
            except InvalidJournalError as error:
                raise UnusableCheckpointError(str(error)) from error
        return self

    @property
    def run_id(self) -> str:
        """The id of its run."""
        return next(
            (fact.run_id for fact in self.facts if isinstance(fact, RunStarted)), ""
        )

    @property
    def is_signed(self) -> bool:
        """Whether it has a signature, which need not be the right one."""
        return self._signature is not None

    def state(self) -> State:
        """@private Fold the facts.

        Raises:
            InvalidCheckpointError: If they do not make a run.
        """
        with reading(
            "Expected the journal of a run; its facts contradict each other, it is",
            UnusableCheckpointError,
        ):
            return fold(self.facts)

    def to_json(self, key: bytes | None = None) -> str:
        """Write the checkpoint as JSON text.

        Args:
            key: Signs the text (HMAC-SHA256). None keeps the door's signature, if there
                is one.

        Raises:
            PlannerInvalidConfigurationError: If the key is not bytes, or empty.
        """
        signing = SigningKey.of(key, "key")
        document = _document(self.facts, signing)
        if signing is None and self._stays_signed:
            document["signature"] = self._signature
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, key: bytes | None = None) -> Self:
        """Read what `to_json` wrote.

        Args:
            text: The JSON text.
            key: Refuses text that it has not signed. None leaves that to the door that
                resumes it.

        Raises:
            InvalidCheckpointError: If the text is damaged, refused by its signature,
                has an unknown key or one twice, or is newer than this version reads.
            PlannerInvalidConfigurationError: If the key is not bytes, or empty.
        """
        signing = SigningKey.of(key, "key")
        try:
            document = read_document(
                text,
                "checkpoint",
                ("facts",),
                key=None if signing is None else signing.checked(),
            )
            facts = load_facts(document["facts"])
        except InvalidJournalError as error:
            hint = (
                ""
                if "{" in text
                else " Give the text itself; of a file: Path(name).read_text()."
            )
            raise UnusableCheckpointError(f"{error}{hint}") from error
        signature = document.get("signature")
        # Signs the facts as they were read: their JSON may be written in another way.
        if signing is not None:
            signature = journal_signature(facts, signing)
        return cls(
            facts, _signature=signature if isinstance(signature, str) else None
        ).checked()

    def checked(self) -> Self:
        """@private Return this checkpoint, if its facts make a run and its messages can be read.

        Raises:
            InvalidCheckpointError: Naming what is wrong.
        """
        if self.state().phase is Phase.NEW:
            raise UnusableCheckpointError(
                "Expected the journal of a run; this one has no facts."
            )
        for fact in self.facts:
            with reading(
                f"Expected messages of Semantic Kernel; one in {fact.type} is",
                UnusableCheckpointError,
            ):
                for message in messages_of(fact):
                    load_message(message)
        return self


def journal_signature(facts: Sequence[Fact], key: SigningKey | None) -> str | None:
    """Sign a journal; None without a key."""
    if key is None:
        return None
    return str(_document(facts, key)["signature"])


def _document(
    facts: Sequence[Fact], key: SigningKey | None = None
) -> dict[str, object]:
    signing = None if key is None else key.checked()
    return document_of("checkpoint", signing, facts=dump_facts(facts))


_REMEMBERED = 100_000
"""The newest decisions that one object remembers; some 15 MB."""


class DecisionsTaken(SharedByCopies):
    """The decisions that one object and its copies took; pickling drops them."""

    def __init__(self) -> None:
        self._takings: dict[bytes, object] = {}

    def take(self, name: bytes, by: object) -> bool:
        """Take one decision atomically; False if another resume has taken it."""
        while len(self._takings) >= _REMEMBERED:
            self._takings.pop(next(iter(self._takings)), None)
        return self._takings.setdefault(name, by) is by

    def give_back(self, name: bytes, by: object) -> None:
        """Forget a decision that this resume has taken."""
        if self._takings.get(name) is by:
            self._takings.pop(name, None)


@dataclass(frozen=True, slots=True)
class Taking:
    """The decisions of one resume, which the resumed object remembers.

    Attributes:
        calls: Call ids, by the name under which a decision is remembered.
    """

    taken: Sequence[DecisionsTaken]
    calls: dict[bytes, str] = field(default_factory=dict[bytes, str])
    _resume: object = field(default_factory=object, init=False)

    def take(self) -> None:
        """Take all decisions, or none; refuse them if one was taken before."""
        self._take(self.calls)

    def add(self, calls: Mapping[bytes, str]) -> None:
        """Take more decisions, or none of these."""
        more = {name: calls[name] for name in calls if name not in self.calls}
        self._take(more)
        self.calls.update(more)

    def _take(self, calls: Mapping[bytes, str]) -> None:
        for memory in self.taken:
            for name, call_id in calls.items():
                if not memory.take(name, self._resume):
                    self._give_back(calls)
                    raise InvalidDecisionError(
                        f"The call {call_id!r} was decided before: this object has taken a decision on it already, in "
                        "an earlier resume of this checkpoint or one that still runs. Nothing was run again. Resume "
                        "the checkpoint of that resume's result or error.",
                        call_id=call_id,
                    )

    @contextmanager
    def reserve(self, engine: Engine) -> Generator[None]:
        """As `take`; release the decisions if the block fails before it starts a function."""
        known = len(engine.facts)
        self.take()
        try:
            yield
        except BaseException:
            new = map(unwrapped, engine.facts[known:])
            if not any(isinstance(fact, CallStarted) for fact in new):
                self._give_back(self.calls)
            raise

    def _give_back(self, calls: Iterable[bytes]) -> None:
        for memory in self.taken:
            for name in calls:
                memory.give_back(name, self._resume)
