"""Semantic Kernel's messages in and out: nothing of a reply is lost, and nothing that is not ours is changed."""

import json
from collections.abc import Sequence
from typing import Any

from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FinishReason,
    FunctionCallContent,
    FunctionResultContent,
    ImageContent,
    TextContent,
)

from planner_ext.core.values import CallResult, EditedReply
from planner_ext.engine.document import dump_message
from planner_ext.sk.chat.history import render
from planner_ext.sk.chat.reply import accepted_reply
from planner_ext.sk.messages import (
    AssistantMessage,
    assistant_text,
    load_message,
    requested_calls,
    text_of,
)
from support.stock import first_call
from support.values import each_of


def call(
    id: str | None, name: str | None = "t-add", arguments: Any = "{}", **more: Any
) -> FunctionCallContent:
    return FunctionCallContent(id=id, name=name, arguments=arguments, **more)


def reply(*items: Any, **more: Any) -> ChatMessageContent:
    return ChatMessageContent(role=AuthorRole.ASSISTANT, items=[*items], **more)


def accepted(messages: Sequence[ChatMessageContent]) -> ChatMessageContent:
    message, _ = accepted_reply(messages)
    return message


def ids(message: ChatMessageContent) -> list[str | None]:
    return [item.id for item in message.items if isinstance(item, FunctionCallContent)]


def test_text_beside_calls_is_sent_with_them() -> None:
    """A message of ours is sent with text and calls; Semantic Kernel's own leaves the text out."""
    items = [TextContent(text="Let "), call("a"), TextContent(text="me see.")]
    assert "content" not in reply(*items).to_dict()
    sent = accepted([reply(*items)]).to_dict()
    assert (sent["content"], [one["id"] for one in sent["tool_calls"]]) == (
        "Let me see.",
        ["a"],
    )


def test_calls_without_text_are_sent_without_content() -> None:
    """No text: no content, as before."""
    assert "content" not in accepted([reply(call("a"))]).to_dict()


@each_of(
    "given",
    [[None], [""], ["a", "a"], ["a", None], [None, None], ["a", "b", "a", ""]],
    ids=lambda given: repr(given),
)
def test_missing_and_repeated_ids_are_reissued(given: list[str | None]) -> None:
    """Afterwards each call has an id of its own, which OpenAI takes; ids that were good stay."""
    received = reply(*(call(id) for id in given))
    got = ids(accepted([received]))
    assert len(set(got)) == len(got)
    assert all(id and len(id) <= 40 for id in got)
    assert [id for n, id in enumerate(given) if id and id not in given[:n]] == [
        id for id in got if id in given
    ]
    assert ids(received) == given


def test_a_reply_without_calls_is_passed_on_as_it_is() -> None:
    """The very same message, where there is nothing to do."""
    received = reply(TextContent(text="Hi."))
    assert accepted([received]) is received


def test_everything_else_of_a_reply_is_kept() -> None:
    """Finish reason, model, metadata, name, inner content and other items survive, and so do a call's own notes."""
    noted = call(None, metadata={"thought_signature": b"\xff"}, inner_content="raw")
    image = ImageContent(uri="https://example.org/cat.png")
    more = {
        "ai_model_id": "m",
        "metadata": {"id": "x"},
        "name": "n",
        "inner_content": "whole",
    }
    merged = accepted(
        [reply(noted, image, finish_reason=FinishReason.TOOL_CALLS, **more)]
    )
    assert merged.finish_reason == "tool_calls"
    assert merged.ai_model_id == "m"
    assert merged.metadata == {"id": "x"}
    assert merged.name == "n"
    assert merged.inner_content == "whole"
    assert merged.items[1] == image
    assert (merged.items[0].metadata, merged.items[0].inner_content) == (
        {"thought_signature": b"\xff"},
        "raw",
    )


def test_several_messages_become_one() -> None:
    """Texts and calls of several messages stand in one, in order, with the metadata of all."""
    merged = accepted(
        [
            reply(TextContent(text="One. "), call("a"), metadata={"id": "x", "n": 1}),
            reply(TextContent(text="Two."), call("a"), metadata={"id": "y"}),
        ]
    )
    assert merged.content == text_of(merged) == "One. Two."
    assert (ids(merged)[0], len(set(ids(merged)))) == ("a", 2)
    assert merged.metadata == {"id": "y", "n": 1}


@each_of(
    ("received", "name", "arguments"),
    [
        (call("a", "t-add", '{"a": 1}'), "t-add", '{"a": 1}'),
        (call("a", "t-add", {"a": 1, "b": "é"}), "t-add", '{"a": 1, "b": "é"}'),
        (call("a", "t-add", None), "t-add", ""),
        (call("a", "t-add", {}), "t-add", "{}"),
        (call("a", "add"), "add", "{}"),
        (call("a", "t-add-more"), "t-add-more", "{}"),
        (call("a", None, function_name="add", plugin_name="t"), "t-add", "{}"),
        (call("a", "t.add", function_name="add", plugin_name="t"), "t-add", "{}"),
        (call("a", None), "", "{}"),
    ],
)
def test_a_call_is_read_as_the_kernel_would(
    received: FunctionCallContent, name: str, arguments: str
) -> None:
    """The name is the kernel's, with any separator, and the arguments are JSON text, as received."""
    (request,) = requested_calls(reply(received))
    assert request.id == "a"
    assert request.name == name
    assert request.arguments == arguments


def test_arguments_other_than_json_are_text() -> None:
    """A connector that parses arguments itself may hand over anything: it never keeps a reply from being read."""
    (request,) = requested_calls(
        reply(call("a", "t-add", {"at": {1, 2}, "raw": b"\xff"}))
    )
    assert isinstance(request.arguments, str)


def test_a_result_is_one_tool_message() -> None:
    """Each result is a message of its own, with id, name and text as they are."""
    (message,) = render([CallResult(call_id="a", name="t-add", text="3")])
    assert message.to_dict() == {"role": "tool", "content": "3", "tool_call_id": "a"}
    assert isinstance(message.items[0], FunctionResultContent)
    assert (message.items[0].name, message.items[0].result) == ("t-add", "3")


def test_an_edited_reply_shows_the_edited_arguments() -> None:
    """Calls that were removed are gone, edited arguments stand in place of the model's, the original is unchanged."""
    received = reply(
        call("a", arguments='{"x": 1}'), call("b"), TextContent(text="See:")
    )
    (message,) = render(
        [EditedReply(message=received, kept=("a",), edited=(("a", '{"x": 2}'),))]
    )
    assert ids(message) == ["a"]
    assert first_call(message).arguments == '{"x": 2}'
    assert text_of(message) == "See:"
    assert (ids(received), first_call(received).arguments) == (["a", "b"], '{"x": 1}')


def test_a_reply_of_which_no_call_is_left_is_its_text() -> None:
    """With every call removed, what is sent is the text alone."""
    (message,) = render(
        [EditedReply(message=reply(call("a"), TextContent(text="See:")), kept=())]
    )
    assert message.to_dict() == {"role": "assistant", "content": "See:"}


@each_of(
    "message",
    [
        reply(
            TextContent(text="See:"),
            call("a", arguments='{"x": "é{}"}'),
            finish_reason=FinishReason.TOOL_CALLS,
        ),
        ChatMessageContent(
            role=AuthorRole.TOOL,
            items=[FunctionResultContent(id="a", name="t-add", result="3")],
        ),
        ChatMessageContent(
            role=AuthorRole.USER,
            items=[ImageContent(data_uri="data:image/png;base64,iVBORw==")],
        ),
        ChatMessageContent(
            role=AuthorRole.SYSTEM, items=[TextContent(text="Be brief.")], name="rules"
        ),
        assistant_text(""),
    ],
    ids=["calls", "result", "image", "system", "empty"],
)
def test_a_message_is_sent_the_same_after_json(message: ChatMessageContent) -> None:
    """Through JSON and back the next request is identical, text beside calls included."""
    (before,) = render([message])
    (after,) = render([json.loads(json.dumps(dump_message(message)))])
    assert after.to_dict() == before.to_dict()


def test_rendering_changes_nothing_that_was_given() -> None:
    """A caller's message with calls is sent as a copy; one without is itself."""
    calls, plain = (
        reply(TextContent(text="See:"), call("a")),
        reply(TextContent(text="Hi.")),
    )
    before = calls.model_dump()
    sent = render([calls, plain])
    assert (calls.model_dump(), type(calls)) == (before, ChatMessageContent)
    assert isinstance(sent[0], AssistantMessage)
    assert sent[1] is plain


def test_an_empty_assistant_message_is_sent_as_text() -> None:
    """What Semantic Kernel sends as ``content: []``, which OpenAI refuses, is sent as an empty text."""
    assert assistant_text("").to_dict()["content"] == ""
    (message,) = render([reply()])
    assert message.to_dict()["content"] == ""


def test_a_history_with_our_messages_is_a_history() -> None:
    """Our message is Semantic Kernel's to every reader: it dumps, prints and compares as one."""
    ours = accepted([reply(call("a"), TextContent(text="See:"))])
    history = ChatHistory(messages=[ours])
    loaded = ChatHistory.model_validate_json(history.model_dump_json())
    assert loaded.messages[0].items == ours.items
    assert history.to_prompt().count("function_call") >= 1
    assert history.serialize() == ChatHistory(messages=[reply(*ours.items)]).serialize()


def test_reading_a_message_leaves_its_json_as_it_is() -> None:
    """Semantic Kernel adds the text of ``content`` to the list of items: not to that of a journal, which is signed."""
    data = {
        "role": "user",
        "content": "Hi.",
        "items": [{"content_type": "text", "text": "Ho."}],
    }
    before = json.dumps(data)
    assert load_message(data).content == load_message(data).content
    assert json.dumps(data) == before
