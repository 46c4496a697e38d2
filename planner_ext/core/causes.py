"""What an error and its causes say of an endpoint. Clients name it differently, and are known by that alone."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from planner_ext.core.errors import PlannerExtError


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """List an error and what it was raised from, or amid."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def outage_in(ended: object) -> PlannerExtError | None:
    """Return the outage of an endpoint with which a function ended, or None."""
    for cause in causes_of(getattr(ended, "exception", None)):
        if isinstance(cause, PlannerExtError) and cause.outage is not None:
            return cause
    return None


def status_of(error: BaseException) -> int | None:
    """Return the status of the HTTP response that an error is about, or None."""
    for each in causes_of(error):
        response: object = getattr(each, "response", None)
        for given in (
            getattr(each, "status_code", None),  # openai, anthropic, azure, mistral
            getattr(response, "status_code", None),  # httpx, requests
            getattr(each, "status", None),  # aiohttp
            getattr(each, "code", None),  # google
            _of_botocore(response, "HTTPStatusCode"),
        ):
            if isinstance(given, int) and 100 <= given <= 599:
                return int(given)
    return None


def headers_of(error: BaseException) -> Iterator[Mapping[str, Any]]:
    """List the headers of the HTTP responses that an error and its causes are about."""
    for each in causes_of(error):
        response: object = getattr(each, "response", None)
        for given in (
            getattr(response, "headers", None),
            getattr(each, "headers", None),  # aiohttp, mistral
            _of_botocore(response, "HTTPHeaders"),
        ):
            if hasattr(given, "get"):
                yield cast("Mapping[str, Any]", given)


def _of_botocore(response: object, name: str) -> object:
    if not isinstance(response, dict):
        return None
    metadata: object = cast("dict[str, object]", response).get("ResponseMetadata")
    if not isinstance(metadata, dict):
        return None
    return cast("dict[str, object]", metadata).get(name)
