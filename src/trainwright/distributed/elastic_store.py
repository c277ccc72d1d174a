"""Rendezvous of processes that torchrun may restart. Only imported where its environment says so.

torchrun hands the same store to the processes when it restarts them, after one died or when a node joins (torch 2.13).
The addresses of the dead processes are still in it, and torch would connect to them. So the processes of a start agree
on a prefix first that no earlier start has written to, by a handshake that no old key can answer:

    each rank   writes a unique word under its rank, and waits for the answer to this word
    rank 0      answers every word, even of dead processes, with the prefix of this start
    each rank   acknowledges under the prefix; when all have, rank 0 stops answering
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainwright.errors import ProcessFailedError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

SCHEME = "trainwright"
POLL_S = 0.02


@functools.cache
def register() -> str:
    """Registers the rendezvous by a prefix with torch; returns its URL for `init_process_group`."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    handler: Any = register_rendezvous_handler  # torch has no types for it
    handler(SCHEME, _meet)
    return f"{SCHEME}://"


def fresh_prefix(store: Store, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """Agrees on a prefix of this start; ProcessFailedError in rank 0 after the timeout, the store's in the others."""
    word = uuid.uuid4().hex
    if rank == 0:
        _answer_all(store, word, world_size=world_size, timeout=timeout)
        return word
    store.set(f"trainwright/word/{rank}", word)
    prefix = str(store.get(f"trainwright/answer/{word}").decode())
    store.set(f"trainwright/come/{prefix}/{rank}", "")
    return prefix


def _answer_all(store: Store, prefix: str, *, world_size: int, timeout: timedelta) -> None:
    missing = set(range(1, world_size))
    answered = set[bytes]()
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for key in (f"trainwright/word/{rank}" for rank in missing):
            if store.check([key]) and (word := store.get(key)) not in answered:
                store.set(f"trainwright/answer/{word.decode()}", prefix)
                answered.add(word)
        missing = {rank for rank in missing if not store.check([f"trainwright/come/{prefix}/{rank}"])}
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)))
            raise ProcessFailedError(
                f"Process {names} of {world_size} did not come within {timeout.total_seconds():g} s (ddp_timeout)."
            )
        time.sleep(POLL_S if missing else 0)


def _meet(url: str, timeout: timedelta, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:  # Any: torch's options
    """Yields the store of torch's rendezvous by environment variables, under the prefix of this start."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous(f"env://?{urlsplit(url).query}", timeout=timeout, **kwargs))
    store.set_timeout(timeout)
    prefix = fresh_prefix(store, rank=rank, world_size=world_size, timeout=timeout)
    yield PrefixStore(f"trainwright/{prefix}", store), rank, world_size
