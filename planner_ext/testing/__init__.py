"""Scripted models for tests: as a Semantic Kernel service without a network, or as an OpenAI-compatible server."""

from planner_ext.testing.script import (
    Script,
    ScriptedAnswer,
    ScriptedCall,
    ScriptedFault,
    ScriptedReply,
    ScriptedRequest,
    ScriptExhaustedError,
    call,
    calls,
    say,
)
from planner_ext.testing.server import ScriptedOpenAIServer
from planner_ext.testing.service import ScriptedChatCompletion, ScriptedPromptExecutionSettings

__all__ = [
    "Script",
    "ScriptExhaustedError",
    "ScriptedAnswer",
    "ScriptedCall",
    "ScriptedChatCompletion",
    "ScriptedFault",
    "ScriptedOpenAIServer",
    "ScriptedPromptExecutionSettings",
    "ScriptedReply",
    "ScriptedRequest",
    "call",
    "calls",
    "say",
]
