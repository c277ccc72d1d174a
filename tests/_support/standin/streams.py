"""Streams and events of the stand-in: which operation comes before which, by clocks of all streams for each of them.

Operations are computed at once. An operation that touches memory which another stream wrote, without a wait between
the two, raises MissingWaitError. A copy to pinned memory that does not wait arrives when the host waits for it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from .counts import COUNTS


class MissingWaitError(RuntimeError):
    """An operation touches memory that another stream may still write or read."""


Clock = dict[int, int]  # stream -> number of its operations that are known to be done
_numbers = itertools.count()
ALL: weakref.WeakSet[Stream] = weakref.WeakSet()


class Stream:
    """Stands in for `torch.Stream`."""

    def __init__(self, device: Any = None, **kwargs: Any) -> None:
        self.device = torch.device("accel", 0) if device is None else torch.device(device)
        self.stream_id = next(_numbers)
        self.clock: Clock = {self.stream_id: 0}
        self.on_their_way: list[tuple[int, Callable[[], None]]] = []  # copies to the host, by operation
        self._outer: list[Stream] = []
        ALL.add(self)

    def tick(self) -> int:
        """Begins an operation."""
        self.clock[self.stream_id] += 1
        return self.clock[self.stream_id]

    def wait_event(self, event: Event) -> None:
        for stream, done in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), done)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.device)
        event.record(self)
        return event

    def query(self) -> bool:
        return not self.on_their_way

    def synchronize(self) -> None:
        count_wait("stream.synchronize")
        self.deliver(self.clock[self.stream_id])

    def deliver(self, done: int) -> None:
        """Copies to the host up to an operation arrive."""
        arrived = [copy for number, copy in self.on_their_way if number <= done]
        self.on_their_way = [pair for pair in self.on_their_way if pair[0] > done]
        for copy in arrived:
            copy()

    def __enter__(self) -> Stream:
        self._outer.append(current_stream())
        _local.stream = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _local.stream = self._outer.pop()


class Event:
    """Stands in for `torch.Event`."""

    def __init__(self, device: Any = None, **kwargs: Any) -> None:
        self.device = torch.device("accel", 0) if device is None else torch.device(device)
        self.clock: Clock = {}
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        self.clock = dict(self._stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return float(end.clock.get(0, 0) - self.clock.get(0, 0))  # operations, as this device has no time

    def synchronize(self) -> None:
        if self._stream is None:
            return
        done = self.clock[self._stream.stream_id]
        count_wait("event.synchronize", is_behind=self._stream.clock[self._stream.stream_id] > done)
        self._stream.deliver(done)


DEFAULT = Stream("cpu")
_local = threading.local()


def count_wait(name: str, *, is_behind: bool = False) -> None:
    """Counts a wait of the host; `is_behind`: the device has work left when it is over."""
    (COUNTS.behind if is_behind else COUNTS.waits)[name] += 1


def current_stream(device: Any = None) -> Stream:
    return getattr(_local, "stream", DEFAULT)


def synchronize(device: Any = None) -> None:
    """Waits for all streams."""
    count_wait("synchronize")
    deliver_all()


def deliver_all() -> None:
    for stream in [*ALL]:
        stream.deliver(stream.clock[stream.stream_id])


class Use:
    """Who wrote and who reads a block of memory."""

    def __init__(self) -> None:
        self.owner = current_stream()  # whose operations come after those before, when the memory is taken again
        self.written: tuple[Stream, int] | None = None
        self.read: dict[int, tuple[Stream, int]] = {}
        self.kept_for: set[int] = {self.owner.stream_id}

    def touch(self, stream: Stream, now: int, *, writes: bool, name: str) -> None:
        """Notes an operation; MissingWaitError if it may run beside another one that it must follow."""
        before = [*self.read.values()] if writes else []
        if self.written is not None:
            before.append(self.written)
        for other, number in before:
            if other is not stream and stream.clock.get(other.stream_id, 0) < number:
                raise MissingWaitError(f"{name}: no wait for the stream that uses the same memory")
        if writes:
            self.written = (stream, now)
            self.read.clear()
        else:
            self.read[stream.stream_id] = (stream, now)

    def is_freed_early(self) -> bool:
        """True if the memory may be taken again while a stream other than its owner reads it."""
        users = [*self.read.values(), *([self.written] if self.written is not None else [])]
        return any(
            user.stream_id not in self.kept_for and self.owner.clock.get(user.stream_id, 0) < number
            for user, number in users
        )
