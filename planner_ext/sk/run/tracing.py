"""Describes a run of Semantic Kernel to `planner_ext.engine.telemetry`; loaded only where somebody listens."""

from typing import Any

from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.utils.telemetry.model_diagnostics.decorators import (
    are_model_diagnostics_enabled,
    are_sensitive_events_enabled,
)

from planner_ext.engine.telemetry import Invocation
from planner_ext.sk.messages import part_of
from planner_ext.sk.run.options import CheckedOptions

_SERVICE_NAME = "FunctionInvokingChatCompletion"
"""The agent that a service is, and a handler or session above it."""

_PROVIDERS = {
    "azureai": "azure.ai.inference",
    "bedrock": "aws.bedrock",
    "googleai": "gcp.gemini",
    "mistralai": "mistral_ai",
    "vertexai": "gcp.vertex_ai",
}
"""OpenTelemetry's names for providers, where Semantic Kernel's differ."""


def invocation_of(
    service: ChatCompletionClientBase, planner: object | None, options: CheckedOptions
) -> Invocation:
    """Return the spans and metrics of a run over a service; ``planner`` is None at the other doors."""
    provider = getattr(service, "MODEL_PROVIDER_NAME", type(service).__name__)
    door = _SERVICE_NAME if planner is None else type(planner).__name__
    return Invocation(
        options.name or door,
        agent_id=options.agent_id,
        provider=_PROVIDERS.get(provider, provider),
        model=service.ai_model_id,
        # With its diagnostics on, Semantic Kernel's connectors write these spans.
        chats=not are_model_diagnostics_enabled(),
        answered_by=_answered_by,
        sensitive=are_sensitive_events_enabled(),
    )


def _answered_by(reply: Any) -> str | None:
    model = part_of(part_of(reply, "inner_content"), "model")
    return model if isinstance(model, str) else None
