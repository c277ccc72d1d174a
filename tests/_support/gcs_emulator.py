"""Starts the emulator of Google Cloud Storage with the condition that it lacks: `ifGenerationMatch=0` creates only.

    python gcs_emulator.py PORT
    python gcs_emulator.py PORT FILE    every second upload fails with 503, and adds a byte to FILE

The emulator takes one request after the other, so a look before a write is one step with the write.
"""

from __future__ import annotations

import itertools
import sys
from http import HTTPStatus
from pathlib import Path
from typing import Any

from gcp_storage_emulator import server  # type: ignore[import-untyped]
from gcp_storage_emulator.handlers import objects  # type: ignore[import-untyped]


class Exists(Exception):
    """The object is there."""


class CreatingStorage:
    """The storage of the emulator, for a request that only creates."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def create_file(self, bucket: str, name: str, *args: Any) -> None:
        if name in self._storage.objects.get(bucket, {}):
            raise Exists
        self._storage.create_file(bucket, name, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


FAILURES = Path(sys.argv[2]) if len(sys.argv) > 2 else None
turns = itertools.cycle([False, True])


def insert(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
    if FAILURES is not None and next(turns):
        with FAILURES.open("ab") as file:
            file.write(b".")
        response.status = HTTPStatus.SERVICE_UNAVAILABLE
        response.json({"error": {"code": 503, "message": "this is a test"}})
        return
    is_creation = request.query.get("ifGenerationMatch") == ["0"]
    try:
        objects.insert(request, response, CreatingStorage(storage) if is_creation else storage, *args, **kwargs)
    except Exists:
        response.status = HTTPStatus.PRECONDITION_FAILED


if __name__ == "__main__":
    for _, handlers in server.HANDLERS:
        for method, handler in handlers.items():
            if handler is objects.insert:
                handlers[method] = insert
    server.create_server("127.0.0.1", int(sys.argv[1]), True).run()
