"""What a request costs: by the application's own function, or by the price list of ``genai-prices``."""

from importlib import import_module
from typing import Any

from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings

from planner_ext.core.values import Usage
from planner_ext.kernel.budget import Price
from planner_ext.kernel.errors import PlannerInvalidConfigurationError

__all__ = ["price_of"]


def price_of(
    service: ChatCompletionClientBase,
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


def _listed(service: ChatCompletionClientBase, model: str, max_cost: float) -> Price:
    """Read the list's price of a model: of the provider at the service's URL, else of the provider it names."""
    try:
        prices = import_module("genai_prices")
    except ImportError:
        raise _unknown(
            model, max_cost, "genai-prices is not installed", "pip install 'planner-ext[prices]', or pass"
        ) from None
    places: list[dict[str, str]] = [{"provider_api_url": url}] if (url := service.service_url()) else []
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
