"""The file of a document is read up to a size, and only as text of its kind."""

from pathlib import Path

import pytest

from planner_ext.core.errors import InvalidJournalError
from planner_ext.engine import document


def test_a_file_over_the_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last size that is read is `MOST_BYTES`; one byte more is refused by name."""
    monkeypatch.setattr(document, "MOST_BYTES", 4)
    file = tmp_path / "run.json"
    file.write_text("1234")
    assert document.read_file(file, "run") == "1234"
    file.write_text("12345")
    with pytest.raises(InvalidJournalError, match=r"run\.json is too large for"):
        document.read_file(file, "run")


def test_a_file_without_text_is_refused(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are refused by name."""
    file = tmp_path / "run.json"
    file.write_bytes(b"\xff")
    with pytest.raises(InvalidJournalError, match="it is not text"):
        document.read_file(file, "run")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('{"kind": "cassette"}', "of the kind 'cassette'"),
        ('{"messages": []}', "without schema and kind"),
    ],
)
def test_another_document_is_refused_by_what_it_is(text: str, seen: str) -> None:
    """The error says which kind was read in the place of the expected one."""
    with pytest.raises(InvalidJournalError, match=f"'checkpoint'; got one {seen}"):
        document.read_document(text, "checkpoint", ())
