"""The process that speaks to an object store for a run: it has the client, reads files, hashes and sends them.

`python -m trainwright.capabilities.mirror.store_process PID` serves its parent PID (`process_client.py`); training
then shares neither the interpreter's lock nor random numbers with a client. On its standard input, a JSON value a line:
first `{"open": {...}}` with a URL, then calls such as `{"id": 1, "call": "send_file", ...}`, each of which is made on a
thread of its own. It answers `{"id": 1, "result": ...}` or `{"id": 1, "error": {...}}`. A file that is sent says
`{"id": 1, "sends": bytes}` every few megabytes and continues at `{"id": 1, "go": true}`, which limits its speed. It
ends when standard input does, or its parent.
"""

from __future__ import annotations

import base64
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.capabilities.mirror.store_client import FileSystem, has_condition, is_refusal, open_client, send_file
from trainwright.support.child_process import ParentPipes, end_own_group, ignore_signals
from trainwright.support.door import parse_json

NICENESS = 5
TURN_BYTES = 4 << 20  # sent before the speed is looked at
SIMPLE_ERRORS = (
    "ArgumentError",
    "MissingPackageError",
    "FileNotFoundError",
    "FileExistsError",
    "PermissionError",
    "IsADirectoryError",
    "NotADirectoryError",
    "ConnectionError",
    "TimeoutError",
    "BlockingIOError",
    "OSError",
    "NotImplementedError",
    "ValueError",
    "TypeError",
    "RuntimeError",
)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Returns an error in a form that `process_client.restore_error` raises again."""
    names = [kind.__name__ for kind in type(error).__mro__]
    return {
        "kind": names[0],
        "base": next((name for name in names if name in SIMPLE_ERRORS), "RuntimeError"),
        "text": str(error),
        "errno": error.errno if isinstance(error, OSError) else None,
        "is_refusal": is_refusal(error),
    }


class StoreCalls:
    """Calls of the run, made with one client.

    Args:
        client: of the store.
        answer: writes an answer.
    """

    def __init__(self, client: FileSystem, answer: Callable[..., None]) -> None:
        self._client = client
        self._answer = answer
        self._turns: dict[int, queue.SimpleQueue[bool]] = {}  # of files that are sent
        self._calls: dict[str, Callable[..., Any]] = {
            "ls": self.ls,
            "find": self.find,
            "info": self.info,
            "modified": self.modified,
            "cat_file": self.cat_file,
            "pipe_file": self.pipe_file,
            "rm_file": self.rm_file,
            "rmdir": self.rmdir,
            "call_s3": self.call_s3,
        }

    def take(self, message: dict[str, Any]) -> None:
        """Takes a message of the run, without waiting."""
        number = int(message["id"])
        if "go" in message:
            if number in self._turns:
                self._turns[number].put(True)
            return
        if message["call"] == "send_file":
            self._turns[number] = queue.SimpleQueue()
        threading.Thread(target=self._make, args=(number, message), daemon=True).start()

    def _make(self, number: int, message: dict[str, Any]) -> None:
        settings = {name: value for name, value in message.items() if name not in ("id", "call")}
        try:
            if message["call"] == "send_file":
                result = self.send_file(number, **settings)
            else:
                result = self._calls[message["call"]](**settings)
        except BaseException as error:
            self._answer(id=number, error=describe_error(error))
        else:
            self._answer(id=number, result=result)

    def send_file(self, number: int, *, source: str, path: str) -> str:
        """Sends a file in turns; returns its checksum."""
        turns = self._turns[number]
        unsent = Path(source).stat().st_size
        granted = 0

        def pace(num_bytes: int) -> None:
            nonlocal granted, unsent
            if granted < num_bytes:
                turn = max(num_bytes, min(TURN_BYTES, unsent))
                self._answer(id=number, sends=turn)
                turns.get()
                granted = turn
            granted -= num_bytes
            unsent -= num_bytes

        try:
            return send_file(self._client, Path(source), path, pace=pace)
        finally:
            del self._turns[number]

    def _fresh(self, path: str) -> FileSystem:
        """Returns the client, which asks the store again: that of the Hub keeps listings although told not to."""
        self._client.invalidate_cache(path)
        return self._client

    def ls(self, path: str) -> list[str]:
        """Returns the paths in a directory."""
        return [str(one) for one in self._fresh(path).ls(path, detail=False)]

    def find(self, path: str) -> dict[str, int]:
        """Returns the sizes of the files below a directory, by their paths."""
        return {name: int(about["size"]) for name, about in self._fresh(path).find(path, detail=True).items()}

    def info(self, path: str) -> dict[str, float | None]:
        """Returns size and time of an object."""
        found = self._fresh(path).info(path)
        uploaded = found.get("uploaded_at")
        return {"size": int(found["size"]), "uploaded_at": None if uploaded is None else uploaded.timestamp()}

    def modified(self, path: str) -> float:
        """Returns when an object was written."""
        return float(self._fresh(path).modified(path).timestamp())

    def cat_file(self, path: str, start: int | None, end: int | None) -> str:
        """Returns the bytes of an object, as base64."""
        settings = {} if start is None and end is None else {"start": start, "end": end}
        return base64.b64encode(self._fresh(path).cat_file(path, **settings)).decode()

    def pipe_file(self, path: str, content: str, mode: str | None) -> None:
        """Writes a small object."""
        settings = {} if mode is None else {"mode": mode}
        self._client.pipe_file(path, base64.b64decode(content), **settings)

    def rm_file(self, path: str) -> None:
        """Deletes an object."""
        self._client.rm_file(path)

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        self._client.rmdir(path)

    def call_s3(self, method: str, settings: dict[str, str]) -> dict[str, list[dict[str, str]]]:
        """Lists or aborts uploads of S3 that were not completed."""
        found = self._client.call_s3(method, **settings) or {}
        uploads = found.get("Uploads", ()) if isinstance(found, dict) else ()
        return {"Uploads": [{name: str(one[name]) for name in ("Key", "UploadId")} for one in uploads]}


def open_for_run(settings: dict[str, Any]) -> tuple[FileSystem, dict[str, Any]]:
    """Returns the client that a run asked for, and what the run must know of it."""
    import fsspec

    fsspec.config.conf.update(settings["conf"])
    for protocol, name in settings["classes"].items():
        fsspec.register_implementation(protocol, name, clobber=True)
    client, root = open_client(settings["url"])
    protocol = client.protocol
    facts = {
        "root": root,
        "protocol": [protocol] if isinstance(protocol, str) else list(protocol),
        "has_condition": has_condition(client),
        "has_uploads": hasattr(client, "call_s3"),
    }
    return client, facts


def main() -> None:
    """Serves the parent process whose number is the only argument."""
    parent = int(sys.argv[1])
    ignore_signals()
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    pipes = ParentPipes()
    opened: list[StoreCalls] = []

    def begin(settings: dict[str, Any]) -> None:
        try:
            client, facts = open_for_run(settings)
        except BaseException as error:
            pipes.answer(failed=describe_error(error))
        else:
            opened.append(StoreCalls(client, pipes.answer))
            pipes.answer(ready=facts)

    try:
        for line in pipes.lines(parent):
            message = parse_json(line)
            if opened:
                opened[0].take(message)
            else:
                threading.Thread(target=begin, args=(message["open"],), daemon=True).start()
    finally:
        end_own_group()


if __name__ == "__main__":
    main()
