"""The README: its program runs as it stands, in a separate process, and the links of every page lead somewhere."""

import os
import re
from pathlib import Path

from planner_ext.testing import ScriptedOpenAIServer, call, say
from support.processes import Lives
from support.values import each_of, stem

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    page
    for folder in ("", ".github", "adr", "samples", "samples/guides", "samples/peers")
    for page in sorted((ROOT / folder).glob("*.md"))
]
PROGRAMS = {
    match[1]: match[0]
    for match in re.finditer(
        r"(?<=```python\n)# (\w+\.py)\n.*?(?=```)", README, re.DOTALL
    )
}


def test_its_program_prints_an_answer_and_what_it_cost(
    lives: Lives, tmp_path: Path
) -> None:
    """The README has one program, which runs as it stands, with the endpoint in the environment as the README says."""
    ((name, text),) = PROGRAMS.items()
    assert README.count("```python") == 1
    (tmp_path / name).write_text(text, encoding="utf-8")
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "PLANNER_EXT_"))
    }
    script = [
        say("1. ask"),
        call("weather-temperature", {"city": "Oslo"}),
        say("14.5 degrees"),
    ]
    with ScriptedOpenAIServer(script) as server:
        env = {
            **own,
            "OPENAI_API_KEY": "x",
            "OPENAI_BASE_URL": server.url,
            "PYTHONPATH": str(ROOT),
        }
        done = lives.run(str(tmp_path / name), cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("answered 14.5 degrees\n3 requests, 1 calls, ")


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in words}


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether a relative link of a page names a file, and its anchor a heading there."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors_of(target))


@each_of("page", PAGES, ids=stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file of the repository, and every anchor a heading."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    links = [
        link
        for link in re.findall(r"\]\(([^)\s]+)\)", text)
        if not link.startswith("http")
    ]
    assert [link for link in links if not leads_somewhere(page, link)] == []


def test_every_decision_has_its_own_number() -> None:
    """Numbers are unique, and the list of decisions links each of them."""
    names = sorted(path.name for path in (ROOT / "adr").glob("0*.md"))
    assert len({name[:4] for name in names}) == len(names)
    listed = (ROOT / "adr" / "README.md").read_text("utf-8")
    assert [name for name in names if f"({name})" not in listed] == []


def test_the_threat_model_names_tests_that_exist() -> None:
    """Each row of its table names at least one test file, and every file is there."""
    rows = re.findall(
        r"^\| \*\*.*$",
        (ROOT / "adr" / "0017-threat-model.md").read_text("utf-8"),
        re.MULTILINE,
    )
    shown = [
        re.findall(r"`([\w/]+\.py)`", row.rpartition("|")[0].rpartition("|")[2])
        for row in rows
    ]
    assert all(shown)
    assert [
        file
        for files in shown
        for file in files
        if not (ROOT / "tests" / file).is_file()
    ] == []
