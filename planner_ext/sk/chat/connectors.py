"""What Semantic Kernel's connectors, and the providers behind them, refuse or lose of a conversation.

One table, by the module of a connector's class, so that no SDK need be installed. A
connector that is not in it gets messages as they are.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Final, Literal

from semantic_kernel.contents import AuthorRole, ChatMessageContent
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.core.values import frozen

_USER = AuthorRole.USER
_ASSISTANT = AuthorRole.ASSISTANT
_TOOL = AuthorRole.TOOL

_Turn = tuple[AuthorRole | None, AuthorRole | None]
"""The roles of two neighbouring messages; None is the start or the end."""

_CONTINUE = (ChatMessageContent(role=_USER, content="Please continue."),)
_NOTED = (ChatMessageContent(role=_ASSISTANT, content="OK."),)
_RESULTS = frozenset({(_TOOL, _TOOL)})
_ROLES = _RESULTS | {(_USER, _USER), (_ASSISTANT, _ASSISTANT)}


@frozen
class Connector:
    """The properties of a connector; the defaults fit OpenAI's and unknown ones, which need nothing.

    Attributes:
        provider: Its provider in ``genai-prices``, or "".
        takes_none: Whether its requests can send the tool choice "none".
        needs_tools: Whether its provider refuses calls and results in a request that
            offers no function.
        needs_description: Whether its SDK refuses a function without a description.
        instructions: How it sends the roles system and developer: as they ``differ``,
            all as the ``system``'s, or as ``one`` message before all others.
        takes_blank: Whether its provider accepts blank text.
        ids: The ids of calls that its provider accepts, if each occurs once; None
            accepts all.
        separator: Between plugin and function in the names of calls, which it would
            write otherwise than elsewhere; None leaves names to the connector.
        first_text: When it sends only the first text of a message; None never.
        joins: Which neighbouring messages it must join into one.
        between: What it must put between two messages.
        says_calls: Whether its finish reasons tell replies with calls from others.
    """

    provider: str = ""
    takes_none: bool = True
    needs_tools: bool = False
    needs_description: bool = False
    instructions: Literal["differ", "system", "one"] = "differ"
    takes_blank: bool = True
    ids: re.Pattern[str] | None = None
    separator: str | None = None
    first_text: Literal["always", "without_images"] | None = None
    joins: frozenset[_Turn] = frozenset()
    between: Mapping[_Turn, Sequence[ChatMessageContent]] = field(
        default_factory=dict[_Turn, Sequence[ChatMessageContent]]
    )
    says_calls: bool = True


_UNKNOWN: Final = Connector()

_OPENAI: Final = Connector(provider="openai")

NEUTRAL: Final = (_OPENAI, _UNKNOWN)
"""Connectors that take messages as they are."""

_PACKAGE = "semantic_kernel.connectors.ai."

_KNOWN = {
    # The API accepts the choice "none", but Semantic Kernel's settings refuse it.
    "anthropic": Connector(
        provider="anthropic",
        takes_none=False,
        needs_tools=True,
        instructions="one",
        takes_blank=False,
        ids=re.compile("[a-zA-Z0-9_-]+"),
        first_text="always",
        joins=_RESULTS,
    ),
    "azure_ai_inference": Connector(provider="azure", first_text="without_images"),
    # There is no choice "none": Semantic Kernel sends no function at all for it.
    "bedrock": Connector(
        provider="aws",
        takes_none=False,
        needs_tools=True,
        needs_description=True,
        instructions="one",
        takes_blank=False,
        ids=re.compile("[a-zA-Z0-9_-]{1,64}"),
        joins=_ROLES | {(_TOOL, _USER)},
        between={(None, _ASSISTANT): _CONTINUE},
    ),
    # Semantic Kernel joins results here, too, but it changes the caller's messages.
    "google": Connector(
        provider="google",
        instructions="one",
        takes_blank=False,
        separator="__",
        joins=_ROLES,
        between={(None, _ASSISTANT): _CONTINUE, (_ASSISTANT, None): _CONTINUE},
        says_calls=False,
    ),
    "mistral_ai": Connector(
        provider="mistral",
        instructions="one",
        takes_blank=False,
        ids=re.compile("[a-zA-Z0-9]{9}"),
        between={(_TOOL, _USER): _NOTED, (_ASSISTANT, None): _CONTINUE},
    ),
    "ollama": Connector(
        takes_none=False,
        instructions="system",
        separator="-",
        first_text="always",
        says_calls=False,
    ),
    "open_ai": _OPENAI,
}


def connector_of(service: AIServiceClientBase) -> Connector:
    """Return the properties of a connector, its base class, or the one in a wrapper."""
    while (inner := getattr(service, "inner", None)) is not None:
        service = inner
    modules = (kind.__module__ for kind in type(service).__mro__)
    known = next((module for module in modules if module.startswith(_PACKAGE)), "")
    return _KNOWN.get(known.removeprefix(_PACKAGE).partition(".")[0], _UNKNOWN)
