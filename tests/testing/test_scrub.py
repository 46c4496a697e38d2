"""What may not enter a cassette: keys, passwords, the environment's secrets, and what the application names."""

import html
import json
import textwrap
from base64 import b32encode, b64encode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from html.entities import codepoint2name
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
)
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
from planner_ext.testing.encodings import Finder
from planner_ext.testing.scrub import SCRUBBED, Scrubber
from support.examples import tried

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


async def test_secrets_do_not_enter_a_cassette(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither known forms of keys, the environment's secrets nor what the user names is written; a replay works."""
    monkeypatch.setenv("SHOP_TOKEN", "correct-horse-battery")
    path = tmp_path / "c.json"
    goal = f"Use {KEY}, AKIAABCDEFGHIJKLMNOP, correct-horse-battery for customer 4711-0815."
    script = [
        call("shop-price", {"article": f"lamp of {KEY}"}),
        say("Done, 4711-0815."),
    ]
    with record(path, scrub=[r"\d{4}-\d{4}"]) as tape:
        recorded = await ask(tape.kernel(shop_kernel(script)), goal)
    text = path.read_text("utf-8")
    for secret in (
        KEY,
        "AKIAABCDEFGHIJKLMNOP",
        "correct-horse-battery",
        "4711-0815",
        "authorization",
    ):
        assert secret not in text
    monkeypatch.delenv("SHOP_TOKEN")
    for functions in ("live", "recorded"):
        with replay(path, functions=functions) as tape:
            result = await ask(tape.kernel(shop_kernel()), goal)
        assert result.final_answer == "Done, [scrubbed]."
        assert [*tape.runs] == [recorded.facts[0].run_id]


async def test_a_scrubbed_argument_cannot_be_guessed_from_its_digest(
    tmp_path: Path,
) -> None:
    """The journal of a run with a scrubbed argument holds other digests, equal where the arguments are equal."""
    path, wanted = tmp_path / "c.json", call("shop-price", {"article": "4711-0815"})
    with record(path, scrub=[r"\d{4}-\d{4}"]) as tape:
        result = await ask(tape.kernel(shop_kernel([wanted, wanted, say("Done.")])))
    kept = [
        fact for fact in Cassette.read(path).runs[0] if isinstance(fact, CallDecided)
    ]
    live = [fact for fact in result.facts if isinstance(fact, CallDecided)]
    assert kept[0].digest == kept[1].digest != live[0].digest == live[1].digest
    assert {fact.fingerprint for fact in kept}.isdisjoint(
        fact.fingerprint for fact in live
    )


async def test_a_difference_shows_its_place_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret of the replaying process is neither shown in the error, nor taken for what differs."""
    monkeypatch.setenv("SHOP_TOKEN", "correct-horse-battery")
    path = tmp_path / "c.json"
    with record(path) as tape:
        await ask(
            tape.kernel(shop_kernel([say("Done.")])),
            "Use correct-horse-battery for one lamp.",
        )
    with (
        pytest.raises(
            ReplayDifferenceError, match=r"for one lamp.*for two lamps"
        ) as caught,
        replay(path) as tape,
    ):
        await ask(
            tape.kernel(shop_kernel()), "Use correct-horse-battery for two lamps."
        )
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

    problem = ConnectionError(
        "GET https://shop.example/a?client_secret=zyx-987 failed, {'password': 'hunter2!'}"
    )
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
        (
            json.dumps({"with": 'pä"ss\\word'}, ensure_ascii=False),
            '{"with": "[scrubbed]"}',
        ),
        (
            json.dumps({"with": json.dumps({"in": 'pä"ss\\word'})}),
            r'{"with": "{\"in\": \"[scrubbed]\"}"}',
        ),
        ("?q=p%C3%A4%22ss%5Cword", "?q=[scrubbed]"),
        ("longer-secret-of-two", "[scrubbed]"),
        ("a file with a newline at its end", "[scrubbed]"),
        (
            "the horse-battery of the shop's database",
            "the [scrubbed] of the shop's database",
        ),
        ("postgresql://ann:hunter2@db/shop", "postgresql://[scrubbed]@db/shop"),
        (
            "https://shop.example/a?api_key=123&x=1",
            "https://shop.example/a?api_key=[scrubbed]&x=1",
        ),
        (
            "https://s3.example/a?X-Amz-Signature=12ab&x=1",
            "https://s3.example/a?X-Amz-Signature=[scrubbed]&x=1",
        ),
        (
            "Server=db;Password=hunter2;Pooling=1",
            "Server=db;Password=[scrubbed];Pooling=1",
        ),
        (
            '{"authorization": "bearer abcdefghijklmnopqrst"}',
            '{"authorization": "[scrubbed]"}',
        ),
        (
            "Authorization: bearer abcdefghijklmnopqrst",
            "Authorization: bearer [scrubbed]",
        ),
        ("Authorization: Basic YW5uOmh1bnRlcjI=", "Authorization: Basic [scrubbed]"),
        ("x-api-key: 12345678", "x-api-key: [scrubbed]"),
        (
            r'{"a":"{\"db_password\":\"hun\\\"ter2\",\"b\":1}"}',
            r'{"a":"{\"db_password\":\"[scrubbed]\",\"b\":1}"}',
        ),
        (
            '{"password": "", "apiKey": "a\\"b"}',
            '{"password": "", "apiKey": "[scrubbed]"}',
        ),
        ("""{'client_secret': "it's"}""", """{'client_secret': "[scrubbed]"}"""),
        (
            "https://shop.example:80/a?key=lamp@home",
            "https://shop.example:80/a?key=lamp@home",
        ),
        (
            '{"next_page_token": "abc", "max_tokens": "5"}',
            '{"next_page_token": "abc", "max_tokens": "5"}',
        ),
        ("task-list_all_open_orders", "task-list_all_open_orders"),
        ("Basic information", "Basic information"),
    ],
)
def test_secrets_are_scrubbed_however_they_are_written(
    monkeypatch: pytest.MonkeyPatch, text: str, clean: str
) -> None:
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


@pytest.mark.parametrize(
    ("scrub", "problem"),
    [
        (["("], "not a regular expression"),
        ([5], "5"),
        ([r"\d*"], "empty text"),
        (7, "7"),
    ],
)
def test_a_wrong_pattern_is_refused_before_anything_is_recorded(
    tmp_path: Path, scrub: Any, problem: str
) -> None:
    """The error names what is not a pattern, and a pattern that would match everywhere."""
    with (
        pytest.raises(PlannerInvalidConfigurationError, match=problem),
        record(tmp_path / "c.json", scrub=scrub),
    ):
        pass


async def test_patterns_and_functions_scrub_together(tmp_path: Path) -> None:
    """Each element of a list is applied, in its order; a single pattern is one, not a list of its letters."""
    path = tmp_path / "c.json"
    for scrub, written in (
        (
            ["lamp", lambda text: text.replace("desk", "[scrubbed]")],
            "A [scrubbed] and a [scrubbed].",
        ),
        ("lamp", "A [scrubbed] and a desk."),
    ):
        with record(path, scrub=scrub) as tape:
            await ask(tape.kernel(shop_kernel([say("A lamp and a desk.")])))
        assert written in path.read_text()


async def test_a_pattern_that_spoils_the_file_is_reported_when_it_is_written(
    tmp_path: Path,
) -> None:
    """A pattern that hits the names in the file itself leaves the earlier cassette, and the error says why."""
    path = tmp_path / "c.json"
    path.write_text("the earlier one")
    with (
        pytest.raises(CassetteError, match="scrub"),
        record(path, scrub=["assistant"]) as tape,
    ):
        await ask(tape.kernel(shop_kernel([say("Yes.")])))
    assert path.read_text() == "the earlier one"


def test_a_scrubbed_name_equals_any_name() -> None:
    """The names in JSON objects may be secrets, too."""
    recorded = {"[scrubbed]": 1, "a": 2}
    assert same(recorded, {"a": 2, KEY: 1})
    assert not same(recorded, {"a": 2, KEY: 2})
    assert not same(recorded, {"a": 2})


# A secret that is encoded.


def lower_percents(text: str) -> str:
    """Percent-encode every byte in lower case."""
    return "".join(f"%{one:02x}" for one in text.encode())


def code_units(text: str) -> str:
    """Escape every character as JSON and JavaScript do."""
    return "".join(
        f"\\u{one:04x}" for one in memoryview(text.encode("utf-16-le")).cast("H")
    )


def named(text: str) -> str:
    """Write characters as HTML entities with names, where they have one."""
    return "".join(
        f"&{codepoint2name[ord(one)]};" if ord(one) in codepoint2name else one
        for one in text
    )


def wrapped(text: str) -> str:
    return "\r\n".join(textwrap.wrap(b64encode(text.encode()).decode(), 20))


ENCODINGS: dict[str, Callable[[str], str]] = {
    "address": quote,
    "address in whole": lambda text: quote(text, safe=""),
    "address in lower case": lower_percents,
    "form": quote_plus,
    "JSON": json.dumps,
    "JSON in Unicode": lambda text: json.dumps(text, ensure_ascii=False),
    "JSON with slashes": lambda text: json.dumps(text).replace("/", "\\/"),
    "Python": repr,
    "Python bytes": lambda text: repr(text.encode()),
    "code units": code_units,
    "HTML": html.escape,
    "HTML, named": named,
    "HTML, decimal": lambda text: "".join(f"&#{ord(one)};" for one in text),
    "HTML, hexadecimal": lambda text: "".join(f"&#x{ord(one):X};" for one in text),
    "hexadecimal": lambda text: text.encode().hex(),
    "hexadecimal in upper case": lambda text: text.encode().hex().upper(),
    "base64": lambda text: b64encode(text.encode()).decode(),
    "base64 for addresses": lambda text: (
        urlsafe_b64encode(text.encode()).decode().rstrip("=")
    ),
    "base64, wrapped": wrapped,
    "base32": lambda text: b32encode(text.encode()).decode(),
    "base64 of UTF-16": lambda text: b64encode(text.encode("utf-16")).decode(),
    "base64 of UTF-16, big end first": lambda text: b64encode(
        text.encode("utf-16-be")
    ).decode(),
    "hexadecimal of UTF-16": lambda text: text.encode("utf-16-le").hex(),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "around", [("", ""), ("a", "b"), ("ann:", "&x=1"), ("two words ", "\n")]
)
def test_a_secret_is_found_in_each_encoding(
    monkeypatch: pytest.MonkeyPatch, encoding: str, around: tuple[str, str]
) -> None:
    """A secret of the environment is found wherever it begins in what was encoded, and what is around it stays."""
    monkeypatch.setenv("A_TOKEN", secret := "p/ä \"ss+w'o\\rd<&>?~")
    clean = Scrubber().text(
        f"See {ENCODINGS[encoding](around[0] + secret + around[1])}. Done."
    )
    assert clean.startswith("See ") and clean.endswith(". Done.")
    assert clean.count(SCRUBBED) == 1
    assert len(clean) < 2 * len(ENCODINGS[encoding](around[0] + around[1])) + 40


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (
            "https://a.example/?k=top/se%22cret%26%3d1",
            "https://a.example/?k=[scrubbed]%3d1",
        ),
        (
            json.dumps(json.dumps(json.dumps(['top/se"cret&']))),
            json.dumps(json.dumps(json.dumps([SCRUBBED]))),
        ),
        (r'{"a": "top\/se\"cret&="}', '{"a": "[scrubbed]="}'),
        ("<p>top&#47;se&quot;cret&#x26;</p>", "<p>[scrubbed]</p>"),
        ("to be 746f702F7365226372657426ff", "to be [scrubbed]ff"),
    ],
)
def test_only_what_encodes_the_secret_is_replaced(
    monkeypatch: pytest.MonkeyPatch, text: str, clean: str
) -> None:
    """A cassette stays readable, and a replay compares the rest."""
    monkeypatch.setenv("A_TOKEN", 'top/se"cret&')
    assert Scrubber().text(text) == clean


SECRETS = st.text(
    st.sampled_from("aZ9/+= -_\"'\\<>&%#;ä漢👍\n"), min_size=8, max_size=24
).map(lambda text: "Qz7" + text + "j")
PLAIN = st.lists(
    st.sampled_from(
        [
            "word",
            "Zm9v",
            "0123",
            "abcdef",
            " ",
            "\n",
            '{"a": 1}',
            "/",
            "=",
            "?x=1&y=2",
            "%41",
            "&lt;",
            "\\n",
            "ä",
            "漢",
            ".",
        ]
    ),
    max_size=12,
).map("".join)


@tried(150)
@given(
    secret=SECRETS,
    levels=st.lists(
        st.tuples(st.sampled_from(sorted(ENCODINGS)), PLAIN, PLAIN), max_size=3
    ),
    around=st.tuples(PLAIN, PLAIN),
)
@example(
    secret="Qz7 a+b/ c",
    levels=[("JSON", "", ""), ("JSON", "", ""), ("JSON", "", "")],
    around=("", ""),
)
@example(
    secret="Qz7%41%2541",
    levels=[("address", "%", "%"), ("JSON", "", "")],
    around=("", ""),
)
def test_a_secret_does_not_survive_any_composition_of_encodings(
    secret: str, levels: Sequence[tuple[str, str, str]], around: tuple[str, str]
) -> None:
    """Up to three encodings on top of each other, with other text inside of each, leave no trace of it."""
    text = secret
    for encoding, before, after in levels:
        text = ENCODINGS[encoding](f"{before} {text} {after}")
    clean = Finder([secret]).replaced(f"{around[0]} {text} {around[1]}", SCRUBBED)
    assert clean.startswith(around[0]) and clean.endswith(around[1])
    assert SCRUBBED in clean and text not in clean
    assert Finder([secret]).replaced(clean, SCRUBBED) == clean


@tried(200)
@given(
    secret=SECRETS,
    levels=st.lists(st.tuples(st.sampled_from(sorted(ENCODINGS)), PLAIN), max_size=3),
    text=PLAIN | st.text(),
)
def test_a_text_without_the_secret_stays_as_it_is(
    secret: str, levels: Sequence[tuple[str, str]], text: str
) -> None:
    """Character by character, lone surrogates and what looks encoded included."""
    for encoding, before in levels:
        try:
            text = ENCODINGS[encoding](before + text)
        except UnicodeEncodeError:  # a lone surrogate
            break
    assert Finder([secret]).replaced(text, SCRUBBED) == text


@pytest.mark.parametrize("secret", ["\udce4" * 8, "漢字" * 4])
def test_a_secret_that_is_not_utf_8_is_found(secret: str) -> None:
    """A variable of the environment may hold any bytes."""
    assert Finder([secret]).replaced(f"a {secret} b", SCRUBBED) == "a [scrubbed] b"
    assert Finder([secret]).replaced(json.dumps(secret), SCRUBBED) == '"[scrubbed]"'
