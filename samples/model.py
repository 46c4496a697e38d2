"""The model behind the samples: a script, so that each runs offline, or a real one if your environment names it.

    export OPENAI_API_KEY=... OPENAI_CHAT_MODEL_ID=gpt-4.1
    export OPENAI_BASE_URL=http://127.0.0.1:8000/v1         # only for an endpoint other than OpenAI's

These are the names that Semantic Kernel reads. With a key the scripts are not used at all.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion

from planner_ext.testing import Script, ScriptedChatCompletion, ScriptedOpenAIServer, ScriptedRequest

__all__ = ["chat_service", "openai_endpoint", "results"]


def chat_service(script: Script, *, service_id: str = "chat") -> ChatCompletionClientBase:
    """Make the service that a sample adds to its kernel: a real one if there is a key, else one that plays the script.

    Args:
        script: What the model says; see `planner_ext.testing`.
        service_id: The name under which the kernel knows the service.
    """
    if "OPENAI_API_KEY" in os.environ:
        return OpenAIChatCompletion(service_id=service_id)
    return ScriptedChatCompletion(script, service_id=service_id)


@contextmanager
def openai_endpoint(script: Script) -> Generator[None]:
    """Let a program that makes its own `OpenAIChatCompletion` run offline, too: without a key, at a scripted endpoint.

    Args:
        script: What the model says there.
    """
    if "OPENAI_API_KEY" in os.environ:
        yield
        return
    with ScriptedOpenAIServer(script) as server:
        os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": server.url, "OPENAI_CHAT_MODEL_ID": "scripted"}
        yield


def results(request: ScriptedRequest) -> list[str]:
    """List the results of functions so far, oldest first: a scripted reply reads its numbers here."""
    return [str(message["content"]) for message in request.messages if message["role"] == "tool"]
