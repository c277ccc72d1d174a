"""A store that no earlier start has written to. How the group is made of it is torch's business.

A launcher that starts all processes again, as torchrun does after one died or when a node comes, hands the same store
to every start (torch 2.13). Addresses of dead processes lie in it, and whoever comes first finds these instead of its
neighbour's. So the processes of a start agree on a prefix first, by a greeting that an old key cannot answer:

    each process   writes under its rank a word that nobody has used, and waits for the answer to this word
    process 0      answers each word that it finds, those of the dead as well, with the prefix of its start
    each process   says under the prefix that it has come; when all have, process 0 stops answering
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from trainwright.distributed.world import launcher_keeps_the_store
from trainwright.errors import ProcessFailedError

SCHEME = "trainwright"
POLL_S = 0.02


def init_method() -> str | None:
    """Where processes meet, for torch's `init_process_group`; None: where torch has them meet by itself."""
    if not launcher_keeps_the_store():
        return None
    _register()
    return f"{SCHEME}://"


def fresh_prefix(store: Any, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """A prefix that all processes of this start have and no other start had.

    Raises:
        ProcessFailedError: somebody did not come; said by process 0 (the others hear of it from the store).
    """
    word = uuid.uuid4().hex
    if rank == 0:
        _answer_all(store, word, world_size=world_size, timeout=timeout)
        return word
    store.set(f"trainwright/word/{rank}", word)
    prefix = str(store.get(f"trainwright/answer/{word}").decode())
    store.set(f"trainwright/come/{prefix}/{rank}", "")
    return prefix


def _answer_all(store: Any, prefix: str, *, world_size: int, timeout: timedelta) -> None:
    missing, answered = set(range(1, world_size)), set[bytes]()
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


def _meet(url: str, timeout: timedelta, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """torch's own way to the store by environment variables, and a prefix of this start in it."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous(f"env://?{urlsplit(url).query}", timeout=timeout, **kwargs))
    store.set_timeout(timeout)
    prefix = fresh_prefix(store, rank=rank, world_size=world_size, timeout=timeout)
    yield PrefixStore(f"trainwright/{prefix}", store), rank, world_size


@functools.cache
def _register() -> None:
    from torch.distributed.rendezvous import register_rendezvous_handler

    register: Any = register_rendezvous_handler  # torch has no types for it
    register(SCHEME, _meet)
