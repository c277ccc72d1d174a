"""A client of an object store whose work is done by a process of its own (`store_process.py`).

It has those calls of an fsspec client that `remote` makes. The process is started again if it dies; a call that was
under way is then an error. What does not answer in time is ended.
"""

from __future__ import annotations

import base64
import builtins
import importlib.util
import itertools
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainwright import errors
from trainwright._types import JSONObject, without_tokens
from trainwright.support.child_process import ChildProcess, module_command, module_environment
from trainwright.support.deadline import HangsError

logger = logging.getLogger(__name__)

MODULE = "trainwright.capabilities.mirror.store_process"
START_LIMIT_S = 120.0  # for a process that imports and opens a client
NUM_STARTS = 3  # of a process that ends before it has opened a client
LINE_BYTES = 1 << 27  # of an answer; a manifest in base64 is the longest
WAIT_S = 3600.0  # for a line of a process that has nothing to do
HERE_ONLY = ("memory",)  # file systems in the memory of a process


@dataclass(frozen=True, slots=True)
class ClientSetup:
    """What the process needs of this one to open a URL; or why it cannot."""

    obstacle: str = ""
    is_silent: bool = False  # whether nobody needs to know
    classes: dict[str, str] = field(default_factory=dict)  # registered file systems: protocol -> module and class
    conf: dict[str, Any] = field(default_factory=dict)  # settings of fsspec


def find_setup(url: str) -> ClientSetup:
    """Returns what another process needs to open a URL."""
    import fsspec
    from fsspec.registry import known_implementations, registry

    classes = {}
    for part in url.split("::"):
        protocol = part.partition("://")[0]
        if protocol in HERE_ONLY:
            return ClientSetup(obstacle=f"{protocol}:// exists in this process alone", is_silent=True)
        known = known_implementations.get(protocol, {}).get("class")
        found = registry.get(protocol)
        if found is None or _imported(known) is found:
            if known is not None:
                classes[protocol] = known
            continue
        name = f"{found.__module__}.{found.__qualname__}"
        if found.__module__ == "__main__" or _imported(name) is not found or not _is_in_file(found.__module__):
            return ClientSetup(
                obstacle=f"its file system {found.__qualname__} is not in a module that another process can import"
            )
        classes[protocol] = name
    try:
        json.dumps(fsspec.config.conf)
    except (TypeError, ValueError):
        return ClientSetup(obstacle="fsspec.config.conf has values that cannot be written as JSON")
    return ClientSetup(classes=classes, conf=dict(fsspec.config.conf))


def _imported(name: str | None) -> object:
    """Returns the loaded class of a dotted name; None if there is none."""
    module, _, last = (name or "").rpartition(".")
    return getattr(sys.modules.get(module), last, None)


def _is_in_file(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def restore_error(values: JSONObject) -> Exception:
    """Returns the error that `store_process.describe_error` has described."""
    name = str(values["base"])
    base: type[Exception] = getattr(errors, name, None) or getattr(builtins, name)
    kind = str(values["kind"])
    made: Any = (base if kind == name else type(kind, (base,), {}))(str(values["text"]))
    if isinstance(made, OSError):
        made.errno = values["errno"]
    if values["is_refusal"]:
        made.code = 403  # as `is_refusal` reads it
    found: Exception = made
    return found


class _Link:
    """One process, from its start to its end, and the calls that wait for its answers."""

    def __init__(self, url: str, setup: ClientSetup, limit_s: Callable[[], float]) -> None:
        self._shown = without_tokens(url)
        self._limit_s = limit_s
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[JSONObject]] = {}
        self._lock = threading.Lock()
        self._opening: JSONObject = {}  # what it has answered to the URL
        self._has_opened = threading.Event()
        self._end: str | None = None  # how it has ended; calls are told
        self._is_stopped = False
        self.is_told = False  # whether a call has raised that
        command = module_command(MODULE, str(os.getpid()))
        self._process = ChildProcess(command, module_environment(os.environ), max_bytes=LINE_BYTES)
        threading.Thread(target=self._read, name="trainwright-store", daemon=True).start()
        self._write({"open": {"url": url, "classes": setup.classes, "conf": setup.conf}})

    def open(self) -> JSONObject:
        """Waits until it has opened the URL; returns what it says of that, or raises its error."""
        if not self._has_opened.wait(START_LIMIT_S):
            raise self._hangs(START_LIMIT_S)
        if "failed" in self._opening:
            self.stop()
            raise restore_error(self._opening["failed"])
        if not self._opening:
            raise self._ended()
        facts: JSONObject = self._opening["ready"]
        return facts

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Returns whether it has ended, or is about to."""
        return self._is_stopped or self._process.has_ended()

    def stop(self) -> None:
        """Ends the process; calls that wait for it raise an error."""
        self._is_stopped = True
        self._process.end_group()

    def describe_end(self) -> str:
        """Returns how a process that has ended did so."""
        return self._process.describe_end()

    def call(self, what: str, send: Callable[[int], None], settings: JSONObject) -> Any:
        """Makes a call; returns its result, or raises its error. `send` is called with the bytes of each turn."""
        self.open()
        number = next(self._numbers)
        answers = self._expect(number)
        try:
            self._write({"id": number, "call": what, **settings})
            while True:
                answer = self._next(answers, self._limit_s())
                if "sends" in answer:
                    send(int(answer["sends"]))
                    self._write({"id": number, "go": True})
                elif "error" in answer:
                    raise restore_error(answer["error"])
                else:
                    return answer["result"]
        finally:
            del self._waiting[number]

    def _expect(self, number: int) -> queue.SimpleQueue[JSONObject]:
        """Returns the queue of the answers to a call."""
        with self._lock:
            answers: queue.SimpleQueue[JSONObject] = queue.SimpleQueue()
            self._waiting[number] = answers
            if self._end is not None:
                answers.put({})
        return answers

    def _write(self, message: JSONObject) -> None:
        if not self._process.write(json.dumps(message)):
            self.stop()  # the reader tells all calls

    def _next(self, answers: queue.SimpleQueue[JSONObject], limit_s: float) -> JSONObject:
        """Returns the next answer to a call; an error if the process ends or hangs."""
        try:
            answer = answers.get(timeout=limit_s)
        except queue.Empty:
            raise self._hangs(limit_s) from None
        if not answer:
            raise self._ended()
        return answer

    def _hangs(self, limit_s: float) -> HangsError:
        self.is_told = True
        self.stop()
        return HangsError(f"{self._shown} has not answered for {limit_s:g} s")

    def _ended(self) -> ConnectionError:
        self.is_told = True
        return ConnectionError(f"the process that speaks to it ended with {self._end}")

    def _read(self) -> None:
        """Hands answers to the calls until the process ends."""
        process = self._process
        try:
            while True:
                answer = process.next_line(WAIT_S)
                if answer is not None and "id" not in answer:
                    self._opening = answer
                    self._has_opened.set()
                elif answer is not None:
                    waiting = self._waiting.get(answer["id"])
                    if waiting is not None:
                        waiting.put(answer)
                elif not process.is_silent:
                    break
        finally:
            end = process.describe_end()
            process.close()
            with self._lock:
                self._end = end
                self._has_opened.set()
                for waiting in self._waiting.values():
                    waiting.put({})


class ProcessClient:
    """Client of a store in a process of its own, which is started at once, and again after its end.

    Args:
        url: what is opened.
        setup: what the process needs of this one.
        limit_s: returns the seconds after which a call without an answer counts as hanging.

    Raises:
        ArgumentError: fsspec does not know such a URL.
        MissingPackageError: the package for it is missing.
        OSError: the process cannot be started, ends or hangs.
    """

    is_apart = True

    def __init__(self, url: str, setup: ClientSetup, *, limit_s: Callable[[], float]) -> None:
        self._url = url
        self._setup = setup
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._said: set[str] = set()  # how processes ended
        self._link: _Link | None = None
        facts = self._first_facts()
        self.root = str(facts["root"])
        self.protocol = tuple(facts["protocol"])
        self.has_condition = bool(facts["has_condition"])
        self.call_s3 = self._call_s3 if facts["has_uploads"] else None

    def _first_facts(self) -> JSONObject:
        for _ in range(NUM_STARTS - 1):
            with suppress(ConnectionError):
                return self._live_link().open()
        return self._live_link().open()

    @property
    def pid(self) -> int | None:
        """Number of the process; None if there is none now."""
        link = self._link
        return None if link is None or link.has_ended() else link.pid

    def restart(self) -> None:
        """Ends the process; the next call starts a new one, which reads credentials and variables anew."""
        with self._lock:
            link = self._link
            self._link = None
        if link is not None:
            link.stop()

    def close(self) -> None:
        """Ends the process for good."""
        self._is_closed = True
        self.restart()

    def _call(self, what: str, *, send: Callable[[int], None] = lambda num_bytes: None, **settings: Any) -> Any:
        return self._live_link().call(what, send, settings)

    def _live_link(self) -> _Link:
        """Returns the link to a process that lives, which is started if there is none."""
        with self._lock:
            if self._is_closed:
                raise ConnectionError("the run has ended")
            link = self._link
            if link is not None and not link.has_ended():
                return link
            if link is not None and not link.is_told:
                end = link.describe_end()
                # said once: another end is no other cause
                say = logger.debug if end in self._said else logger.warning
                self._said.add(end)
                say("The process that copies to %s ended with %s; it is started again.", without_tokens(self._url), end)
            self._link = None
            self._link = _Link(self._url, self._setup, self._limit_s)
            return self._link

    # -- calls of a client of fsspec -----------------------------------------------------------------------------------

    def invalidate_cache(self, path: str) -> None:
        """Does nothing: the process asks the store at each call."""

    def ls(self, path: str, *, detail: bool) -> list[str]:
        """Returns the paths in a directory."""
        return list(self._call("ls", path=path))

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, int]]:
        """Returns the sizes of the files below a directory, by their paths."""
        return {name: {"size": size} for name, size in self._call("find", path=path).items()}

    def info(self, path: str) -> dict[str, Any]:
        """Returns size and time of an object."""
        found = self._call("info", path=path)
        uploaded = found["uploaded_at"]
        return {"size": found["size"], "uploaded_at": None if uploaded is None else _moment(uploaded)}

    def modified(self, path: str) -> datetime:
        """Returns when an object was written."""
        return _moment(self._call("modified", path=path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Returns the bytes of a small object."""
        return base64.b64decode(self._call("cat_file", path=path, start=start, end=end))

    def pipe_file(self, path: str, content: bytes, mode: str | None = None) -> None:
        """Writes a small object."""
        self._call("pipe_file", path=path, content=base64.b64encode(content).decode(), mode=mode)

    def rm_file(self, path: str) -> None:
        """Deletes an object."""
        self._call("rm_file", path=path)

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        self._call("rmdir", path=path)

    def send_file(self, source: Path, path: str, *, pace: Callable[[int], None]) -> str:
        """Sends a file, and returns its checksum; `pace` is called with the bytes that are sent next."""
        return str(self._call("send_file", send=pace, source=str(source.absolute()), path=path))

    def _call_s3(self, method: str, **settings: str) -> JSONObject:
        found: JSONObject = self._call("call_s3", method=method, settings=settings)
        return found


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=UTC)
