"""How many tokens a request sends and a reply brings, counted or estimated, without ever using the network."""

import hashlib
import inspect
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from semantic_kernel.connectors.ai.function_calling_utils import kernel_function_metadata_to_function_call_format
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatMessageContent, FunctionCallContent, FunctionResultContent, TextContent
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.core.values import Usage
from planner_ext.sk.budget import Price
from planner_ext.sk.connectors import connector_of
from planner_ext.sk.errors import InvalidPriceError, PlannerInvalidConfigurationError, PromptTooLargeError
from planner_ext.sk.toolset import ToolSet

__all__ = ["PromptSize", "checked_price", "estimated_tokens", "price_of"]

# What a request costs: by the application's own function, or by the price list of ``genai-prices``.

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


CountTokens = Callable[[str], int]

# What stands around the texts, fitted to what OpenAI's API reported for recorded requests, see `PromptSize`.
_REQUEST, _MESSAGE, _CALL, _TOOLS, _TOOL, _PROPERTY, _DESCRIBED = 3, 4, 8, 12, 7, 1, 5

_PIECES = re.compile(r"[^\W\d_]+|\d+|\n+|[^\w\s]+|_")


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of a text without knowing its model's encoding.

    A word is a token for each nine letters begun, a number for each three digits, punctuation for each three signs, a
    run of line ends one; of other alphabets, four bytes of UTF-8 are one.
    """
    return sum(_piece_tokens(piece) for piece in _PIECES.findall(text))


def _piece_tokens(piece: str) -> int:
    if piece.isspace():
        return 1
    if not piece.isascii():
        return math.ceil(len(piece.encode(errors="replace")) / 4)
    return math.ceil(len(piece) / (9 if piece.isalpha() else 3))


class PromptSize:
    """Counts requests and replies, and refuses a request that is too large; each message and function is counted once.

    With ``tiktoken`` (extra ``tokens``) texts are counted by the encoding of the model, where tiktoken knows the model
    and has the encoding at hand: loaded by the application, or in its cache folder. It is never downloaded for this.
    Else they are estimated, see `estimated_tokens`. What a provider adds around the texts is estimated in both cases.

    What stands around the texts was fitted to the prompt tokens that OpenAI's API reported for nine short requests of
    42 to 129 tokens (gpt-4o, gpt-4o-mini and gpt-4.1-mini, eight of them with functions), which the estimate then
    meets within -3 % to +7 %. How far it is off for long prompts and for other languages was not measured.
    Images, audio and files are not counted, nor is the form in which an answer is asked for.
    """

    def __init__(self, service: AIServiceClientBase, settings: PromptExecutionSettings, limit: int) -> None:
        """Bind the count to a model.

        Args:
            service: The connector, whose model counts where the settings name none.
            settings: Of the requests.
            limit: The most tokens that a request may send; 0 is no limit, and nothing is counted.
        """
        self._limit = limit
        self._model: str = getattr(settings, "ai_model_id", None) or service.ai_model_id
        self._messages: list[tuple[ChatMessageContent, int]] = []
        self._functions: dict[str, tuple[Any, int]] = {}
        self._count: CountTokens | None = None
        self._how = ""

    def check(self, messages: Sequence[ChatMessageContent], offer: ToolSet | None) -> None:
        """Count a request.

        Args:
            messages: All that are sent.
            offer: The functions whose schemas are sent with them; None for none.

        Raises:
            PromptTooLargeError: If it is over the limit, naming count and limit. Nothing was sent.
        """
        if not self._limit:
            return
        tokens = self.prompt_tokens(messages, offer)
        if tokens > self._limit:
            raise PromptTooLargeError(
                f"The prompt has {tokens} tokens ({self._how}), and max_prompt_tokens is {self._limit}. Nothing was "
                "sent, and nothing is lost: the run can be resumed from its checkpoint with a larger limit or fewer "
                "functions; iteration_completed can keep a history short.",
                prompt_tokens=tokens,
                max_prompt_tokens=self._limit,
            )

    def prompt_tokens(self, messages: Sequence[ChatMessageContent], offer: ToolSet | None) -> int:
        """Count the tokens of a request."""
        return _REQUEST + self._of_messages(messages) + (0 if offer is None else self._of_functions(offer))

    def completion_tokens(self, reply: ChatMessageContent) -> int:
        """Count a reply: its text and its calls; what a model thinks beside them is not seen."""
        return self._of_message(reply) - _MESSAGE

    def completed(
        self, usage: Usage, messages: Sequence[ChatMessageContent], offer: ToolSet | None, reply: ChatMessageContent
    ) -> Usage:
        """Put an estimate in place of each half of a usage that was not reported.

        Args:
            usage: As reported; 0 is not reported: no request sends nothing.
            messages: All that were sent.
            offer: The functions whose schemas were sent with them; None for none.
            reply: What came.
        """
        sent = usage.prompt_tokens or self.prompt_tokens(messages, offer)
        received = usage.completion_tokens or self.completion_tokens(reply)
        estimated = sent + received - usage.total_tokens
        if not estimated:
            return usage
        return replace(usage, prompt_tokens=sent, completion_tokens=received, estimated_tokens=estimated)

    def _of_messages(self, messages: Sequence[ChatMessageContent]) -> int:
        known = self._messages
        same = next(
            (place for place, (one, other) in enumerate(zip(messages, known, strict=False)) if one is not other[0]),
            min(len(messages), len(known)),
        )
        known[same:] = [(message, self._of_message(message)) for message in messages[same:]]
        return sum(count for _, count in known)

    def _of_message(self, message: ChatMessageContent) -> int:
        tokens = _MESSAGE
        for item in message.items:
            match item:
                case TextContent():
                    tokens += self._of(item.text)
                case FunctionCallContent():
                    tokens += _CALL + self._of(item.name or "") + self._of(_text(item.arguments))
                case FunctionResultContent():
                    tokens += self._of(_text(item.result))
                case _:
                    pass
        return tokens

    def _of_functions(self, offer: ToolSet) -> int:
        tokens = 0
        for name, function in offer.functions.items():
            seen, count = self._functions.get(name, (None, 0))
            if seen is not function:
                count = self._of_schema(kernel_function_metadata_to_function_call_format(function.metadata))
                self._functions[name] = (function, count)
            tokens += count
        tokens += sum(self._of_schema(schema) for schema in offer.schemas)
        return tokens + _TOOLS if tokens else 0

    def _of_schema(self, tool: Mapping[str, Any]) -> int:
        function: Mapping[str, Any] = tool.get("function") or {}
        head = f"{function.get('name', '')}:{function.get('description') or ''}"
        return _TOOL + self._of(head) + sum(map(self._of_property, _properties(function.get("parameters"))))

    def _of_property(self, named: tuple[str, Mapping[str, Any]]) -> int:
        name, schema = named
        description = _text(schema.get("description"))
        tokens = _PROPERTY + self._of(f"{name} {_text(schema.get('type'))}")
        tokens += _DESCRIBED + self._of(description) if description else 0
        return tokens + sum(_PROPERTY + self._of(_text(value)) for value in schema.get("enum") or ())

    def _of(self, text: str) -> int:
        if self._count is None:
            encoding = _encoding_at_hand(self._model)
            self._count = estimated_tokens if encoding is None else lambda text: len(encoding.encode_ordinary(text))
            self._how = "an estimate" if encoding is None else f"counted in the encoding {encoding.name}"
        return self._count(text)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _properties(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Walk the properties of a JSON schema, those of nested objects and of items of arrays included."""
    if not isinstance(schema, Mapping):
        return
    known = cast("Mapping[str, Any]", schema)
    properties: Mapping[str, Any] = known.get("properties") or {}
    for name, nested in properties.items():
        if isinstance(nested, Mapping):
            yield name, cast("Mapping[str, Any]", nested)
            yield from _properties(nested)
    yield from _properties(known.get("items"))


_FILES = {
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}
"""The encodings of chat models, and the SHA-256 of their files: one that is missing or damaged would be downloaded."""

_URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"
"""Where tiktoken has a file from; the SHA-1 of this is its name in the cache folder."""


def _encoding_at_hand(model: str) -> Any:
    """Load the encoding of a model, if that takes no network; None where it would, or where nothing is known."""
    try:
        tiktoken, registry = import_module("tiktoken"), import_module("tiktoken.registry")
        name: str = tiktoken.encoding_name_for_model(model)
    except (ImportError, KeyError):
        return None
    return tiktoken.get_encoding(name) if name in registry.ENCODINGS or _is_cached(name) else None


def _is_cached(name: str) -> bool:
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if name not in _FILES or folder == "":
        return False
    key = hashlib.sha1(_URL.format(name).encode(), usedforsecurity=False).hexdigest()
    path = Path(folder or Path(tempfile.gettempdir()) / "data-gym-cache") / key
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == _FILES[name]
    except OSError:
        return False
