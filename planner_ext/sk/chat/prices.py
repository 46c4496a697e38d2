"""The cost of requests: their tokens, counted or estimated without the network, and their price in US dollars."""

import hashlib
import inspect
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from decimal import Decimal
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.connectors.ai.function_calling_utils import (
    kernel_function_metadata_to_function_call_format,
)
from semantic_kernel.contents import (
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)
from semantic_kernel.functions import KernelFunction
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.core.errors import described
from planner_ext.core.limits import Price
from planner_ext.core.values import Usage
from planner_ext.sk.chat.connectors import connector_of
from planner_ext.sk.errors import (
    InvalidOptionError,
    InvalidPriceError,
    PromptTooLargeError,
)
from planner_ext.sk.functions.toolset import ToolSet


def price_of(
    service: AIServiceClientBase,
    settings: PromptExecutionSettings,
    price: Price | None,
    max_cost: float | None,
) -> Price | None:
    """Select the price function for a run's requests; None if no cost is counted.

    With ``max_cost`` and no function, the list of ``genai-prices`` is loaded: 0.2 s,
    once per process. A model in the settings overrides the connector's.

    Raises:
        PlannerInvalidConfigurationError: If a price is needed and unknown.
    """
    chosen: str | None = getattr(settings, "ai_model_id", None)
    if price is None:
        return (
            None
            if max_cost is None
            else _listed(service, chosen or service.ai_model_id, max_cost)
        )
    if chosen is None:
        return price
    return lambda _, usage: price(chosen, usage)


def _checked(price: Price, model: str) -> Price:
    """Try a price function before the first request; return one that raises `InvalidPriceError` on invalid results.

    It is called for 0 tokens; if that raises, for one token sent and one received.
    """
    nothing = Usage()
    least = Usage(prompt_tokens=1, completion_tokens=1)
    try:
        try:
            amount = _amount(price, model, nothing)
        except InvalidPriceError as error:
            if error.__cause__ is None:
                raise
            amount = _amount(price, model, least)
        if math.copysign(1, amount) < 0:  # -0.0: a negative price times 0 tokens
            raise _refused(model, nothing, f"returned {amount}")
    except InvalidPriceError as error:
        raise InvalidOptionError(f"{error} Nothing was sent.") from error.__cause__
    return partial(_amount, price)


def _amount(price: Price, model: str, usage: Usage) -> float:
    try:
        amount = cast("object", price(model, usage))
    except (Exception, SystemExit) as error:
        raise _refused(model, usage, f"raised {described(error)}") from error
    if inspect.iscoroutine(amount):
        amount.close()
    if isinstance(amount, int | float | Decimal) and not isinstance(amount, bool):
        with suppress(OverflowError):
            if math.isfinite(number := float(amount)) and number >= 0:
                return number
    returned = (
        f"{amount}"
        if isinstance(amount, float | Decimal)
        else f"a value of type {type(amount).__name__}"
    )
    raise _refused(model, usage, f"returned {returned}")


def _refused(model: str, usage: Usage, problem: str) -> InvalidPriceError:
    return InvalidPriceError(
        f"price must return US dollars, a finite number of 0 or more, and not be async; for the model {model!r}, "
        f"{usage.prompt_tokens} tokens sent and {usage.completion_tokens} received, it {problem}."
    )


def _listed(service: AIServiceClientBase, model: str, max_cost: float) -> Price:
    """Look up a model's price: by the provider at the service's URL, by the connector's, or by any."""
    why = "genai-prices knows no such model"
    way = "Use the name of a known model, or pass"
    prices: Any = None
    try:
        prices = import_module("genai_prices")
    except ImportError:
        why = "genai-prices is not installed"
        way = "pip install 'planner-ext[prices]', or pass"

    def cost(_: str, usage: Usage, **place: str) -> float:
        tokens = prices.Usage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cache_read_tokens=usage.cached_tokens,
        )
        return float(prices.calc_price(tokens, model, **place).total_price)

    places = {
        "provider_api_url": service.service_url(),
        "provider_id": connector_of(service).provider,
    }
    for place in (
        [*({name: value} for name, value in places.items() if value), {}]
        if prices
        else []
    ):
        with suppress(LookupError):
            cost(model, Usage(), **place)
            return partial(cost, **place)
    raise InvalidOptionError(
        f"max_cost={max_cost:g} needs a price for the model {model!r}, and there is none: {why}. Nothing was sent. "
        f"{way} price=, a function of the model's name and the tokens used that returns US dollars."
    )


# The overhead around the texts, fitted to the token counts that OpenAI's API reported; see `RequestMeter`.
_REQUEST = 3
_MESSAGE = 4
_CALL = 8
_TOOLS = 12
_TOOL = 7
_PROPERTY = 1
_DESCRIBED = 5

_PIECES = re.compile(r"[^\W\d_]+|\d+|\n+|[^\w\s]+|_")


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of a text without its model's encoding.

    A word counts one token per nine letters begun, a number one per three digits,
    punctuation one per three signs, a run of line ends one in all; other alphabets
    count one per four bytes of UTF-8.
    """
    return sum(_piece_tokens(piece) for piece in _PIECES.findall(text))


def _piece_tokens(piece: str) -> int:
    if piece.isspace():
        return 1
    if not piece.isascii():
        return math.ceil(len(piece.encode(errors="replace")) / 4)
    return math.ceil(len(piece) / (9 if piece.isalpha() else 3))


@dataclass(eq=False)
class RequestMeter:
    """Counts and prices the requests to one model, and refuses those that are too large.

    With ``tiktoken`` (extra ``tokens``) texts are counted, if the model's encoding is
    loaded or in tiktoken's cache folder; nothing is downloaded. Otherwise see
    `estimated_tokens`. The provider's overhead is always estimated: fitted to nine
    short requests of 42 to 129 tokens to OpenAI's gpt-4o, gpt-4o-mini and gpt-4.1-mini,
    with an error of -3 % to +7 %; long prompts and other languages were not measured.
    Images, audio, files and the response format are not counted. A message or function
    is counted once.

    Attributes:
        price: See `price_of`.
        max_cost: The limit that needs a price.
        max_prompt_tokens: Maximum tokens of a request, for `check`; 0 means no limit.
        estimates: Whether unreported tokens are estimated; with a price they always
            are.
    """

    service: AIServiceClientBase
    settings: PromptExecutionSettings
    _: KW_ONLY
    price: Price | None = None
    max_cost: float | None = None
    max_prompt_tokens: int = 0
    estimates: bool = False
    _known: dict[int, tuple[object, int]] = field(
        default_factory=dict[int, tuple[object, int]], init=False
    )

    def __post_init__(self) -> None:
        self._model: str = (
            getattr(self.settings, "ai_model_id", None) or self.service.ai_model_id
        )
        price = price_of(self.service, self.settings, self.price, self.max_cost)
        if price is not None:
            self.price = _checked(price, self._model)
            self.estimates = True

    def check(
        self, messages: Sequence[ChatMessageContent], tools: ToolSet | None
    ) -> None:
        """Count a request, with the schemas of its functions.

        Raises:
            PromptTooLargeError: If it exceeds the limit; names count and limit. Nothing
                was sent.
        """
        tokens = self._prompt_tokens(messages, tools)
        if tokens > self.max_prompt_tokens:
            name = None
            if self._encoding is not None:
                name = self._encoding.name
            how = "an estimate" if name is None else f"counted in the encoding {name}"
            raise PromptTooLargeError(
                f"The prompt has {tokens} tokens ({how}), and max_prompt_tokens is {self.max_prompt_tokens}. Nothing "
                "was sent, and nothing is lost: the run can be resumed from its checkpoint with a larger limit or "
                "fewer functions; iteration_completed can keep a history short.",
                prompt_tokens=tokens,
                max_prompt_tokens=self.max_prompt_tokens,
            )

    def used(
        self,
        reported: Usage,
        messages: Sequence[ChatMessageContent],
        tools: ToolSet | None,
        reply: ChatMessageContent | None,
    ) -> Usage:
        """Return a request's usage: reported tokens, estimated ones where 0 are reported, and cost.

        A reply's hidden reasoning is not counted.
        """
        usage = reported
        if self.estimates:
            sent = usage.prompt_tokens or self._prompt_tokens(messages, tools)
            received = usage.completion_tokens or (
                0 if reply is None else self._of_message(reply) - _MESSAGE
            )
            if estimated := sent + received - usage.total_tokens:
                usage = replace(
                    usage,
                    prompt_tokens=sent,
                    completion_tokens=received,
                    estimated_tokens=estimated,
                )
        if self.price is None:
            return usage
        model = reply.ai_model_id if reply is not None else None
        return replace(usage, cost=self.price(model or self._model, usage))

    def _prompt_tokens(
        self, messages: Sequence[ChatMessageContent], tools: ToolSet | None
    ) -> int:
        functions = [] if tools is None else [*tools.functions.values()]
        known = self._known
        self._known = {
            id(one): known.get(id(one)) or (one, self._of_part(one))
            for one in (*messages, *functions)
        }
        schemas = sum(self._known[id(function)][1] for function in functions)
        schemas += sum(map(self._of_schema, () if tools is None else tools.schemas))
        return (
            _REQUEST
            + sum(self._known[id(one)][1] for one in messages)
            + (schemas and schemas + _TOOLS)
        )

    def _of_part(self, part: ChatMessageContent | KernelFunction) -> int:
        if isinstance(part, ChatMessageContent):
            return self._of_message(part)
        return self._of_schema(
            kernel_function_metadata_to_function_call_format(part.metadata)
        )

    def _of_message(self, message: ChatMessageContent) -> int:
        tokens = _MESSAGE
        for item in message.items:
            if isinstance(item, TextContent):
                tokens += self.tokens_of(item.text)
            elif isinstance(item, FunctionCallContent):
                tokens += (
                    _CALL
                    + self.tokens_of(item.name or "")
                    + self.tokens_of(_text(item.arguments))
                )
            elif isinstance(item, FunctionResultContent):
                tokens += self.tokens_of(_text(item.result))
        return tokens

    def _of_schema(self, tool: Mapping[str, Any]) -> int:
        function: Mapping[str, Any] = tool.get("function") or {}
        tokens = _TOOL + self.tokens_of(
            f"{function.get('name', '')}:{function.get('description') or ''}"
        )
        for name, schema in _properties(function.get("parameters")):
            tokens += _PROPERTY + self.tokens_of(f"{name} {_text(schema.get('type'))}")
            description = _text(schema.get("description"))
            if description:
                tokens += _DESCRIBED + self.tokens_of(description)
            tokens += sum(
                _PROPERTY + self.tokens_of(_text(value))
                for value in schema.get("enum") or ()
            )
        return tokens

    def tokens_of(self, text: str) -> int:
        """Count the tokens of a text, or estimate them."""
        encoding = self._encoding
        return (
            estimated_tokens(text)
            if encoding is None
            else len(encoding.encode_ordinary(text))
        )

    @cached_property
    def _encoding(self) -> Any:
        """The model's encoding, loaded without the network, or None."""
        try:
            tiktoken = import_module("tiktoken")
            registry = import_module("tiktoken.registry")
            name: str = tiktoken.encoding_name_for_model(self._model)
        except (ImportError, KeyError):
            return None
        return (
            tiktoken.get_encoding(name)
            if name in registry.ENCODINGS or _is_cached(name)
            else None
        )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _properties(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
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
"""The encodings of chat models, and the SHA-256 of their files: tiktoken downloads one that is missing or damaged."""

_URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"
"""A file's address, of which the SHA-1 is its name in tiktoken's cache folder."""


def _is_cached(name: str) -> bool:
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if name not in _FILES or folder == "":
        return False
    url = _URL.format(name)
    key = hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest()
    path = Path(folder or Path(tempfile.gettempdir()) / "data-gym-cache") / key
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == _FILES[name]
    except OSError:
        return False
