"""A PgBouncer in front of a PostgreSQL of the tests, where the machine has one."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg

__all__ = ["PROGRAM", "pooler"]

PROGRAM = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
_UNPRIVILEGED = "nobody"
_PORT = 6432

_SETTINGS = """
[databases]
* = host={server}
[pgbouncer]
unix_socket_dir = {folder}
listen_port = {port}
auth_type = any
pool_mode = {mode}
ignore_startup_parameters = extra_float_digits
logfile = {folder}/log
"""
"""``auth_type = any`` connects each client as the user of the database's line, which is PgBouncer's own."""


@contextmanager
def pooler(url: str, mode: str) -> Generator[str]:
    """Start a pooler in front of a database, and return the address through it.

    Args:
        url: The address of the database, which names a socket.
        mode: ``session`` or ``transaction``.
    """
    assert PROGRAM is not None
    parts = urlsplit(url)
    server = parse_qs(parts.query)["host"][0]
    folder = Path(tempfile.mkdtemp(prefix="pooler-"))
    user = _UNPRIVILEGED if os.geteuid() == 0 else None
    settings = folder / "pgbouncer.ini"
    text = _SETTINGS.format(
        server=f"{server} user=postgres", folder=folder, port=_PORT, mode=mode
    )
    settings.write_text(text)
    if user is not None:
        shutil.chown(folder, user)
    process = subprocess.Popen(
        [PROGRAM, "-q", str(settings)],
        user=user,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        pooled = f"postgresql://postgres@{parts.path}?host={folder}&port={_PORT}"
        _wait_for(pooled, process)
        yield pooled
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    while True:
        try:
            with psycopg.connect(url):
                return
        except psycopg.OperationalError:
            assert process.poll() is None, "The pooler has ended."
