"""A scalar that has not arrived: what waits for it, what does not, and what it is then."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainwright.distributed.pending import PendingScalar, arrived

CPU = torch.device("cpu")
VALUE = 8.0


class Sender:
    """Counts how often the value is waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def receive(self) -> torch.Tensor:
        self.num_waits += 1
        return torch.tensor(VALUE)


USES: dict[str, Callable[[Any], Any]] = {
    "divided by": lambda pending: torch.tensor(32.0) / pending * 2,
    "added to a number": lambda pending: pending + 0,
    "item": lambda pending: pending.item(),
    "float": float,
    "int": int,
    "to": lambda pending: pending.to(torch.float64),
    "stacked": lambda pending: torch.stack([pending, pending])[1],
    "out of place": lambda pending: torch.mul(input=pending, other=1),
    "copied": lambda pending: copy.deepcopy(pending),
    "pickled": lambda pending: pickle.loads(pickle.dumps(pending)),
    "numpy": lambda pending: pending.numpy(),
    "detached": lambda pending: pending.detach(),
    "shown": lambda pending: eval(repr(pending), {"tensor": torch.tensor}),
    "arrived": arrived,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_each_operation_waits_once_and_has_the_value(use: Callable[[Any], Any]) -> None:
    sender = Sender()
    pending = PendingScalar.sent(sender.receive, device=CPU)
    assert float(use(pending)) == VALUE
    assert not isinstance(use(pending), PendingScalar)
    assert sender.num_waits == 1


def test_a_gradient_flows_through_what_is_divided_by_it() -> None:
    loss = torch.tensor(12.0, requires_grad=True)
    (loss / PendingScalar.sent(Sender().receive, device=CPU)).backward()
    assert loss.grad is not None
    assert loss.grad.item() == 1 / VALUE


def test_what_wrappers_ask_does_not_wait() -> None:
    sender = Sender()
    pending = PendingScalar.sent(sender.receive, device=CPU)
    assert isinstance(pending, torch.Tensor)
    assert torch.is_tensor(pending)
    assert (pending.device, pending.dtype, pending.requires_grad, pending.dim()) == (CPU, torch.float32, False, 0)
    assert pending.is_floating_point()
    assert sender.num_waits == 0


def test_code_that_goes_round_the_operations_of_torch_reads_no_number() -> None:
    pending = PendingScalar.sent(Sender().receive, device=CPU)
    with torch._C.DisableTorchFunctionSubclass():
        assert math.isnan(float(pending))
