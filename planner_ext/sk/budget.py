"""The budget of a run, as an application configures it."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from planner_ext.core.errors import PlannerExtError, shown
from planner_ext.core.limits import Limits
from planner_ext.core.values import Usage
from planner_ext.sk.errors import InvalidOptionError

__all__ = ["Budget", "Price", "price_in", "tightest"]

Price = Callable[[str, Usage], float]
"""Gives the price of one request in US dollars, from the model's name and the tokens used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Limits):
    """The limits of a run. They apply per run: a new goal starts a new ledger, resuming a run does not.

    The limits on round trips and calls are exact and never exceeded. Tokens and cost are checked before each request
    and each batch of calls, so only the request or batch then in flight, and the one forced answer, may exceed them.
    Active time and deadline interrupt requests and calls in flight. Retries inside an SDK are not seen and not counted.

    Attributes:
        max_iterations: Round trips, every request of the run included: the plan, the steps and the answer. Charged from
            ``iterations`` in each reply's metadata, at least 1 per request. Checked before each request. Under
            ``on_limit="answer"`` the last one is reserved: it offers no functions, so that N trips give an answer.
        max_tool_calls: Functions started, failures included; denied, unknown and malformed calls are free. Checked
            before a batch starts, on the calls that are about to start; a batch of 3 is 3. A function that a filter
            starts again (see `planner_ext.durable.effect`) counts again, and is checked before each start.
        max_total_tokens: Prompt and completion tokens, as the service reports them. Unreported tokens are estimated
            from the texts sent and received; `Usage.estimated_tokens` has the estimated part.
        max_cost: US dollars, as ``price`` computes them from the tokens reported or estimated as above. A model without
            a known price is refused before the first request.
        max_active_seconds: The run's working time on its clock: requests, functions, callbacks and the wait between
            iterations. Pauses do not count, nor does the time in which interceptors or a clarifier decide, since they
            may be persons (a `ModelClarifier` counts). Checked continuously. At the limit, whatever ``on_limit`` says,
            requests and functions in flight are cancelled, and no further request is made. A cancelled request is
            charged as a round trip; a cancelled function is recorded and answered as ``timed_out``. One that does not
            end within a second after that is abandoned, and its later outcome changes nothing in the run.
        deadline: A moment, with its time zone. The time in which the run pauses or a person decides counts, too; a
            call that is not decided by then does not run. Otherwise the same happens as at ``max_active_seconds``.
        max_calls_per_function: Functions started, by fully qualified name; only the calls beyond it are not executed.
        max_consecutive_errors: Batches in a row with a failed, unknown or malformed call; a clean batch resets it.
        max_repeated_calls: How often the same function may start with the same arguments.
        max_repeated_denials: Batches in a row in which every call was denied.
        max_calls_per_reply: Calls in one reply, of any kind. Checked when the reply has arrived, before any call is
            processed. If a reply has more, none of its calls runs: each is answered "not executed" with this limit's
            name, and the run continues, so that the model can make fewer calls. None means no limit.
        on_limit: What happens at a limit. ``answer``: calls beyond it are answered "not executed" and one more request,
            without functions, asks for the answer. ``stop``: they are answered "not executed" and the run ends.
            ``raise``: as ``stop``, but `LimitReachedError` is raised. ``return_calls``: the run ends with the calls
            unanswered, for the caller to run. All but ``raise`` return a value that can be resumed with a larger
            budget.
        batch_over_limit: Whether a batch that exceeds ``max_tool_calls`` runs no call (``reject_batch``) or the first
            calls that fit (``fill_remaining``). With ``on_limit="return_calls"`` both return the whole batch and run
            none of it: a message with calls cannot be answered in part.
        last_trip: Whether a request without functions omits their schema (``withdraw``) or sends it with tool choice
            "none", for providers that refuse tool messages without schema. Anthropic and Bedrock do, and Semantic
            Kernel's connectors to them cannot send "none": with both values they get one function in place of all
            others, whose description says that none is left. Ollama's connector cannot send it either, and needs no
            schema.
        tell_budget: Whether the model reads the remaining round trips, tool calls, tokens, cost and time, as far as
            they are limited. A share, such as 0.25, mentions a limit once that share of it or less is left. The note is
            appended to the newest message of each request except the plan's, and is not stored: history, journal and
            the beginning of each request, which providers cache, are the same as without it.
        price: Returns the price of one request in US dollars, given the model's name and the tokens used: a synchronous
            function that returns a finite number of 0 or more. Before the first request of a run it is called for 0
            tokens and, if that raises, for one token sent and one received; a price that returns anything else is
            refused there. A later invalid result raises `InvalidPriceError`, and no further request is made. None uses
            the price list of ``genai-prices`` (extra ``prices``) if there is a ``max_cost``; without a ``max_cost``,
            costs are not counted, and the list is not loaded.

    Raises:
        PlannerInvalidConfigurationError: If a value is invalid; names the field.
    """

    max_calls_per_reply: int | None = 1024
    price: Price | None = None

    error: ClassVar[type[PlannerExtError]] = InvalidOptionError

    def __post_init__(self) -> None:
        Limits.__post_init__(self)
        if self.price is not None and not callable(self.price):
            raise InvalidOptionError(
                f"price must be a function of the model's name and the tokens used, or None; got {shown(self.price)}."
            )

    @property
    def limits(self) -> Limits:
        """The plain limits, as the core keeps them in a journal."""
        return Limits(**{item.name: getattr(self, item.name) for item in fields(Limits)})


def price_in(budget: Limits | None) -> Price | None:
    """Return the price of a budget; None for limits alone, as a journal keeps them."""
    return budget.price if isinstance(budget, Budget) else None


def tightest(first: Limits, second: Limits | None) -> Limits:
    """Merge two budgets that both apply: of each limit the tighter, and the first one's behaviour at a limit."""
    if second is None:
        return first
    values: dict[str, Any] = {}
    for item in fields(Limits):
        one, other = getattr(first, item.name), getattr(second, item.name)
        if item.name == "max_calls_per_function":
            both = one.keys() & other.keys()
            values[item.name] = {**one, **other, **{name: min(one[name], other[name]) for name in both}}
        elif item.name.startswith("max_") or item.name == "deadline":
            values[item.name] = min((limit for limit in (one, other) if limit is not None), default=None)
        elif item.name == "tell_budget":
            values[item.name] = one or other
        else:
            values[item.name] = one
    return replace(first, **values)
