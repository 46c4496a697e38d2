"""What OpenAI answers, read into the openai client's own types by pydantic instead of field by field in Python.

The client takes any answer as it is and builds its types by hand, which costs more than all else about a streamed
chunk. An answer that is what the types say is read by pydantic into an equal object, five to ten times faster; any
other is left to the client, so that nothing is refused here which it would take.
"""

from typing import Any, TypeVar

from openai import BaseModel
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError

__all__ = ["ReadChunk", "ReadCompletion"]

M = TypeVar("M", bound=BaseModel)


class ReadCompletion(ChatCompletion):
    """What to ask the client for where a `ChatCompletion` is wanted; that is also what comes."""

    @classmethod
    def construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Any:
        """Read a response: the client calls this with its JSON."""
        return _read(ChatCompletion, values)


class ReadChunk(ChatCompletionChunk):
    """What to ask the client for where a `ChatCompletionChunk` is wanted; that is also what comes."""

    @classmethod
    def construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Any:
        """Read a chunk: the client calls this with its JSON."""
        return _read(ChatCompletionChunk, values)


def _read(kind: type[M], values: dict[str, Any]) -> M:
    try:
        return kind.model_validate(values)
    except ValidationError:
        return kind.construct(**values)
