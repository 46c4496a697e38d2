"""Fixtures of the session's tests."""

from typing import Any

import pytest

from planner_ext.session import AutomaticToolUseConfig, ToolUseSession
from planner_ext.testing import Script, ScriptedChatCompletion
from support.session import CLOSED, Talk, Talks, Tools, kernel_of


@pytest.fixture(params=[False, True], ids=["plain", "streamed"])
def streamed(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def talk(streamed: bool) -> Talks:
    """Make a session of a script; every test with it runs plain and streamed."""

    def talk(
        script: Script, config: AutomaticToolUseConfig = CLOSED, **options: Any
    ) -> Talk:
        tools = Tools()
        service = (
            script
            if isinstance(script, ScriptedChatCompletion)
            else ScriptedChatCompletion(script)
        )
        session = ToolUseSession(
            kernel_of(service, tools), tool_use_config=config, **options
        )
        return Talk(session, service, tools, streamed)

    return talk
