"""What the host asked of the stand-in."""

from __future__ import annotations

from collections import Counter


class Counts:
    """What the host asked of the device since `clear`."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.waits: Counter[str] = Counter()  # of the host, by operation, until the device has nothing left to do
        self.behind: Counter[str] = Counter()  # of the host, for something that is followed by other work of the device
        self.launches: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.to_device = 0
        self.to_host = 0
        self.pageable = 0  # copies to the device out of memory that is not pinned
        self.pins = 0

    @property
    def num_waits(self) -> int:
        return sum(self.waits.values())

    @property
    def num_launches(self) -> int:
        return sum(self.launches.values())


COUNTS = Counts()
