"""Models for tests: scripted, as a service or an OpenAI-compatible server; or real, recorded and replayed."""

from planner_ext.testing.cassette import (
    CassetteError,
    Difference,
    ReplayDifferenceError,
)
from planner_ext.testing.fork import fork
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
from planner_ext.testing.service import (
    ScriptedChatCompletion,
    ScriptedPromptExecutionSettings,
)
from planner_ext.testing.tape import Tape, record, replay

__all__ = [
    "CassetteError",
    "Difference",
    "ReplayDifferenceError",
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
    "Tape",
    "call",
    "calls",
    "fork",
    "record",
    "replay",
    "say",
]
