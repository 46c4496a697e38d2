"""The errors of a request: how a connector's exception is named, and what it says of the endpoint.

How far a request came decides what is charged, see `planner_ext.core.facts.Failure`:

    unsent      nothing was sent, or no connection made
    refused     the server answered with an HTTP error
    processed   it may have been: a reply began, or the connection broke after sending

After 408, 429, 5xx, no connection and a broken one a kept run waits for the endpoint.
Connectors have clients of their own, so their errors are known by name and by status.
"""

import math
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime

from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.exceptions import KernelException, ServiceResponseException

from planner_ext.core.causes import causes_of, headers_of, status_of
from planner_ext.core.errors import described
from planner_ext.core.facts import Failure
from planner_ext.sk.chat.transport import address_of, endpoint_of
from planner_ext.sk.errors import (
    InvalidReplyError,
    PlannerInvalidConfigurationError,
    PromptTooLargeError,
    ServiceCallError,
)

_NOT_SENT = (PlannerInvalidConfigurationError, PromptTooLargeError)
"""The errors of this package that mean that the request was not sent."""

_NOT_CONNECTED = frozenset(
    {
        "ClientConnectorError",  # aiohttp
        "ConnectError",  # httpx
        "ConnectTimeout",
        "ConnectTimeoutError",  # botocore
        "ConnectionRefusedError",
        "EndpointConnectionError",
        "NewConnectionError",  # urllib3
        "PoolTimeout",
        "ServiceRequestError",  # azure-core
        "gaierror",
    }
)
"""Classes of the clients' errors that mean that no connection was made."""

_BROKEN = frozenset(
    {
        "APIConnectionError",  # openai, anthropic
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",
        "ConnectionError",
        "HTTPClientError",  # botocore
        "ServiceResponseError",  # azure-core
        "TimeoutError",
        "TransportError",  # httpx
    }
)
"""Classes that mean that a connection broke, or that no reply came in time."""

_NO_REPLY = (
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    KeyError,
    AssertionError,
)
"""The errors that connectors raise on an unexpected response."""


def named(error: Exception, service: ChatCompletionClientBase) -> Exception:
    """Return the error of this package for a connector's; Semantic Kernel's specific ones stay as they are."""
    cause: BaseException = error
    if isinstance(error, KernelException):
        if type(error) is not ServiceResponseException:
            return error
        cause = error.__cause__ or error
    name = f"{type(service).__name__} {service.ai_model_id!r}"
    # The sentence around it has a full stop.
    seen = _without_key(described(cause), service).removesuffix(".")
    if isinstance(cause, _NO_REPLY):
        return InvalidReplyError(
            f"Expected a chat completion from {name}; its response could not be read as one ({seen}). Semantic "
            "Kernel's connector may not know this kind of response; else check the base URL, and that the endpoint "
            "speaks the connector's protocol. The history is as it was: the request can be made again."
        )
    address = address_of(service)
    at = f" Its endpoint is {address}." if address else ""
    failed = ServiceCallError(
        f"The request to {name} failed: {seen}.{at}{_check(cause)} The history is as it was: the request can be made "
        "again."
    )
    if _is_out(error):
        failed.outage = (endpoint_of(service), _retry_after(error))
    return failed


def failure_of(error: BaseException) -> Failure:
    """Return how far a request came that ended in an error."""
    if _is_any(error, _NOT_CONNECTED):
        return "unsent"
    if any(isinstance(each, _NOT_SENT) for each in causes_of(error)):
        return "unsent"
    if (status_of(error) or 0) < 400:
        return "processed"
    return "refused"


def _is_out(error: BaseException) -> bool:
    status = status_of(error) or 0
    if status >= 400:
        return status in (408, 429) or status >= 500
    return _is_any(error, _NOT_CONNECTED | _BROKEN) and not _is_of_another_loop(error)


def _retry_after(error: BaseException) -> float:
    """Return the seconds of ``Retry-After``, or of OpenAI's ``retry-after-ms``; 0.0 without."""
    for headers in headers_of(error):
        in_milliseconds = _number(headers.get("retry-after-ms"))
        if in_milliseconds is not None:
            return in_milliseconds / 1000
        given = headers.get("retry-after")
        seconds = _number(given)
        if seconds is not None:
            return seconds
        with suppress(ValueError, OverflowError):  # of a date with too long a number
            date = parsedate_to_datetime(str(given))
            return max(0.0, date.timestamp() - time.time())
    return 0.0


def _number(given: object) -> float | None:
    """Read a number of at least 0 from the text of a header; None if it has none."""
    with suppress(ValueError):
        number = float(str(given))
        if math.isfinite(number):
            return max(0.0, number)
        return None
    return None


def _without_key(text: str, service: ChatCompletionClientBase) -> str:
    """Hide the client's key: some endpoints repeat it in their refusal."""
    key: object = getattr(getattr(service, "client", None), "api_key", None)
    if isinstance(key, str) and key:
        return text.replace(key, "***")
    return text


_CHECKS = {
    401: " The endpoint refused the key: check api_key, and that base_url is the endpoint that the key is for.",
    403: " The endpoint forbids it: check the rights of the api_key, and base_url.",
    404: " The endpoint does not know the address or the model: check base_url, its path, and the model's name.",
}


def _check(cause: BaseException) -> str:
    """Say which settings to check after an endpoint's error; "" if none cause it."""
    status = status_of(cause)
    if status is not None:
        return _CHECKS.get(status, "")
    if _is_of_another_loop(cause):
        return (
            " The service's client made requests on another event loop before. Stay on one: call invoke_sync alone, or "
            "await every run within one asyncio.run; or give each loop a service of its own."
        )
    if _is_any(cause, _NOT_CONNECTED):
        return " No connection was made: check base_url, its host and port, and that the endpoint runs."
    return ""


def _is_of_another_loop(error: BaseException) -> bool:
    return any(
        isinstance(each, RuntimeError) and "event loop" in str(each).lower()
        for each in causes_of(error)
    )


def _is_any(error: BaseException, names: frozenset[str]) -> bool:
    """Return whether an error, or one of its causes, is of a class of these names."""
    return any(
        kind.__name__ in names
        for each in causes_of(error)
        for kind in type(each).__mro__
    )
