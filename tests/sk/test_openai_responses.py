"""What OpenAI answers is read into the objects that the openai client would have made."""

from typing import Any

from openai import BaseModel
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from planner_ext.core.values import Usage
from planner_ext.sk.chat.prepared import ReadChunk, ReadCompletion
from planner_ext.testing import call, calls, say
from planner_ext.testing.script import completion_body, completion_chunks
from support.values import each_of

REPLIES = [
    say("Grüße."),
    say(""),
    calls(call("t-add", {"a": 1}), call("t-echo"), text="Looking."),
]
TOKENS = Usage(prompt_tokens=3, completion_tokens=2)
BODIES = [completion_body(reply, index=0, model="m", usage=TOKENS) for reply in REPLIES]
CHUNKS = [
    chunk
    for reply in REPLIES
    for chunk in completion_chunks(
        reply, index=0, model="m", usage=TOKENS, chunk_size=4
    )
]
CITED = {"citations": [{"title": "A"}], "intent": "[]"}
FILTERED = {"hate": {"filtered": False, "severity": "safe"}}


def completion(message: Any, **fields: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "stop",
        **fields.pop("choice", {}),
    }
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        **fields,
    }


VALID = [
    completion(
        {"role": "assistant", "content": "Hi.", "context": CITED},
        choice={"content_filter_results": FILTERED},
    ),
    completion(
        {"role": "assistant", "content": "Hi."},
        prompt_filter_results=[{"prompt_index": 0}],
        service_tier="auto",
    ),
    completion(
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "f", "arguments": "{}"},
        }
    ),
]
ODD = [
    {},
    {"cls": 1, "values": 2},
    completion({"role": "assistant", "content": "Hi."}, created="1"),
    completion({"role": "assistant", "content": "Hi."}, created=1.0),
    {"choices": None},
    {"choices": []},
    completion({"role": "robot", "content": "Hi."}),
    completion({"content": ["Hi."]}),
    completion(
        {"role": "assistant", "content": "Hi."}, choice={"finish_reason": "bored"}
    ),
    completion(
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        }
    ),
    completion({"role": "assistant", "content": "Hi."}, usage={"prompt_tokens": None}),
]


def same(ours: Any, theirs: BaseModel) -> bool:
    return (type(ours), repr(ours), given(ours)) == (
        type(theirs),
        repr(theirs),
        given(theirs),
    )


def given(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(exclude_unset=True, warnings=False)


@each_of("body", [*BODIES, *VALID, *ODD])
def test_a_response_is_what_the_client_makes_of_it(body: dict[str, Any]) -> None:
    """Whether it is what the types say or not, with what they do not say in it, nested and at the top."""
    assert same(ReadCompletion.construct(**body), ChatCompletion.construct(**body))


@each_of(
    "body",
    [
        *CHUNKS,
        {},
        {"choices": [{"delta": {"role": "robot"}}]},
        {"choices": [{}]},
        {"created": "1"},
    ],
)
def test_a_chunk_is_what_the_client_makes_of_it(body: dict[str, Any]) -> None:
    """Pieces of text and of calls, ends, usage, and invalid chunks."""
    assert same(ReadChunk.construct(**body), ChatCompletionChunk.construct(**body))
