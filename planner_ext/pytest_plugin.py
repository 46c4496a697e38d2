"""A pytest plugin: the fixture ``tape`` records a test's runs with a real model once, and replays them.

Pytest finds it by itself where the package is installed, and it loads nothing until a
test uses it. A test puts its kernel on the tape; it needs a service and a key only to record:

    async def test_refund(tape):
        kernel = make_kernel()
        if tape.recording:
            kernel.add_service(OpenAIChatCompletion(service_id="chat"))
        result = await make_planner().invoke(tape.kernel(kernel), "Refund order 7.")
        assert result.final_answer == "Order 7 is refunded."

Record it once, look at the file, and commit it:

    pytest --record tests/test_orders.py::test_refund       # writes tests/cassettes/test_orders/test_refund.json
    pytest                                                  # replays it: no network, no key

A replay fails where the application now differs: the report begins with the
differences, and has no stack unless ``--full-trace`` is given. A failed recording leaves the cassette
unchanged. Markers take the options of `replay` and `record`, and the cassette's path
relative to the test's folder; the nearest counts, but all scrubs do:

    @pytest.mark.tape(functions="recorded", scrub=["customer-[0-9]+"], path="refund.json")
"""

import re
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from planner_ext.testing.scrub import Scrub
    from planner_ext.testing.tape import Tape

_PASSED = pytest.StashKey[bool]()
_OPTIONS = frozenset({"functions", "on_difference", "scrub", "path"})


class _FailedError(Exception):
    """Leaves the tape after a failed test: nothing is written or compared."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--record``."""
    group = parser.getgroup("planner_ext")
    group.addoption(
        "--record",
        action="store_true",
        help="Call the models, and rewrite the tests' cassettes.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    line = "tape(functions, on_difference, scrub, path): options of planner_ext.testing.replay, and the file"
    config.addinivalue_line("markers", line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember whether a test has passed; report a replay that differs by what differs."""
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    if call.excinfo is not None and not item.config.getoption("fulltrace"):
        found = _difference(call.excinfo.value)
        own = [one for one in call.excinfo.traceback if one.path == item.path]
        places = [f"{item.path.name}:{one.lineno + 1}: {one.name}" for one in own]
        if found is not None:
            report.longrepr = "\n".join([str(found), "", *places])
    return report


def _difference(error: BaseException | None) -> BaseException | None:
    """Find the difference of a replay among an error and its causes."""
    while error is not None and type(error).__name__ != "ReplayDifferenceError":
        error = error.__cause__ or error.__context__
    return error


def _options(node: Any) -> "tuple[dict[str, Any], list[Scrub]]":
    """Merge the options of a test's markers, and add up their scrubs."""
    options: dict[str, Any] = {}
    scrub: list[Scrub] = []
    for marker in reversed([*node.iter_markers("tape")]):  # the nearest is the last
        if marker.args or not _OPTIONS.issuperset(marker.kwargs):
            wrong = ", ".join(
                [*map(repr, marker.args), *(set(marker.kwargs) - _OPTIONS)]
            )
            pytest.fail(
                f"The marker tape takes {', '.join(sorted(_OPTIONS))} by name; got {wrong}.",
                pytrace=False,
            )
        options |= marker.kwargs
        scrub.append(options.pop("scrub", ()))
    return options, scrub


@pytest.fixture
def tape(request: pytest.FixtureRequest) -> "Generator[Tape]":
    """Replay the cassette of this test, or with ``--record`` write it."""
    from planner_ext.testing.tape import record, replay  # noqa: PLC0415  (only for a test that uses it)

    node: Any = request.node
    options, scrub = _options(node)
    name = re.sub(r"[^\w.-]+", "_", node.nodeid.partition("::")[2])
    path = request.path.parent / options.pop(
        "path", f"cassettes/{request.path.stem}/{name}.json"
    )
    if request.config.getoption("--record"):
        block = record(path, scrub=scrub)
    elif path.is_file():
        block = replay(path, **options)
    else:
        pytest.fail(
            f"There is no cassette {path}. Record it: pytest --record {node.nodeid}",
            pytrace=False,
        )
    with suppress(_FailedError), block as made:
        yield made
        if not node.stash.get(_PASSED, False):
            raise _FailedError
