"""The fast part of the suite: ``pytest -m fast`` checks core, engine and approval, and imports nothing else."""

import asyncio
import gc
import os
from collections.abc import AsyncGenerator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import pytest
import pytest_asyncio
from hypothesis import settings

from support.examples import tried

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from support.postgres import PostgresServer
    from support.processes import Lives
    from support.temporal import TemporalServer

settings.register_profile("suite", tried(50))
settings.load_profile("suite")

FAST = {"core", "engine", "approval"}
"""Folders whose tests need neither processes nor servers."""
TESTS = Path(__file__).parent


def pytest_xdist_auto_num_workers() -> int:
    """Use one process more than there are cores: some tests wait for processes and servers."""
    return (os.cpu_count() or 1) + 1


def folder_of(path: Path) -> str:
    """Name the folder of the tests that a path lies in."""
    return path.relative_to(TESTS).parts[0] if path != TESTS else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what is not asked for."""
    if config.option.markexpr == "fast" and collection_path.is_relative_to(TESTS):
        return folder_of(collection_path) not in {"", *FAST} or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for garbage in what a test makes, and never in the million objects of imports and of the cases."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the fast part."""
    for item in items:
        if folder_of(item.path) in FAST:
            item.add_marker(pytest.mark.fast)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[
    None, pytest.TestReport, pytest.TestReport
]:
    """Escape the lone surrogates that some tests log: a report has to be sent from process to process."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode())
        for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session", autouse=True)
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let HTTP clients read one certificate: reading all of them takes each 20 ms, and no test speaks TLS."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text("utf-8").partition(end)
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(first + end, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session")
def lives() -> "Iterator[Lives]":
    """Make processes quickly, which may be killed."""
    from support.processes import Lives

    lives = Lives()
    yield lives
    lives.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> "AsyncGenerator[Browser]":
    """Run Chromium once for the session; its tests run in the session's event loop."""
    from support.browser import chromium

    async with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def postgres() -> "Iterator[PostgresServer]":
    """Run one server for the session."""
    from support.postgres import PostgresServer

    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def temporal() -> "Iterator[TemporalServer]":
    """Run one Temporal server for the session."""
    from support.temporal import TemporalServer

    with TemporalServer() as server:
        asyncio.run(server.connect())
        yield server
