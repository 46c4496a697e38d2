"""What the model reads as a function's result.

Promises a text that can be sent, for every value and without raising: plain text as it is, everything else as JSON,
never as Python writes it. Must not know functions, calls or runs.
"""

import json
import logging
from typing import Any, cast

from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python
from semantic_kernel.contents import ChatMessageContent, FunctionResultContent, TextContent
from semantic_kernel.contents.kernel_content import KernelContent
from semantic_kernel.functions import FunctionResult

__all__ = ["NOT_WRITABLE", "result_text", "sendable"]

NOT_WRITABLE = "The function returned a result that could not be written as JSON."
"""What the model reads of a result that has no text: one that contains itself, for instance."""

_logger = logging.getLogger(__name__)


def result_text(value: Any) -> str:
    """Write a function's result for the model.

    A string is itself and None is "". Messages and contents are their text, a list of them one below the other.
    Everything else is compact JSON, non-ASCII characters kept: models, dataclasses, dates, decimals, enumerations and
    sets as pydantic writes them, not-a-number and the infinities as null, bytes as text or base64, objects unknown to
    it as the string that ``str`` gives.

    Args:
        value: Anything.

    Returns:
        Text that can be encoded as UTF-8; `NOT_WRITABLE` where there is no other.
    """
    try:
        return sendable(_text(value))
    except Exception:  # a result may be any object, and its methods may raise anything
        _logger.warning("A result of type %s could not be written as JSON.", type(value).__name__)
        return NOT_WRITABLE


def sendable(text: str) -> str:
    """Join surrogate pairs, and replace lone surrogates, which UTF-8 cannot encode."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case str():
            return str.__str__(value)
        case FunctionResult():
            return _text(value.value)
        case KernelContent():
            return _content_text(value)
        case [KernelContent(), *rest] if all(isinstance(item, KernelContent) for item in rest):
            return "\n".join(_content_text(item) for item in cast("list[KernelContent]", value))
        case _:
            return _json(value)


def _content_text(content: KernelContent) -> str:
    match content:
        case ChatMessageContent():
            return "".join(item.text for item in content.items if isinstance(item, TextContent))
        case FunctionResultContent():
            return _text(content.result)
        case _:
            return str(content)


def _json(value: Any) -> str:
    try:
        return to_json(value, inf_nan_mode="null", fallback=str).decode()
    except PydanticSerializationError:
        # Bytes or surrogates that are no UTF-8; the slower way accepts both.
        keyed = _with_sendable_keys(value)
        plain = to_jsonable_python(keyed, inf_nan_mode="null", bytes_mode="base64", fallback=str)
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _with_sendable_keys(value: Any) -> Any:
    match value:
        case dict():
            items = cast("dict[Any, Any]", value).items()
            return {sendable(k) if isinstance(k, str) else k: _with_sendable_keys(v) for k, v in items}
        case list():
            return [_with_sendable_keys(item) for item in cast("list[Any]", value)]
        case _:
            return value
