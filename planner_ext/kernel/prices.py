"""What a request costs: by the application's own function, or by the price list of ``genai-prices``."""

import inspect
import math
from contextlib import suppress
from decimal import Decimal
from functools import partial
from importlib import import_module
from typing import Any, cast

from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.core.values import Usage
from planner_ext.kernel.budget import Price
from planner_ext.kernel.connectors import connector_of
from planner_ext.kernel.errors import InvalidPriceError, PlannerInvalidConfigurationError

__all__ = ["checked_price", "price_of"]

_PROBES = (Usage(), Usage(prompt_tokens=1, completion_tokens=1))
"""What a price is asked for before the first request: for nothing, and if it raises then, for the least there is."""


def price_of(
    service: AIServiceClientBase,
    settings: PromptExecutionSettings,
    price: Price | None,
    max_cost: float | None,
) -> Price | None:
    """Find out how the requests of a run are priced; None where nobody asks for it.

    The price list is loaded, which takes 0.2 s once in a process, for a run with ``max_cost`` and no price of its own.

    Args:
        service: The connector; its URL tells the provider.
        settings: Of every request; a model named in them takes the place of the connector's.
        price: The application's own function.
        max_cost: The limit for whose sake a price is needed.

    Raises:
        PlannerInvalidConfigurationError: If a price is needed and none is known, before anything is spent.
    """
    chosen: str | None = getattr(settings, "ai_model_id", None)
    if price is None:
        return None if max_cost is None else _listed(service, chosen or service.ai_model_id, max_cost)
    return price if chosen is None else lambda _, usage: price(chosen, usage)


def checked_price(price: Price, model: str) -> Price:
    """Try a price before the first request, and let it return nothing but an amount of US dollars from then on.

    Args:
        price: The application's, or the list's. It is asked what no token costs; if it raises then, what one token sent
            and one received cost.
        model: The model whose requests it prices.

    Returns:
        The same price, which raises `InvalidPriceError` for what is not an amount, and where the function raises.

    Raises:
        PlannerInvalidConfigurationError: If it cannot price that. Nothing was sent.
    """
    nothing, least = _PROBES
    try:
        try:
            amount = _amount(price, model, nothing)
        except InvalidPriceError as error:
            if error.__cause__ is None:
                raise
            amount = _amount(price, model, least)
        if math.copysign(1, amount) < 0:  # -0.0: a negative price of no token
            raise InvalidPriceError(_refused(model, nothing, f"returned {amount}"))
    except InvalidPriceError as error:
        raise PlannerInvalidConfigurationError(f"{error} Nothing was sent.") from error.__cause__
    return partial(_amount, price)


def _amount(price: Price, model: str, usage: Usage) -> float:
    """Ask a price; whatever it returns is looked at as if it had no type."""
    try:
        amount = cast("object", price(model, usage))
    except Exception as error:
        raise InvalidPriceError(_refused(model, usage, f"raised {type(error).__name__}: {error}")) from error
    if inspect.iscoroutine(amount):
        amount.close()
    if isinstance(amount, int | float | Decimal) and not isinstance(amount, bool):
        with suppress(OverflowError):
            if math.isfinite(number := float(amount)) and number >= 0:
                return number
    returned = f"{amount}" if isinstance(amount, float | Decimal) else f"a value of type {type(amount).__name__}"
    raise InvalidPriceError(_refused(model, usage, f"returned {returned}"))


def _refused(model: str, usage: Usage, problem: str) -> str:
    return (
        f"price must return US dollars, a finite number of 0 or more, and not be async; for the model {model!r}, "
        f"{usage.prompt_tokens} tokens sent and {usage.completion_tokens} received, it {problem}."
    )


def _listed(service: AIServiceClientBase, model: str, max_cost: float) -> Price:
    """Read the list's price of a model: of the provider at the service's URL, of the connector's, or of any."""
    try:
        prices = import_module("genai_prices")
    except ImportError:
        raise _unknown(
            model, max_cost, "genai-prices is not installed", "pip install 'planner-ext[prices]', or pass"
        ) from None
    places: list[dict[str, str]] = [{"provider_api_url": url}] if (url := service.service_url()) else []
    if provider := connector_of(service).provider:
        places.append({"provider_id": provider})
    for place in [*places, {}]:
        try:
            prices.calc_price(prices.Usage(), model, **place)
        except LookupError:
            continue
        return lambda _, usage: float(prices.calc_price(_tokens(prices, usage), model, **place).total_price)
    raise _unknown(model, max_cost, "genai-prices knows no such model", "Use the name of a known model, or pass")


def _tokens(prices: Any, usage: Usage) -> Any:
    return prices.Usage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_tokens=usage.cached_tokens,
    )


def _unknown(model: str, max_cost: float, why: str, way: str) -> PlannerInvalidConfigurationError:
    return PlannerInvalidConfigurationError(
        f"max_cost={max_cost:g} needs a price for the model {model!r}, and there is none: {why}. Nothing was sent. "
        f"{way} price= to Budget, a function of the model's name and the tokens used that returns US dollars."
    )
