"""Decisions: their types, the call that is decided, the digests that bind them, and their record."""

import hashlib
import json
import re
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import (
    Any,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    assert_never,
    cast,
    overload,
)

from planner_ext.core.errors import (
    InvalidLimitError,
    PlannerExtError,
    require,
    shown,
    suggests_names,
)
from planner_ext.core.facts import (
    CallDecided,
    Panel,
)
from planner_ext.core.marks import mark_on, markable, put_mark
from planner_ext.core.values import RequestedCall, frozen


class InvalidDecisionError(PlannerExtError):
    """A decision cannot be taken; names the call. No decision given with it was taken, nothing ran.

    Attributes:
        call_id: The call that it was given for; None if it names no call.
        changed: Whether the call would now get another value than was asked about. It
            then waits with that value and a new fingerprint.
    """

    def __init__(
        self, message: str, *, call_id: str | None = None, changed: bool = False
    ) -> None:
        super().__init__(message)
        self.call_id = call_id
        self.changed = changed


@suggests_names
@dataclass(frozen=True, slots=True)
class Approve:
    """Let the call run: this function, with these arguments, once.

    If a filter of the kernel changes the function, or an argument that the model could
    give, the call does not run, and the model reads so. A filter may fill parameters
    that are hidden from the model. The same holds for what a policy allows. A call that
    no interceptor decided may get other arguments, but no other function.

    Attributes:
        arguments: All arguments instead of the model's, as JSON values; copied and
            validated. None keeps the model's. The edited call is reviewed again. If a
            rule denies it, a person's decision is refused, and the call still waits. If
            another question or other persons are to be asked, it waits again with these
            arguments. If the same question is asked, this decision answers it. An
            ``approver`` whose edit is refused is asked once more; an interceptor's
            second, different edit denies the call.
        always: Give the same answer to the same question for the rest of the run: for
            every call of this ``"function"``, or only with these ``"arguments"``. The
            same question has the same roles and source: the policy's rule or default,
            the function's mark, or the interceptor with its prompt. None approves this
            call alone, as is needed once its question was escalated.
        by: Who decided, for the record.
        fingerprint: If given, it must match the pending call's.
    """

    arguments: Mapping[str, Any] | None = None
    always: Literal["function", "arguments"] | None = None
    by: str | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.arguments, Mapping):
            object.__setattr__(self, "arguments", dict(self.arguments))


@suggests_names
@dataclass(frozen=True, slots=True)
class Deny:
    """Do not run the call; the model reads that it was refused, and why.

    Attributes:
        reason: What the model reads; a blank one becomes "".
        by: Who decided, for the record.
    """

    reason: str = ""
    by: str | None = None

    def __post_init__(self) -> None:
        given = cast("object", self.reason)
        if given is None or (isinstance(given, str) and not given.strip()):
            object.__setattr__(self, "reason", "")


@suggests_names
@dataclass(frozen=True, slots=True)
class Supply:
    """Do not run the call; the model reads this result in its place.

    Attributes:
        result: Encoded as a function's result would be.
        by: Who decided, for the record.
    """

    result: Any
    by: str | None = None


@suggests_names
@dataclass(frozen=True, slots=True)
class Defer:
    """Ask a person: the run pauses as a value until the call is decided.

    Attributes:
        prompt: What the person is asked.
        expires_in: Seconds after which the question expires; None uses the run's
            setting.
        roles: Who may decide, for the ``authorize`` hook; empty for anyone.
        summary: What the call does, in a format of its arguments; see
            `requires_approval`.
        source: Digest of who asks, and what; set by the gate, as is ``asked_by``.
        panel: How many decide, and who later; set by a policy's rule. Only a store
            counts votes.
    """

    prompt: str | None = None
    expires_in: float | None = None
    roles: Sequence[str] = ()
    summary: str = field(default="", kw_only=True)
    source: str = field(default="", kw_only=True, repr=False, compare=False)
    asked_by: str = field(default="", kw_only=True, repr=False, compare=False)
    panel: Panel = field(default=Panel(), kw_only=True, repr=False)


Decision: TypeAlias = Approve | Deny | Supply | Defer
"""A decision on a call."""


def problem_of(decision: Decision) -> str | None:
    """Say what is invalid in a decision, which may come from unchecked code."""
    match decision:
        case Approve(arguments=arguments, always=always, by=by):
            if always not in (None, "function", "arguments"):
                return f'always must be "function", "arguments" or None; got {shown(always)}'
            if arguments is not None and not _is_object(arguments):
                return f"arguments must map parameter names to values; got {type(arguments).__name__}"
            return _text_problem("by", by)
        case Deny(reason=reason, by=by):
            return _text_problem("reason", reason) or _text_problem("by", by)
        case Supply(by=by):
            return _text_problem("by", by)
        case Defer(prompt=prompt, expires_in=expires_in, roles=roles) as question:
            if expires_in is not None and not is_duration(expires_in):
                expected = f"a number of seconds above 0 and below {LONGEST_WAIT:g}"
                return f"expires_in must be {expected}; got {shown(expires_in)}"
            return (
                _text_problem("prompt", prompt)
                or _roles_problem(roles)
                or _text_problem("summary", question.summary)
                or _text_problem("source", question.source)
                or _text_problem("asked_by", question.asked_by)
            )
        case _:
            assert_never(decision)


LONGEST_WAIT = 1e9
"""Seconds, some thirty years."""


def edited_text(arguments: Mapping[str, Any]) -> str:
    """Write an `Approve`'s arguments as the JSON text that replaces the model's.

    Raises:
        ValueError: If they are no JSON.
    """
    try:
        return json.dumps(
            arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"They are no JSON: {error}.") from error


def _text_problem(name: str, value: object) -> str | None:
    if value is None or (isinstance(value, str) and not _LONE_SURROGATE.search(value)):
        return None
    return f"{name} must be text, without lone surrogates; got {shown(value)}"


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""What UTF-8 cannot encode, and so no request and no journal can hold."""


def _roles_problem(value: object) -> str | None:
    problem = f"roles must be a list of names; got {shown(value)}"
    if not isinstance(value, list | tuple):
        return problem
    return (
        None
        if all(
            isinstance(name, str) and name.strip()
            for name in cast("list[object]", value)
        )
        else problem
    )


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) for key in cast("Mapping[object, object]", value)
    )


def is_duration(value: object) -> bool:
    """Return whether a value is a number of seconds that a question can wait for."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value <= LONGEST_WAIT
    )


def _require_duration(name: str, value: object) -> None:
    fits = value is None or is_duration(value)
    require(name, fits, "a number of seconds above 0, or None", value)


class ReadByKey:
    """Reads the fields of a dataclass by key, too, as in the metadata of a service."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        if name in self.keys():
            return getattr(self, name)
        raise KeyError(
            f"{name!r}; the keys of {type(self).__name__} are {', '.join(self.keys())}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default if there is no such field."""
        if name in self.keys():
            return self[name]
        return default

    def keys(self) -> tuple[str, ...]:
        """List the names of the fields."""
        return tuple(field.name for field in fields(cast("Any", self)))


_OF_THE_REVIEW = frozenset(
    {
        "plugin_name",
        "function_name",
        "raw_arguments",
        "iteration",
        "index",
        "batch_size",
        "signature",
        "after",
    }
)


@frozen
class ToolCall(ReadByKey):
    """A call as everybody outside of the loop sees it: the function, with the arguments it will get.

    A question of the model that waits is one, too: of ``UserInteraction-AskUser`` with
    ``{"question": text}``, answered with `Supply` or `Deny`. So is a plain reply that
    asks, with an id of its own.

    Attributes:
        id: Unique within its batch; decisions go by it.
        path: The ids of the calls that lead to it, from the outermost run in, joined by
            ``/``; ``%``, ``/`` and ``#`` in an id are escaped as in an URL. Outside of
            nested runs, its escaped id.
        kind: ``function``, or ``question`` of the model.
        arguments: The model's, as JSON values converted to the parameters' types: "7"
            for an int is 7. An argument that the model did not give is missing, even if
            the function has a default or the application a value. Do not change it,
            return ``Approve(arguments=...)``.
        raw_arguments: The JSON text that the model sent.
        iteration, index: Both from 0; the index in its batch.
        fingerprint: Digest of run, iteration, id, function and arguments, which an
            `Approve` may name.
        signature: The function's parameters, ``name=digest`` of each; "" if unknown.
        after: The functions after whose calls this one comes, see `ApprovalRule.after`.
            None if unknown, and while the call waits.
        goal: The goal of the run, while the call waits.
        prompt: What the person is asked; "" asks for a plain approval.
        summary: What the call does, in the application's words; "" without any.
        asked_by: The policy's rule, mark or interceptor that asks.
        roles: Who may decide; empty for anyone.
        in_doubt: Whether it had started when its process ended, and may have taken
            effect: `Approve` runs it again, `Supply` gives its result, `Deny` leaves
            the model with the doubt.
        decision: The newest decision on a call that still waits: who had let a call in
            doubt run, edited its arguments, or approved what others are asked about.
        parameters: JSON schema of a waiting call's parameters, to draw a form from,
            with the function's description and the defaults; None if unknown.
    """

    id: str
    path: str = ""
    kind: Literal["function", "question"] = "function"
    plugin_name: str = ""
    function_name: str = ""
    fully_qualified_name: str
    arguments: Mapping[str, Any]
    raw_arguments: str = ""
    iteration: int = 0
    index: int = 0
    batch_size: int = 1
    fingerprint: str
    signature: str = ""
    after: Set[str] | None = None
    goal: str = ""
    prompt: str = ""
    summary: str = ""
    asked_by: str = ""
    roles: Sequence[str] = ()
    expires_at: datetime | None = None
    in_doubt: bool = False
    decision: "DecisionRecord | None" = None
    parameters: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Convert the call to JSON values, times in ISO format, without what only its review needs."""
        written = {name: self[name] for name in self if name not in _OF_THE_REVIEW}
        return json.loads(json.dumps(written, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if hasattr(value, "as_dict"):
        return value.as_dict()
    return dict(value)


class Interceptor(Protocol):
    """Decides a call before it runs. A plain function, sync or async, satisfies it."""

    def __call__(
        self, call: ToolCall, /
    ) -> Decision | Awaitable[Decision | None] | None:
        """Decide, or return None to leave the decision to the other interceptors."""
        ...


RunAction: TypeAlias = Literal[
    "decide",
    "cancel",
    "set_budget",
    "resume",
    "retry",
    "say",
    "fork",
    "delete",
    "import",
    "grant",
    "revoke",
    "pause_all",
    "resume_all",
    "retain",
    "forget",
]
"""What is done to a run, or to all runs of a store; the ``authorize`` hook is asked about each."""


@frozen
class MadeDecision:
    """A decision as a run takes it, with a copy of its edit: what the hook allows and the rules see is what is taken.

    Attributes:
        at: When it was made, in seconds since the epoch; None for now.
        verified: Whether the application vouches for its author.
        grant: The grant that it is of; "" if it is of this call alone.
        votes: The persons whose votes made it; the hook is asked about each.
    """

    decision: Decision
    at: float | None = None
    verified: bool = False
    grant: str = ""
    votes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        decision = self.decision
        if (
            isinstance(decision, Approve)
            and problem_of(decision) is None
            and decision.arguments is not None
        ):
            with suppress(ValueError):  # they are no JSON, and refused as that
                arguments = json.loads(edited_text(decision.arguments))
                copied = replace(decision, arguments=arguments)
                object.__setattr__(self, "decision", copied)


@frozen
class DecisionRequest:
    """What a person wants to do to a run, for the ``authorize`` hook.

    Attributes:
        action: ``retry`` resumes a run that failed or is in quarantine.
        by: Who, as it will be recorded; "" without a name.
        run_id: The run; "" for all runs, and on a stock kernel, which has none.
        call, decision: None where the action is on the run.
        verified: Whether the application vouches for the name, as a sign-in does.
    """

    action: RunAction
    by: str
    run_id: str
    call: ToolCall | None = None
    decision: Decision | None = None
    verified: bool = False


Authorize: TypeAlias = Callable[
    [DecisionRequest], bool | str | Awaitable[bool | str | None] | None
]
"""Allows an action by returning True. Anything else refuses it: a text that it returns,
or that of an exception, is the reason."""

AuthorizeHooks: TypeAlias = Authorize | tuple[Authorize, ...] | None
"""A hook, several that all have to allow, or None."""


def hooks_of(
    authorize: AuthorizeHooks,
) -> tuple[Authorize, ...]:
    """Return the hooks that all have to allow an action, each once."""
    if authorize is None:
        return ()
    given = (authorize,) if callable(authorize) else authorize
    return tuple(one for place, one in enumerate(given) if one not in given[:place])


def check_authorize(authorize: object) -> None:
    """Refuse a value that is not a hook.

    Raises:
        InvalidLimitError: As `ApprovalSettings`.
    """
    given = (
        cast("Sequence[object]", authorize)
        if isinstance(authorize, tuple)
        else (authorize,)
    )
    fits = all(callable(one) and not isinstance(one, type) for one in given)
    expected = "a function of the request that returns True to allow it"
    require("authorize", authorize is None or fits, expected, given)


_ALLOWED: dict[str, tuple[str, ...]] = {
    "unmatched": ("approve", "defer", "deny"),
    "on_denial": ("refuse", "reask", "return_calls"),
    "on_deferred": ("hold_all", "run_safe_first"),
}


@suggests_names
@frozen
class ApprovalSettings:
    """How calls are handled that are undecided, denied, or wait for a person.

    Attributes:
        unmatched: A call that no interceptor decided runs (``approve``, as with any
            filter), waits for a person (``defer``) or is refused (``deny``).
        on_denial: ``refuse``: the model reads a result that says so. ``reask``: the
            call is removed and the model is asked once more, without functions.
            ``return_calls``: the run ends and the batch is the caller's, unanswered.
        on_deferred: Whether the other calls of the batch wait with a deferred one
            (``hold_all``), or run before the pause (``run_safe_first``).
        expires_in: Seconds after which a question expires, from when it is asked; None:
            never.
        interceptor_timeout: Seconds that an interceptor has to decide; after that the
            call is denied. None: no limit.
        authorize: Asked, with a `DecisionRequest`, before each decision on a waiting
            call or question counts; async or not. Only True allows it; a text is the
            reason of a refusal, after which the call still waits. Several in a tuple
            all have to allow. Without a hook a question with ``roles`` cannot be
            decided, except by the application's own ``approver``, which is shown them.

    Raises:
        InvalidLimitError: If a value is invalid; names the field. At a door it is a
            ``PlannerInvalidConfigurationError``, see `planner_ext.errors`.
    """

    unmatched: Literal["approve", "defer", "deny"] = "approve"
    on_denial: Literal["refuse", "reask", "return_calls"] = "refuse"
    on_deferred: Literal["hold_all", "run_safe_first"] = "hold_all"
    expires_in: float | None = None
    interceptor_timeout: float | None = 30.0
    authorize: AuthorizeHooks = None

    def __post_init__(self) -> None:
        check_authorize(self.authorize)
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            require(name, value in allowed, f"one of {', '.join(allowed)}", value)
        for name in ("expires_in", "interceptor_timeout"):
            _require_duration(name, getattr(self, name))

    def within(self, inner: "ApprovalSettings") -> "ApprovalSettings":
        """@private Merge with a wrapped service's settings: for undecided calls, the stricter applies."""
        stricter = max(
            self.unmatched, inner.unmatched, key=("approve", "defer", "deny").index
        )
        return replace(
            self.asking(inner.authorize),
            unmatched=stricter,
            expires_in=self.expires_in or inner.expires_in,
        )

    def asking(self, authorize: AuthorizeHooks) -> "ApprovalSettings":
        """@private Add a hook that has to allow a decision, too."""
        more = [
            one for one in hooks_of(authorize) if one not in hooks_of(self.authorize)
        ]
        return (
            replace(self, authorize=(*hooks_of(self.authorize), *more))
            if more
            else self
        )


F = TypeVar("F", bound=Callable[..., Any])


@overload
def requires_approval(function: F, /) -> F: ...


@overload
def requires_approval(
    *,
    prompt: str | None = None,
    expires_in: float | None = None,
    roles: Sequence[str] = (),
    summary: str = "",
) -> Callable[[F], F]: ...


def requires_approval(
    function: Any = None,
    /,
    *,
    prompt: str | None = None,
    expires_in: float | None = None,
    roles: Sequence[str] = (),
    summary: str = "",
) -> Any:
    """Declare that a function may not run before a person has approved the call.

    Stands above or below ``@kernel_function``, bare or with arguments. A function of a
    prompt, of an OpenAPI document or of an MCP server is marked in its kernel:
    ``requires_approval(kernel.get_function("plugin", "name"))``. Copies keep the mark;
    a plugin that is loaded again has new functions: mark those, too.

    An allow *rule* of a policy may free the function, a policy's default never does.
    Without any approver the run pauses.

    Args:
        function: The function, or that of a kernel, if the decorator stands without
            arguments.
        prompt: What the person is asked.
        expires_in: Seconds after which the question expires; None uses the run's
            setting.
        roles: Who may decide, by names of the application's own; empty for anyone. See
            ``ApprovalSettings.authorize``.
        summary: What a call does, as `str.format` writes it with the call's arguments:
            ``"Refund {amount:.2f} {currency} for {order}"``. A person reads it above
            the arguments. A call for which it cannot be written, as it lacks one of
            them, is shown without.

    Raises:
        InvalidLimitError: If an argument is invalid.
        NotAFunctionError: If something other than a function is marked, or one in C.
    """
    for name, text in (("prompt", prompt), ("summary", summary)):
        problem = _text_problem(name, text)
        if problem is not None:
            raise InvalidLimitError(f"{problem}.")
    _require_duration("expires_in", expires_in)
    problem = _roles_problem(roles)
    if problem is not None:
        raise InvalidLimitError(f"{problem}.")

    def mark(function: F) -> F:
        put_mark(
            markable(function, _USAGE),
            Defer(prompt, expires_in, tuple(roles), summary=summary),
        )
        return function

    return mark if function is None else mark(function)


_USAGE = (
    "requires_approval marks a function; got {}. Write @requires_approval above the function, or with words for the "
    "person: @requires_approval(prompt=...)."
)


def approval_required(function: object) -> Defer | None:
    """Return the mark of a function; see `planner_ext.core.marks`."""
    return mark_on(function, Defer)


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest_of(function: str, arguments: Mapping[str, Any]) -> str:
    """Digest a function's name and its arguments; equal JSON values give equal digests."""
    return _sha256(
        [
            function,
            {name: with_plain_numbers(value) for name, value in arguments.items()},
        ]
    )


def with_plain_numbers(value: Any) -> Any:
    """Convert whole floats of a JSON value to integers: JSON has one kind of number."""
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [with_plain_numbers(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {
            name: with_plain_numbers(item)
            for name, item in cast("dict[Any, Any]", value).items()
        }
    return value


def fingerprint_of(
    run_id: str, iteration: int, call_id: str, digest: str, signature: str = ""
) -> str:
    """Digest one call of one run."""
    return _sha256([run_id, iteration, call_id, digest, signature])


def takes_no_more(before: str, now: str) -> bool:
    """Return whether a function has no parameters but those it had before, given signatures."""
    if not before:
        return True
    given = set(filter(None, now.split(",")))
    return given <= set(before.split(","))


def source_of(*parts: object) -> str:
    """Digest who asks about a call, and what."""
    return _sha256(parts)


def further_digest(digest: str, source: str, roles: Iterable[str]) -> str:
    """Digest an approved call about which this source asks others: no earlier decision is for it."""
    return source_of(digest, source, sorted(set(roles)))


def _sha256(value: object) -> str:
    return hashlib.sha256(_CANONICAL.encode(value).encode("ascii")).hexdigest()


DecisionKind: TypeAlias = Literal["approve", "deny", "supply", "expire", "edit"]
"""``expire`` ends a question that was not decided in time; ``edit`` approves with
arguments that another question is about."""


@frozen
class DecisionRecord:
    """A decision on a call, or the answer to a question.

    Attributes:
        call: The call's id: within its batch, or in a store as `PendingApproval` names
            it; in a run inside another one, its path: see `ToolCall.path`.
        by: A person, an interceptor or a policy's rule; "" without a name.
        at: In UTC.
        requested: The arguments that were decided on; None if unknown.
        arguments: Those that an approved call runs with, or waits with while others are
            asked; None if it does not run.
        reason: Why it was denied, or "".
        result: What was supplied in the function's place, or as an answer.
        always: What else an approval is for, as in `Approve`.
        refused: Why the decision was not taken; "" if it was.
        grant: The id of the grant by which it was decided; "" for a decision on the
            call alone.
    """

    call: str
    fully_qualified_name: str
    kind: DecisionKind
    by: str
    at: datetime
    requested: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] | None = None
    reason: str = ""
    result: Any = None
    always: Literal["function", "arguments"] | None = None
    refused: str = ""
    grant: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Convert the record to JSON values."""
        return asdict(self) | {"at": self.at.isoformat()}


def kind_of(fact: CallDecided) -> DecisionKind | None:
    """Return which decision a fact records; None if the call was answered or run without one."""
    match fact.verdict, fact.reason:
        case "run", _ if fact.binds:
            return "approve"
        case "deny", _:
            return "deny"
        case "answer", "supplied":
            return "supply"
        case "answer", "expired":
            return "expire"
        case "answer", _ if fact.person:  # a denied call that is in doubt
            return "deny"
        case "defer", _ if fact.approved:  # by who was asked before
            return "approve"
        case "defer", _ if fact.edited is not None:
            return "edit"
        case _:
            return None


def record_of(fact: CallDecided, request: RequestedCall) -> DecisionRecord | None:
    """Read a decision from a fact; None if the call was answered or run without one."""
    kind = kind_of(fact)
    if kind is None:
        return None
    return DecisionRecord(
        call=fact.call_id,
        fully_qualified_name=fact.function,
        kind=kind,
        by=fact.by,
        at=datetime.fromtimestamp(fact.at, UTC),
        requested=json_object(replace(fact, edited=None).arguments_of(request)),
        arguments=json_object(fact.arguments_of(request))
        if kind in ("approve", "edit")
        else None,
        reason=fact.reason if kind == "deny" else "",
        result=fact.answer if kind == "supply" else None,
        always=fact.sticky,
        grant=fact.grant,
    )


def question_id(iteration: int) -> str:
    """Return the id under which an iteration's plain reply is shown as a call."""
    return f"question_{iteration}"


def json_object(text: str) -> Mapping[str, Any] | None:
    """Read a JSON object, such as a call's arguments; None if the text is none."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return cast("Mapping[str, Any]", value)
    return None
