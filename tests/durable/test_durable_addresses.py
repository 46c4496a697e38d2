"""A password in the address of a store is never shown, in any spelling of the address."""

import logging
import traceback
from pathlib import Path

import pytest

from planner_ext.durable import Approvals, Runs, StoreError
from planner_ext.durable.errors import redacted, without_passwords
from support.values import each_of

SPELLINGS = [
    "postgresql://ann:sesame@localhost:1/db",
    "postgresql://ann:se%73ame@localhost:1/db",
    "postgresql://ann:ses@me/sesame@localhost:1/db",
    "postgresql://ann:ses:ame@localhost:1/db",
    "postgresql://ann:ses#ame?@localhost:1/db",
    "postgresql://ann:ses%zzame@localhost/db",
    "postgresql://ann:sesame@[::1/db",
    "postgresql://ann:sesame",
    "postgresql://localhost:1,localhost:sesame/db",
    "postgres://localhost:1/db?user=ann&password=sesame",
    "postgresql://localhost:1/db?password=sesame&x=1",
    "postgresql://localhost:1/db?password=ses ame",
    "postgresql://localhost:1/db?password=ses@me:sesame",
    "postgresql://localhost:1/db?pass%77ord=sesame&sslpassword=sesame",
    "POSTGRESQL://ann:sesame@localhost:1/db",
    "postgresql+psycopg://ann:sesame@localhost:1/db",
    "mysql://ann:sesame@localhost/db",
    "postgresql:/ann:sesame@localhost:1/db",
    "postgresql:ann:sesame@localhost:1/db",
    "host=localhost port=1 user=ann password=sesame dbname=db",
    "host=localhost port=1 password='ses ame' foo=1",
    "password = sesame host=localhost port=1",
    "user=ann password=ses\\ ame",
]


@pytest.mark.parametrize("where", SPELLINGS)
async def test_a_password_is_never_shown(
    where: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in an error, its traceback or a log line, whichever door was given the address; a file is not made of it."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("planner_ext.durable.runs._PATIENCE_SECONDS", 0.0)
    for open_store in (Runs.postgres, Runs.sqlite, Approvals.connect):
        with pytest.raises(StoreError) as raised:
            async with open_store(where):
                pass
        shown = "".join(traceback.format_exception(raised.value)).replace(
            repr(where), ""
        )
        lines = [line for line in shown.splitlines() if "SPELLINGS" not in line]
        assert not {"sesame", "ses@me", "ame", "me/sesame"} & set(
            words("\n".join(lines))
        )
        assert "sesame" not in "\n".join(lines)
        assert "sesame" not in caplog.text
    assert "sesame" not in redacted(where)
    assert not list(tmp_path.glob("*"))  # noqa: ASYNC240  (a folder of the test's own)


def words(text: str) -> list[str]:
    return text.replace("'", " ").replace('"', " ").split()


@each_of(
    "where",
    [
        "/srv/runs.db",
        "runs.db",
        "postgresql://ann@/db?host=/run/pg",
        "postgresql://[::1]:5/db",
    ],
)
def test_an_address_without_a_password_stays_as_it_is(where: str) -> None:
    """What is shown can be used again."""
    assert redacted(where) == where
    assert (
        without_passwords(f"{where} is away: no ann at db", where)
        == f"{where} is away: no ann at db"
    )
