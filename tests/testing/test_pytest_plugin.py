"""The pytest plugin, as a user's project has it: recorded once with a key, replayed without anything."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import planner_ext
from planner_ext.testing import ScriptedOpenAIServer, call, say
from support.processes import Lives

ROOT = Path(planner_ext.__file__).parent.parent
CONFTEST = 'pytest_plugins = ["planner_ext.pytest_plugin"]\n'
TESTS = """
import asyncio

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from planner_ext import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions


class Shop:
    @kernel_function
    def price(self, article: str) -> str:
        return f"{article}: 12 EUR"


def test_price(tape):
    kernel = Kernel()
    kernel.add_plugin(Shop(), "shop")
    if tape.recording:
        kernel.add_service(OpenAIChatCompletion(service_id="chat"))
    planner = FunctionCallingStepwisePlanner(options=FunctionCallingStepwisePlannerOptions(plan=False))
    result = asyncio.run(planner.invoke(tape.kernel(kernel), "What does a lamp cost?"))
    assert result.final_answer == "12 EUR."
"""
CASSETTE = Path("cassettes", "test_shop", "test_price.json")


RunPytest = Callable[..., tuple[int, str]]


@pytest.fixture
def run_pytest(lives: Lives, project: Path) -> RunPytest:
    """Run the user's tests in a process of their own, without a word about OpenAI unless it is given.

    Other plugins are not loaded, which takes a second, unless ``PYTEST_DISABLE_PLUGIN_AUTOLOAD`` is "".
    """

    def run(*arguments: str, **env: str) -> tuple[int, str]:
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OPENAI_", "PYTEST_"))
        }
        own["PYTHONPATH"] = str(Path(planner_ext.__file__).parent.parent)
        own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        own |= env
        command = (
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            *arguments,
        )
        done = lives.run(*command, cwd=project, env=own)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_shop.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


@pytest.fixture
def record(run_pytest: RunPytest) -> RunPytest:
    """Record the user's test against a scripted server."""

    def record() -> tuple[int, str]:
        with ScriptedOpenAIServer(
            [call("shop-price", {"article": "lamp"}), say("12 EUR.")]
        ) as server:
            env = {
                "OPENAI_API_KEY": "none",
                "OPENAI_BASE_URL": server.url,
                "OPENAI_CHAT_MODEL_ID": "gpt-4.1",
            }
            return run_pytest("--record", **env)

    return record


def test_a_test_is_recorded_once_and_replayed_without_a_key(
    project: Path, run_pytest: RunPytest, record: RunPytest
) -> None:
    """Without a cassette a test fails and says how to record it; recorded, it passes without network and key."""
    code, out = run_pytest()
    assert code == 1
    assert "Record it: pytest --record test_shop.py::test_price" in out
    code, out = record()
    assert code == 0, out
    assert (project / CASSETTE).is_file()
    code, out = run_pytest(PYTEST_DISABLE_PLUGIN_AUTOLOAD="")
    assert code == 0, out


def test_a_changed_function_fails_the_test_and_is_named(
    project: Path, run_pytest: RunPytest, record: RunPytest
) -> None:
    """The failure of the replayed test names the function, what it returned, and what it returns now."""
    assert record()[0] == 0
    (project / "test_shop.py").write_text(TESTS.replace(": 12 EUR", ": 13 EUR"))
    code, out = run_pytest()
    assert code == 1
    assert (
        "the result of shop-price: expected 'lamp: 12 EUR', got 'lamp: 13 EUR'" in out
    )
    assert "1 failed" in out
    assert "error" not in out.splitlines()[-1]


def test_the_difference_is_reported_first_without_a_stack(
    project: Path, run_pytest: RunPytest, record: RunPytest
) -> None:
    """The report has the difference, the place in the test, and other options; nothing of what is between."""
    assert record()[0] == 0
    changed = TESTS.replace(": 12 EUR", ": 13 EUR").replace(
        "plan=False", "plan=False, max_iterations=7"
    )
    (project / "test_shop.py").write_text(changed)
    _, out = run_pytest()
    lines = out[out.index("___ test_price ___") :].splitlines()
    assert lines[1] == "The run differs from the recorded one:"
    assert lines[2].startswith("- request 1, the result of shop-price: expected")
    assert '"max_iterations": 15' in out and '"max_iterations": 7' in out
    assert re.search(r"\ntest_shop\.py:\d+: test_price\n", out)
    assert "planner_ext/" not in out and "Traceback" not in out
    _, whole = run_pytest("--full-trace")
    assert "planner_ext/" in whole


def test_the_plugin_is_found_and_loads_nothing() -> None:
    """Its entry point has the name of the module, which a conftest may list, too; Semantic Kernel waits for a test."""
    file = Path(__file__).parents[2] / "pyproject.toml"
    pyproject = tomllib.loads(file.read_text("utf-8"))
    points = pyproject["project"]["entry-points"]["pytest11"]
    assert points == {"planner_ext.pytest_plugin": "planner_ext.pytest_plugin"}
    code = (
        "import sys, planner_ext.pytest_plugin; print('semantic_kernel' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_a_test_that_fails_while_it_is_recorded_keeps_its_cassette(
    project: Path, record: RunPytest
) -> None:
    """Only a test that passes writes its cassette."""
    assert record()[0] == 0
    before = (project / CASSETTE).read_bytes()
    (project / "test_shop.py").write_text(TESTS.replace('"12 EUR."', '"13 EUR."'))
    assert record()[0] == 1
    assert (project / CASSETTE).read_bytes() == before


def test_a_marker_takes_the_options_of_a_replay(
    project: Path, run_pytest: RunPytest, record: RunPytest
) -> None:
    """A marker names another file, and has functions answer as recorded."""
    marked = TESTS.replace(
        "def test_price",
        '@pytest.mark.tape(functions="recorded", path="lamp.json")\ndef test_price',
    )
    (project / "test_shop.py").write_text(marked)
    assert record()[0] == 0
    (project / "test_shop.py").write_text(marked.replace(": 12 EUR", ": 13 EUR"))
    code, out = run_pytest("--strict-markers")
    assert code == 0, out
    assert (project / "lamp.json").is_file()


def test_markers_of_class_and_module_add_up(project: Path, record: RunPytest) -> None:
    """The scrubs of all markers count, and the nearest of every other option; a class is part of the file's name."""
    method = (
        TESTS[TESTS.index("def test_price") :]
        .replace("(tape)", "(self, tape)")
        .replace("\n", "\n    ")
    )
    marked = (
        TESTS[: TESTS.index("def test_price")]
        + "pytestmark = pytest.mark.tape(functions='recorded', scrub=lambda text: text.replace('lamp', '[scrubbed]'))\n"
        + "@pytest.mark.tape(scrub=['12 E'], functions='live')\nclass TestShop:\n"
        + "    @pytest.mark.tape(scrub='What does', functions='recorded')\n    "
    )
    (project / "test_shop.py").write_text(marked + method)
    code, out = record()
    assert code == 0, out
    text = (
        project / "cassettes" / "test_shop" / "TestShop_test_price.json"
    ).read_text()
    assert not [secret for secret in ("lamp", "12 E", "What does") if secret in text]


def test_a_misspelt_option_of_a_marker_is_named(
    project: Path, record: RunPytest
) -> None:
    """A misspelt scrub would leave secrets in the file, so a test with one fails before it is recorded."""
    (project / "test_shop.py").write_text(
        TESTS.replace("def test_", "@pytest.mark.tape(scrubs=['lamp'])\ndef test_")
    )
    code, out = record()
    assert code == 1
    assert "tape takes functions, on_difference, path, scrub by name; got scrubs" in out
    assert not (project / CASSETTE).exists()
