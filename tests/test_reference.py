"""The API reference, as `.ci/reference` builds it from the docstrings."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from support.surface import MODULES

ROOT = Path(__file__).parent.parent
INNER = re.compile(r"planner_ext\.(?:approval|core|engine|sk)\.[\w.]+")


def test_the_reference_has_every_public_name(tmp_path: Path) -> None:
    """One command builds it without a warning; a page has each of its names, by public names alone; no link is dead."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / ".ci" / "reference"), str(tmp_path)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0
    assert done.stdout == ""
    assert done.stderr == ""
    for module in MODULES:
        names = set(import_module(module).__all__)
        page = (tmp_path / f"{module.replace('.', '/')}.html").read_text("utf-8")
        sections = dict(
            re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL)
        )
        assert sorted(names - set(sections)) == [], module
        described = {
            name
            for name, text in sections.items()
            if re.search('class="(docstring|attr variable)"', text)
        }
        assert sorted(names - described) == [], module
        attributes = re.findall(
            r'<div class="attr (?:class|function|variable)">(.*?)</div>',
            page,
            re.DOTALL,
        )
        types = re.sub("<.*?>", "", " ".join(attributes))
        assert INNER.findall(types) == [], module
        texts = " ".join(
            re.findall(r'<div class="docstring">(.*?)</div>', page, re.DOTALL)
        )
        assert (
            re.findall(
                r"planner_ext\.(?:approval|core|engine|planner|sk)\b[\w.]*", texts
            )
            == []
        ), module
    assert list(dead_links(tmp_path)) == []


def dead_links(folder: Path) -> Iterator[str]:
    """List the links between pages that lead to no place."""
    pages = {page: page.read_text("utf-8") for page in folder.rglob("*.html")}
    places = {page: re.findall(r'id="([\w.-]+)"', text) for page, text in pages.items()}
    for page, text in pages.items():
        for path, place in re.findall(r'href="([\w./]*)#([\w.]+)"', text):
            target = (page.parent / path).resolve() if path else page
            if place not in places[target]:
                yield f"{page.name}: {path}#{place}"
