"""The only module that uses internals of torch's DataLoader worker loop, for which torch has no public interface.

Two names of `torch.utils.data._utils.worker`, checked with torch 2.13:
- `_worker_info`: the return value of `get_worker_info`. Its objects refuse assignments, and a dataset may have imported
  the function, so neither can be replaced for one of several sources, or watched.
- `ExceptionWrapper`: turns an error into text within the worker; only at that moment can its frames be inspected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

# Any: torch's description of a worker has no public type.


def set_worker_info(info: Any) -> None:
    """Replaces the return value of `get_worker_info` in this process; None means that it is not a worker."""
    torch_worker._worker_info = info


def show_dataset(dataset: object) -> None:
    """Sets the `dataset` that `get_worker_info` returns in this worker: the user's, not our reader of it."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # its objects refuse assignments


@contextmanager
def without_worker() -> Iterator[None]:
    """Makes `get_worker_info` return None inside the context."""
    actual = get_worker_info()
    set_worker_info(None)
    try:
        yield
    finally:
        set_worker_info(actual)


def add_to_errors(make_note: Callable[[], str]) -> None:
    """Adds `make_note()`, called while an error is handled, to the text of each error of this worker from now on."""
    wrap: Any = torch_worker.ExceptionWrapper  # type: ignore[attr-defined]

    def wrapped(exc_info: Any = None, where: str = "in background") -> Any:
        wrapper = wrap(exc_info, where)
        note = make_note()
        if note:
            wrapper.exc_msg += f"{note} This was {where}.\n"
        return wrapper

    torch_worker.ExceptionWrapper = wrapped  # type: ignore[attr-defined, assignment]
