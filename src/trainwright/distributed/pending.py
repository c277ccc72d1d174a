"""A number that other processes are still sending: the first operation on it waits for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from trainwright.support.tensor_tree import map_nested

# Wrappers look at these before the number is used. They are known without it.
KNOWN = (
    torch.Tensor.device.__get__,
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]  # a descriptor of C
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_floating_point,
    torch.Tensor.dim,
)


class PendingScalar(torch.Tensor):
    """An fp32 scalar that has not arrived. Any operation of torch waits for it and takes its value.

    Its own memory is NaN, which code that goes round torch's operations would read.
    """

    _receive: Callable[[], torch.Tensor]
    _received: torch.Tensor | None

    @classmethod
    def sent(cls, receive: Callable[[], torch.Tensor], *, device: torch.device) -> PendingScalar:
        """Makes one; `receive` waits for the value and returns it, an fp32 scalar on `device`, and is called once."""
        pending = _make_placeholder(device).as_subclass(cls)
        pending._receive = receive
        pending._received = None
        return pending

    def value(self) -> torch.Tensor:
        """Waits for the value, and returns it as an ordinary tensor."""
        if self._received is None:
            self._received = self._receive()
            del self._receive
        return self._received

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,  # as torch declares it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return func(*map_nested(arrived, args), **map_nested(arrived, kwargs or {}))


def arrived(value: Any) -> Any:
    """Returns the value of a pending scalar, and anything else as it is."""
    return value.value() if isinstance(value, PendingScalar) else value


@cache
def _make_placeholder(device: torch.device) -> torch.Tensor:
    return torch.full((), torch.nan, dtype=torch.float32, device=device)
