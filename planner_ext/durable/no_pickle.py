"""Keeps pickle out of DBOS's tables, so that the right to write a row is not the right to run code here."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

from dbos._serialization import DefaultSerializer

from planner_ext.durable.errors import StoreError

__all__ = ["no_pickle"]


@contextmanager
def no_pickle() -> Generator[None]:
    """Disable pickle in DBOS: a row names its serialization, so a pickled row would run code despite the configuration.

    With ``DBOSPortableJSONSerializer`` configured, DBOS 3.4 still unpickles a row that says ``py_pickle``.
    """
    methods = DefaultSerializer.serialize, DefaultSerializer.deserialize
    DefaultSerializer.serialize, DefaultSerializer.deserialize = _write_text, _refuse_pickle
    try:
        yield
    finally:
        DefaultSerializer.serialize, DefaultSerializer.deserialize = methods


def _write_text(self: DefaultSerializer, data: object) -> str:  # noqa: ARG001  (replaces a method)
    return json.dumps(str(data))


def _refuse_pickle(cls: DefaultSerializer, serialized_data: str) -> NoReturn:  # noqa: ARG001  (likewise)
    raise StoreError(
        f"A row of DBOS is written as pickle ({len(serialized_data)} characters). It was not read, since that may run "
        "code, and planner_ext writes JSON only: find out who wrote it."
    )
