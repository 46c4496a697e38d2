"""How many tokens a request sends: counted where the encoding is at hand, else estimated, and never with a network."""

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)
from semantic_kernel.functions import kernel_function
from tiktoken import registry

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
)
from planner_ext.errors import PromptTooLargeError
from planner_ext.sk.chat.prices import RequestMeter, estimated_tokens
from planner_ext.sk.functions.toolset import ToolSet
from planner_ext.testing import ScriptedChatCompletion, say
from support.values import each_of


def message(role: str, *items: Any) -> ChatMessageContent:
    return ChatMessageContent(role=AuthorRole(role), items=list(items))


def text(role: str, words: str) -> ChatMessageContent:
    return message(role, TextContent(text=words))


def sizer(limit: int = 1, *, model: str = "scripted") -> RequestMeter:
    return RequestMeter(
        ScriptedChatCompletion([], ai_model_id=model),
        PromptExecutionSettings(),
        max_prompt_tokens=limit,
    )


def size(
    messages: list[ChatMessageContent],
    tools: ToolSet | None = None,
    *,
    model: str = "scripted",
) -> int:
    """Read the count off the error: any prompt has more than one token."""
    with pytest.raises(PromptTooLargeError) as caught:
        sizer(model=model).check(messages, tools)
    return caught.value.prompt_tokens


def tools_of(plugin: object) -> ToolSet:
    kernel = Kernel()
    kernel.add_plugin(plugin, "p")
    return ToolSet(
        kernel, BoundedFunctionChoiceBehavior.Auto(), PromptExecutionSettings()
    )


class Cities:
    @kernel_function(name="temperature", description="")
    def temperature(self, city: str) -> str:
        return city


ASKED = [
    text("system", "You are a helpful assistant."),
    text("user", "What is the temperature in Tokyo?"),
]
ANSWERED = [
    *ASKED,
    message(
        "assistant",
        FunctionCallContent(
            id="c", name="get_temperature", arguments='{"city":"Tokyo"}'
        ),
    ),
    message(
        "tool", FunctionResultContent(id="c", name="get_temperature", result="20.0")
    ),
]


@pytest.mark.parametrize(
    ("messages", "reported"), [(ASKED, 50), (ANSWERED, 75)], ids=["asked", "answered"]
)
def test_the_estimate_is_near_what_the_api_reported(
    messages: list[ChatMessageContent], reported: int
) -> None:
    """For two recorded requests with one function, gpt-4.1-mini reported 50 and 75 prompt tokens: within 10 %."""
    assert size(messages, tools_of(Cities())) == pytest.approx(reported, rel=0.1)


@each_of(
    ("words", "tokens"),
    [
        ("", 0),
        ("What is the largest city in the user country?", 10),
        ("12345678", 3),
        ("a_b", 3),
        ("\n\n\n", 1),
        ("{}", 1),
        ("Übergrößenträger", 5),
        ("東京タワー", 4),
    ],
)
def test_the_estimate_is_made_as_it_says(words: str, tokens: int) -> None:
    """Words, numbers, punctuation, line ends and other alphabets are counted by their own rule each."""
    assert estimated_tokens(words) == tokens


@given(st.text(), st.text())
def test_an_estimate_never_fails_and_grows_with_its_text(
    first: str, second: str
) -> None:
    """Every result of a tool has a size; two texts have no more tokens together than by themselves, nor fewer."""
    one, other = estimated_tokens(first), estimated_tokens(second)
    assert max(one, other) <= estimated_tokens(f"{first} {second}") <= one + other


def test_functions_count() -> None:
    """The schemas that are sent with a request are part of it; without tools they are not."""
    assert size(ASKED, tools_of(Cities())) > size(ASKED)


def test_everything_of_a_schema_counts() -> None:
    """Descriptions, enumerated values and nested properties are counted, in the application's own schemas too."""

    def tool(parameters: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    def with_tool(parameters: dict[str, Any]) -> int:
        own: Any = ScriptedChatCompletion([]).instantiate_prompt_execution_settings(
            tools=[tool(parameters)]
        )
        return size(ASKED, ToolSet(Kernel(), BoundedFunctionChoiceBehavior.Auto(), own))

    kind = {"type": "string"}
    steps = [
        {},
        {"properties": {"a": kind}},
        {"properties": {"a": {**kind, "description": "A city."}}},
        {
            "properties": {
                "a": {**kind, "description": "A city.", "enum": ["Oslo", "Rome"]}
            }
        },
        {
            "properties": {
                "a": {
                    **kind,
                    "description": "A city.",
                    "enum": ["Oslo", "Rome"],
                    "items": {"properties": {}},
                }
            }
        },
    ]
    sizes = [with_tool(step) for step in steps]
    assert sizes[:4] == sorted(set(sizes[:4]))
    assert sizes[4] == sizes[3]
    nested = {
        "properties": {"a": {"type": "array", "items": {"properties": {"b": kind}}}}
    }
    assert with_tool(nested) > with_tool({"properties": {"a": {"type": "array"}}})


def test_the_limit_itself_is_allowed() -> None:
    """A prompt of exactly max_prompt_tokens is sent; one token more is not. Count, limit and way are in the error."""
    tokens = size(ASKED)
    sizer(tokens).check(ASKED, None)
    with pytest.raises(PromptTooLargeError) as caught:
        sizer(tokens - 1).check(ASKED, None)
    assert (caught.value.prompt_tokens, caught.value.max_prompt_tokens) == (
        tokens,
        tokens - 1,
    )
    assert (
        f"{tokens} tokens (an estimate), and max_prompt_tokens is {tokens - 1}"
        in str(caught.value)
    )


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the texts that are counted."""
    seen: list[str] = []

    def count(words: str) -> int:
        seen.append(words)
        return 1

    monkeypatch.setattr("planner_ext.sk.chat.prices.estimated_tokens", count)
    return seen


async def test_no_limit_counts_nothing(counted: list[str]) -> None:
    """A run without a limit, a price or an estimate does not look at the size of its requests."""
    kernel = Kernel(services=ScriptedChatCompletion([say("Hello.")]))
    planner = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(plan=False)
    )
    assert (await planner.invoke(kernel, "Hello?")).final_answer == "Hello."
    assert counted == []


def test_what_was_counted_is_not_counted_again(counted: list[str]) -> None:
    """From request to request only new messages are counted, and each function once."""
    sized, tools = sizer(1000), tools_of(Cities())
    sized.check(ASKED, tools)
    before = len(counted)
    sized.check(ANSWERED, tools)
    assert counted[before:] == ["get_temperature", '{"city":"Tokyo"}', "20.0"]


def test_a_replaced_history_is_counted_again(counted: list[str]) -> None:
    """Where the beginning of a history changes, what follows is counted again, and nothing of the old remains."""
    sized = sizer(1000)
    sized.check(ANSWERED, None)
    counted.clear()
    sized.check([ASKED[0], text("user", "Short.")], None)
    assert counted == ["Short."]
    with pytest.raises(PromptTooLargeError) as caught:
        other = sizer(1)
        other.check(ANSWERED, None)
    assert caught.value.prompt_tokens == 3 + 4 * 4 + 8 + 5


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def encodings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_network: None
) -> dict[str, Any]:
    """The encodings that tiktoken has loaded: none; its cache folder is empty."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    loaded: dict[str, Any] = {}
    monkeypatch.setattr(registry, "ENCODINGS", loaded)
    return loaded


def by_the_byte(name: str) -> tiktoken.Encoding:
    """An encoding in which each byte is a token."""
    ranks = {bytes([value]): value for value in range(256)}
    return tiktoken.Encoding(
        name, pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens={"<|end|>": 256}
    )


def test_a_loaded_encoding_counts(encodings: dict[str, Any]) -> None:
    """Where tiktoken has the model's encoding, texts are counted by it, and the error says which it was."""
    encodings["o200k_base"] = by_the_byte("o200k_base")
    with pytest.raises(
        PromptTooLargeError, match="counted in the encoding o200k_base"
    ) as caught:
        sizer(model="gpt-4.1").check([text("user", "<|end|> äh")], None)
    assert caught.value.prompt_tokens == 3 + 4 + len("<|end|> äh".encode())


@pytest.mark.parametrize(
    "model", ["gpt-4.1", "gpt-4", "gpt-oss-120b", "davinci-002", "scripted"]
)
def test_an_encoding_that_is_not_at_hand_is_not_fetched(
    encodings: dict[str, Any], model: str
) -> None:
    """Without the file nothing is downloaded: the prompt is estimated, known model or not."""
    with pytest.raises(PromptTooLargeError, match="an estimate"):
        sizer(model=model).check(ASKED, None)


@pytest.mark.parametrize("folder", ["given", "none"])
def test_a_damaged_file_is_not_at_hand(
    encodings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    folder: str,
) -> None:
    """Tiktoken would fetch a damaged file again, or any where caching is switched off: so it is not asked."""
    url = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
    damaged = tmp_path / hashlib.sha1(url.encode()).hexdigest()
    damaged.write_text("damaged")
    if folder == "none":
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    with pytest.raises(PromptTooLargeError, match="an estimate"):
        sizer(model="gpt-4.1").check(ASKED, None)
    assert damaged.read_text() == "damaged"


def test_a_cached_file_is_at_hand(
    encodings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A whole file in the cache folder is loaded by tiktoken itself."""
    url = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
    whole = b"whole"
    (tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_bytes(whole)
    monkeypatch.setitem(
        __import__("planner_ext.sk.chat.prices", fromlist=["_FILES"])._FILES,
        "o200k_base",
        hashlib.sha256(whole).hexdigest(),
    )
    load: Callable[[str], tiktoken.Encoding] = by_the_byte
    monkeypatch.setattr(tiktoken, "get_encoding", load)
    with pytest.raises(PromptTooLargeError, match="counted in the encoding o200k_base"):
        sizer(model="gpt-4.1").check(ASKED, None)
