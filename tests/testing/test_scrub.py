"""What may not enter a cassette: keys, passwords, the environment's secrets, and what the application names."""

import json
from base64 import b64encode, urlsafe_b64encode
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import CallDecided
from planner_ext.testing import (
    CassetteError,
    ReplayDifferenceError,
    Script,
    ScriptedChatCompletion,
    ScriptedOpenAIServer,
    call,
    record,
    replay,
    say,
)
from planner_ext.testing.cassette import Cassette, same
from planner_ext.testing.scrub import Scrubber

KEY = "sk-proj-0123456789abcdefghij"


class Shop:
    """Prices of articles."""

    @kernel_function(description="The price of an article.")
    def price(self, article: str) -> str:
        return f"{article}: 12 EUR"


def shop_kernel(script: Script | None = None) -> Kernel:
    kernel = Kernel()
    kernel.add_plugin(Shop(), "shop")
    if script is not None:
        kernel.add_service(ScriptedChatCompletion(script))
    return kernel


async def ask(kernel: Kernel, goal: str = "What does it cost?") -> Any:
    options = FunctionCallingStepwisePlannerOptions(plan=False)
    return await FunctionCallingStepwisePlanner(options=options).invoke(kernel, goal)


async def test_secrets_do_not_enter_a_cassette(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither known forms of keys, the environment's secrets nor what the user names is written; a replay works."""
    monkeypatch.setenv("SHOP_TOKEN", "correct-horse-battery")
    path = tmp_path / "c.json"
    goal = f"Use {KEY}, AKIAABCDEFGHIJKLMNOP, correct-horse-battery for customer 4711-0815."
    script = [call("shop-price", {"article": f"lamp of {KEY}"}), say("Done, 4711-0815.")]
    with record(path, scrub=[r"\d{4}-\d{4}"]) as tape:
        recorded = await ask(tape.kernel(shop_kernel(script)), goal)
    text = path.read_text("utf-8")
    for secret in (KEY, "AKIAABCDEFGHIJKLMNOP", "correct-horse-battery", "4711-0815", "authorization"):
        assert secret not in text
    monkeypatch.delenv("SHOP_TOKEN")
    for functions in ("live", "recorded"):
        with replay(path, functions=functions) as tape:
            result = await ask(tape.kernel(shop_kernel()), goal)
        assert result.final_answer == "Done, [scrubbed]."
        assert [*tape.runs] == [recorded.facts[0].run_id]


async def test_a_scrubbed_argument_cannot_be_guessed_from_its_digest(tmp_path: Path) -> None:
    """The journal of a run with a scrubbed argument holds other digests, equal where the arguments are equal."""
    path, wanted = tmp_path / "c.json", call("shop-price", {"article": "4711-0815"})
    with record(path, scrub=[r"\d{4}-\d{4}"]) as tape:
        result = await ask(tape.kernel(shop_kernel([wanted, wanted, say("Done.")])))
    kept = [fact for fact in Cassette.read(path).runs[0] if isinstance(fact, CallDecided)]
    live = [fact for fact in result.facts if isinstance(fact, CallDecided)]
    assert kept[0].digest == kept[1].digest != live[0].digest == live[1].digest
    assert {fact.fingerprint for fact in kept}.isdisjoint(fact.fingerprint for fact in live)


async def test_a_difference_shows_its_place_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret of the replaying process is neither shown in the error, nor taken for what differs."""
    monkeypatch.setenv("SHOP_TOKEN", "correct-horse-battery")
    path = tmp_path / "c.json"
    with record(path) as tape:
        await ask(tape.kernel(shop_kernel([say("Done.")])), "Use correct-horse-battery for one lamp.")
    with pytest.raises(ReplayDifferenceError, match=r"for one lamp.*for two lamps") as caught, replay(path) as tape:
        await ask(tape.kernel(shop_kernel()), "Use correct-horse-battery for two lamps.")
    assert "horse" not in str(caught.value)


async def test_a_secret_that_appears_while_recording_is_scrubbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test may read its secrets into the environment after the recording began."""
    path = tmp_path / "c.json"
    with record(path) as tape:
        monkeypatch.setenv("SHOP_PASSWORD", "correct-horse-battery")
        await ask(tape.kernel(shop_kernel([say("correct-horse-battery")])))
    assert "horse" not in path.read_text()


async def test_the_key_of_a_service_is_scrubbed(tmp_path: Path) -> None:
    """Also one that has no known form and was never in the environment, as Semantic Kernel reads it from a file."""
    path, key = tmp_path / "c.json", "0123456789abcdef0123456789abcdef"
    with ScriptedOpenAIServer([say(f"Your key is {key}.")]) as server:
        service = OpenAIChatCompletion("gpt-4.1", "chat", api_key=key)
        service.client.base_url = server.url
        async with service.client:
            with record(path) as tape:
                await ask(tape.kernel(Kernel(services=service)))
    assert key not in path.read_text()


async def test_settings_and_errors_are_scrubbed(tmp_path: Path) -> None:
    """Keys in what a request adds to its body, and in the text of an exception, are not written."""
    path = tmp_path / "c.json"
    body = {"api_key": "abc-123-xyz", "customers": {KEY: "Ann"}}
    given: dict[str, Any] = {"extra_body": body, "extra_headers": {"X-Pin": "pin-4711"}}

    async def run(kernel: Kernel) -> Any:
        chat: Any = kernel.get_service()
        history = ChatHistory()
        history.add_user_message("Go.")
        settings = OpenAIChatPromptExecutionSettings(**given)
        return await chat.get_chat_message_content(history, settings, kernel=kernel)

    problem = ConnectionError("GET https://shop.example/a?client_secret=zyx-987 failed, {'password': 'hunter2!'}")
    with record(path) as tape, pytest.raises(ConnectionError):
        await run(tape.kernel(shop_kernel([problem])))
    text = path.read_text()
    for secret in ("abc-123-xyz", KEY, "pin-4711", "zyx-987", "hunter2!"):
        assert secret not in text
    with replay(path) as tape, pytest.raises(ConnectionError):
        await run(tape.kernel(shop_kernel()))


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (json.dumps({"with": 'pä"ss\\word'}), '{"with": "[scrubbed]"}'),
        (json.dumps({"with": 'pä"ss\\word'}, ensure_ascii=False), '{"with": "[scrubbed]"}'),
        (json.dumps({"with": json.dumps({"in": 'pä"ss\\word'})}), r'{"with": "{\"in\": \"[scrubbed]\"}"}'),
        ("?q=p%C3%A4%22ss%5Cword", "?q=[scrubbed]"),
        ("longer-secret-of-two", "[scrubbed]"),
        ("a file with a newline at its end", "[scrubbed]"),
        ("the horse-battery of the shop's database", "the [scrubbed] of the shop's database"),
        ("postgresql://ann:hunter2@db/shop", "postgresql://[scrubbed]@db/shop"),
        ("https://shop.example/a?api_key=123&x=1", "https://shop.example/a?api_key=[scrubbed]&x=1"),
        ("https://s3.example/a?X-Amz-Signature=12ab&x=1", "https://s3.example/a?X-Amz-Signature=[scrubbed]&x=1"),
        ("Server=db;Password=hunter2;Pooling=1", "Server=db;Password=[scrubbed];Pooling=1"),
        ('{"authorization": "bearer abcdefghijklmnopqrst"}', '{"authorization": "[scrubbed]"}'),
        ("Authorization: bearer abcdefghijklmnopqrst", "Authorization: bearer [scrubbed]"),
        ("Authorization: Basic YW5uOmh1bnRlcjI=", "Authorization: Basic [scrubbed]"),
        ("x-api-key: 12345678", "x-api-key: [scrubbed]"),
        (r'{"a":"{\"db_password\":\"hun\\\"ter2\",\"b\":1}"}', r'{"a":"{\"db_password\":\"[scrubbed]\",\"b\":1}"}'),
        ('{"password": "", "apiKey": "a\\"b"}', '{"password": "", "apiKey": "[scrubbed]"}'),
        ("""{'client_secret': "it's"}""", """{'client_secret': "[scrubbed]"}"""),
        ("https://shop.example:80/a?key=lamp@home", "https://shop.example:80/a?key=lamp@home"),
        ('{"next_page_token": "abc", "max_tokens": "5"}', '{"next_page_token": "abc", "max_tokens": "5"}'),
        ("task-list_all_open_orders", "task-list_all_open_orders"),
        ("Basic information", "Basic information"),
    ],
)
def test_secrets_are_scrubbed_however_they_are_written(monkeypatch: pytest.MonkeyPatch, text: str, clean: str) -> None:
    """A secret is found inside JSON and addresses, and whole; a value whose name says that it is secret, too."""
    for name, value in {
        "A_PASSWORD": 'pä"ss\\word',
        "A_TOKEN": "longer-secret",
        "B_TOKEN": "longer-secret-of-two",
        "PGPASSWORD": "a file with a newline at its end\n",
        "DATABASE_URL": "postgresql://ann:horse-battery@db/shop",
    }.items():
        monkeypatch.setenv(name, value)
    assert Scrubber().text(text) == clean


@pytest.mark.parametrize("before", [b"", b"a", b"ab", b"ann:"])
@pytest.mark.parametrize("encoded", [b64encode, urlsafe_b64encode])
def test_a_secret_is_found_in_base64(monkeypatch: pytest.MonkeyPatch, before: bytes, encoded: Any) -> None:
    """A secret of the environment is found wherever it begins in what was encoded."""
    monkeypatch.setenv("A_TOKEN", secret := "correct?horse>battery")
    clean = Scrubber().text(encoded(before + secret.encode() + b" and more").decode())
    inside = encoded(bytes(3) + secret.encode()).decode()[6:20]
    assert "[scrubbed]" in clean and inside not in clean
    assert len(clean) < len(before) * 4 / 3 + 30


@pytest.mark.parametrize(
    ("scrub", "problem"),
    [
        (["("], "not a regular expression"),
        ([5], "5"),
        ([r"\d*"], "empty text"),
        (7, "7"),
    ],
)
def test_a_wrong_pattern_is_refused_before_anything_is_recorded(tmp_path: Path, scrub: Any, problem: str) -> None:
    """The error names what is not a pattern, and a pattern that would match everywhere."""
    with pytest.raises(PlannerInvalidConfigurationError, match=problem), record(tmp_path / "c.json", scrub=scrub):
        pass


async def test_patterns_and_functions_scrub_together(tmp_path: Path) -> None:
    """Each element of a list is applied, in its order; a single pattern is one, not a list of its letters."""
    path = tmp_path / "c.json"
    for scrub, written in (
        (["lamp", lambda text: text.replace("desk", "[scrubbed]")], "A [scrubbed] and a [scrubbed]."),
        ("lamp", "A [scrubbed] and a desk."),
    ):
        with record(path, scrub=scrub) as tape:
            await ask(tape.kernel(shop_kernel([say("A lamp and a desk.")])))
        assert written in path.read_text()


async def test_a_pattern_that_spoils_the_file_is_reported_when_it_is_written(tmp_path: Path) -> None:
    """A pattern that hits the names in the file itself leaves the earlier cassette, and the error says why."""
    path = tmp_path / "c.json"
    path.write_text("the earlier one")
    with pytest.raises(CassetteError, match="scrub"), record(path, scrub=["assistant"]) as tape:
        await ask(tape.kernel(shop_kernel([say("Yes.")])))
    assert path.read_text() == "the earlier one"


def test_a_scrubbed_name_equals_any_name() -> None:
    """The names in JSON objects may be secrets, too."""
    recorded = {"[scrubbed]": 1, "a": 2}
    assert same(recorded, {"a": 2, KEY: 1})
    assert not same(recorded, {"a": 2, KEY: 2})
    assert not same(recorded, {"a": 2})
