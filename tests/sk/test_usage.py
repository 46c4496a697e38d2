"""What connectors report of tokens, each in its own words: read, summed, never believed beyond reason."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel
from semantic_kernel.connectors.ai.completion_usage import CompletionUsage
from semantic_kernel.contents import AuthorRole, ChatMessageContent

from planner_ext.engine.document import dump_message
from planner_ext.iteration import Usage
from planner_ext.sk.messages import (
    EstimatedUsage,
    add_reported,
    as_reported,
    load_message,
    merge_reported,
    read_usage,
    usage_in,
    with_usage,
)
from support.values import each_of


class AnthropicUsage(BaseModel):
    """As the anthropic SDK has it."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    service_tier: str | None = None


def tokens(prompt: int, completion: int, cached: int = 0) -> Usage:
    return Usage(
        prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached
    )


STOCK = CompletionUsage(
    prompt_tokens=12,
    completion_tokens=3,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=8),
)
SHAPES: dict[str, tuple[Any, Usage]] = {
    "stock": (STOCK, tokens(12, 3, 8)),
    "tuple of one": (
        (CompletionUsage(prompt_tokens=12, completion_tokens=3),),
        tokens(12, 3),
    ),
    "tuple as JSON": ([{"prompt_tokens": 12, "completion_tokens": 3}], tokens(12, 3)),
    "anthropic": (AnthropicUsage(input_tokens=12, output_tokens=3), tokens(12, 3)),
    "anthropic, cached": (
        AnthropicUsage(
            input_tokens=2,
            output_tokens=3,
            cache_creation_input_tokens=4,
            cache_read_input_tokens=6,
        ),
        tokens(12, 3, 6),
    ),
    "anthropic, streamed": ({"input_tokens": 12, "output_tokens": 3}, tokens(12, 3)),
    "responses": (
        {
            "input_tokens": 12,
            "output_tokens": 3,
            "input_tokens_details": {"cached_tokens": 8},
        },
        tokens(12, 3, 8),
    ),
    "bedrock": (
        {"inputTokens": 2, "outputTokens": 3, "cacheReadInputTokens": 10},
        tokens(12, 3, 10),
    ),
    "google": (
        SimpleNamespace(
            prompt_token_count=12,
            candidates_token_count=1,
            thoughts_token_count=2,
            cached_content_token_count=5,
        ),
        tokens(12, 3, 5),
    ),
    "ollama": ({"prompt_eval_count": 12, "eval_count": 3}, tokens(12, 3)),
    "ollama, prompt cached": ({"eval_count": 3}, tokens(0, 3)),
    "half and total": (
        {"prompt_tokens": 12, "completion_tokens": None, "total_tokens": 15},
        tokens(12, 3),
    ),
    "total alone": ({"total_tokens": 15, "prompt_tokens": None}, tokens(15, 0)),
    "nones": (CompletionUsage(), tokens(0, 0)),
}


@each_of("shape", SHAPES)
def test_the_field_names_of_every_connector_are_read(shape: str) -> None:
    """Tokens sent, received and cached are read out of each connector's own shape."""
    reported, expected = SHAPES[shape]
    assert read_usage(reported) == expected


@each_of("shape", SHAPES)
def test_a_sum_of_two_reports_reads_as_the_sum_of_both(shape: str) -> None:
    """Two requests' reports add up in any shape, and the sum can be written as JSON."""
    reported, expected = SHAPES[shape]
    total = add_reported(reported, reported)
    assert read_usage(total) == expected + expected
    message = ChatMessageContent(
        role=AuthorRole.ASSISTANT, content="x", metadata={"usage": total}
    )
    if shape != "google":  # an object of the SDK, which never is a connector's report
        written = json.loads(json.dumps(dump_message(message)))
        assert (
            read_usage(load_message(written).metadata["usage"]) == expected + expected
        )


@each_of("shape", ["stock", "anthropic, cached", "anthropic, streamed"])
def test_a_sum_keeps_the_connectors_type(shape: str) -> None:
    """A connector's own model or mapping stays one."""
    reported, _ = SHAPES[shape]
    assert type(add_reported(reported, reported)) is type(reported)


def test_reports_of_two_connectors_add_up_as_semantic_kernels_own() -> None:
    """What names tokens differently is summed by what it says."""
    total = add_reported(SHAPES["anthropic, cached"][0], STOCK)
    assert type(total) is CompletionUsage
    assert read_usage(total) == tokens(24, 6, 14)


def test_a_sum_keeps_its_estimated_part() -> None:
    """A sum with an estimate in it says how much of it was estimated, whichever came first."""
    estimated = as_reported(
        Usage(prompt_tokens=5, completion_tokens=2, estimated_tokens=7)
    )
    for total in (add_reported(STOCK, estimated), add_reported(estimated, STOCK)):
        assert isinstance(total, EstimatedUsage)
        assert total.estimated_tokens == 7
        assert total.prompt_tokens == 17
        assert total.completion_tokens == 5
        assert total.model_dump()["estimated_tokens"] == 7


def test_reports_of_one_stream_are_cumulative() -> None:
    """Of several reports of one reply the larger number of each counts, a tuple of one included."""
    first = (CompletionUsage(prompt_tokens=12, completion_tokens=1),)
    last = (CompletionUsage(prompt_tokens=12, completion_tokens=3),)
    assert read_usage(merge_reported(first, last)) == tokens(12, 3)
    assert read_usage(
        merge_reported({"input_tokens": 12}, {"input_tokens": 12, "output_tokens": 3})
    ) == tokens(12, 3)


@each_of(
    ("response", "expected"),
    [
        (SimpleNamespace(usage_metadata=SHAPES["google"][0]), tokens(12, 3, 5)),
        ({"usage": SHAPES["bedrock"][0]}, tokens(12, 3, 10)),
        ({"metadata": {"usage": SHAPES["bedrock"][0]}}, tokens(12, 3, 10)),
        (SimpleNamespace(usage=SHAPES["anthropic, cached"][0]), tokens(12, 3, 6)),
        (SimpleNamespace(eval_count=3, prompt_eval_count=None), tokens(10, 3)),
        (None, tokens(10, 1)),
        ("text", tokens(10, 1)),
    ],
    ids=[
        "google",
        "bedrock",
        "bedrock streamed",
        "anthropic",
        "ollama",
        "none",
        "text",
    ],
)
def test_what_a_connector_leaves_out_is_read_from_the_sdks_response(
    response: Any, expected: Usage
) -> None:
    """Thoughts, caches and halves that a connector drops are in the response that it hands on."""
    reported = CompletionUsage(prompt_tokens=10, completion_tokens=1)
    message = ChatMessageContent(
        role=AuthorRole.ASSISTANT,
        content="x",
        metadata={"usage": reported},
        inner_content=response,
    )
    usage = usage_in(message)
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        max(expected.prompt_tokens, 10),
        max(expected.completion_tokens, 1),
    )
    assert read_usage(with_usage(message, usage).metadata["usage"]) == usage
    assert message.metadata["usage"] is reported


GARBAGE = [
    True,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    "7",
    10**400,
    2**53,
    [3],
    {"tokens": 3},
    object(),
    b"3",
]


@each_of("value", GARBAGE, ids=lambda value: str(value)[:9])
@pytest.mark.parametrize(
    "names",
    [("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")],
    ids=str,
)
def test_an_invalid_count_is_neither_counted_nor_handed_on(
    value: Any, names: tuple[str, str]
) -> None:
    """Only a whole number above 0 that JSON can carry is a count; metadata with anything else is copied without it."""
    reported = {names[0]: value, names[1]: 3}
    assert read_usage(reported) == tokens(0, 3)
    message = ChatMessageContent(
        role=AuthorRole.ASSISTANT, content="x", metadata={"usage": reported}
    )
    told = with_usage(message, read_usage(reported)).metadata["usage"]
    assert json.loads(told.model_dump_json())["completion_tokens"] == 3
    assert read_usage(told) == tokens(0, 3)
    assert read_usage(add_reported(reported, reported)).completion_tokens == 6


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [
                    "prompt_tokens",
                    "completion_tokens",
                    "input_tokens",
                    "total_tokens",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(first=values, second=values)
def test_every_report_is_read_summed_and_merged_without_an_error(
    first: Any, second: Any
) -> None:
    """No report raises, and none makes a count that is negative or no whole number."""
    for reported in (first, add_reported(first, second), merge_reported(first, second)):
        usage = read_usage(reported)
        assert all(
            isinstance(n, int) and n >= 0
            for n in (usage.prompt_tokens, usage.completion_tokens)
        )
        assert usage.cached_tokens <= usage.prompt_tokens


def test_a_report_nested_too_deep_is_not_handed_on() -> None:
    """A mapping of a thousand levels is not handed on, and raises no RecursionError."""
    deep: dict[str, Any] = {}
    for _ in range(1000):
        deep = {"x": deep}
    message = ChatMessageContent(
        role=AuthorRole.ASSISTANT,
        content="x",
        metadata={"usage": {"prompt_tokens": 4, "completion_tokens": 1, **deep}},
    )
    assert with_usage(message, tokens(4, 1)).metadata["usage"] == CompletionUsage(
        prompt_tokens=4, completion_tokens=1
    )
