"""The kernel of a run: made as the user says, and never changed."""

import sys
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.filters import FilterTypes
from semantic_kernel.services.ai_service_selector import AIServiceSelector

from planner_ext.cli.demo_shop import order_kernel
from planner_ext.cli.kernels import (
    SERVICE_ID,
    imported_object,
    openai_service,
    with_service,
)
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.testing import ScriptedChatCompletion, say
from support.values import each_of


async def a_filter(context: Any, next: Any) -> None:
    """A filter as any application has them."""
    await next(context)


@pytest.fixture(autouse=True)
def _here(here: Path) -> None:
    """No OpenAI variables, and an empty directory."""


def test_a_service_is_put_into_a_copy() -> None:
    """The copy has plugins, filters, selector and the other services; the user's kernel is as it was."""
    kernel = order_kernel()
    kernel.add_filter(FilterTypes.FUNCTION_INVOCATION, a_filter)
    kernel.add_service(ScriptedChatCompletion([say("own")], service_id="own"))
    before = (
        dict(kernel.plugins),
        dict(kernel.services),
        list(kernel.function_invocation_filters),
    )
    service = ScriptedChatCompletion([say("other")], service_id=SERVICE_ID)
    copied = with_service(kernel, service)
    assert (
        dict(kernel.plugins),
        dict(kernel.services),
        list(kernel.function_invocation_filters),
    ) == before
    assert copied.plugins == kernel.plugins
    assert copied.function_invocation_filters == kernel.function_invocation_filters
    assert copied.ai_service_selector is kernel.ai_service_selector
    assert list(copied.services) == [SERVICE_ID, "own"]
    copied.add_filter(FilterTypes.FUNCTION_INVOCATION, a_filter)
    copied.plugins.clear()
    assert (
        dict(kernel.plugins),
        dict(kernel.services),
        list(kernel.function_invocation_filters),
    ) == before


def test_a_selector_that_insists_on_its_own_service_is_named() -> None:
    """--model would have no effect, so the run does not start."""

    class Insists(AIServiceSelector):
        def select_ai_service(self, kernel, function=None, arguments=None, type_=None):
            return kernel.services["own"], ScriptedChatCompletion(
                []
            ).get_prompt_execution_settings_class()()

    kernel = Kernel(ai_service_selector=Insists())
    kernel.add_service(ScriptedChatCompletion([say("own")], service_id="own"))
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match="takes 'own', whatever --base-url and --model say",
    ):
        with_service(kernel, ScriptedChatCompletion([]))


@each_of(
    "url", ["http://localhost:8000/v1", "http://127.0.0.7/v1", "http://[::1]:80/v1"]
)
def test_an_endpoint_on_this_machine_needs_no_key(url: str) -> None:
    """Under every name of this machine."""
    assert openai_service(url, "m").client.api_key == "none"


@each_of(
    "url",
    [
        "http://localhost.example/v1",
        "http://10.0.0.1/v1",
        "https://127.0.0.1.example/v1",
    ],
)
def test_any_other_endpoint_needs_one(url: str) -> None:
    """A name that only looks like this machine's is another one's."""
    with pytest.raises(PlannerInvalidConfigurationError, match="No API key for "):
        openai_service(url, "m")


@each_of(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://x/v1",
        "http://",
        "http://[::1/v1",
        "http://x:99999/v1",
    ],
)
def test_an_invalid_url_is_refused(url: str) -> None:
    """Before a client is made of it."""
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match="--base-url must look like http://localhost:8000/v1",
    ):
        openai_service(url, "m")


def test_the_environment_fills_in_what_the_options_leave_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Key, URL and model, by the names that OpenAI and Semantic Kernel give them."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://llm.example/v1")
    monkeypatch.setenv("OPENAI_CHAT_MODEL_ID", "small")
    service = openai_service(None, None)
    assert (service.ai_model_id, service.client.api_key) == ("small", "sk-test")
    assert str(service.client.base_url) == "https://llm.example/v1/"


def test_an_invalid_url_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message names the variable, not an option that was not given."""
    monkeypatch.setenv("OPENAI_BASE_URL", "llm.example")
    with pytest.raises(
        PlannerInvalidConfigurationError, match="OPENAI_BASE_URL must look like"
    ):
        openai_service(None, "m")


def test_a_dotenv_file_is_read_as_semantic_kernel_reads_it(here: Path) -> None:
    """The key may stand in .env of the current directory."""
    (here / ".env").write_text("OPENAI_API_KEY=sk-file\n")
    assert openai_service(None, "m").client.api_key == "sk-file"


LAZY = """
def __getattr__(name):
    if name == "make":
        raise ImportError("install it first")
    raise AttributeError(name)
"""


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (
            "lazy:make",
            r"--app lazy:make: the module raised ImportError: install it first \(.*lazy.py, line 4\)",
        ),
        (
            "lazy.py:make",
            r"there is no module 'lazy.py', .* Leave .py out: lazy:make\.",
        ),
        (
            "../lazy:make",
            r"--app must be module:factory, for instance shop.kernel:make_kernel; got '../lazy:make'",
        ),
        ("apps/lazy:make", r"--app must be module:factory"),
    ],
)
def test_what_cannot_be_imported_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, path: str, problem: str
) -> None:
    """With the way out; a module that makes its attributes when they are asked for may fail then."""
    (here / "lazy.py").write_text(LAZY)
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(sys.modules, "lazy", raising=False)
    with pytest.raises(PlannerInvalidConfigurationError, match=problem):
        imported_object(path, option="--app")
