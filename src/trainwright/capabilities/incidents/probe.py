"""Probe: repeats forward and backward of a window with hooks that find where a bad value began. Makes no update.

The gradients are returned by autograd and not stored, so that neither the step's gradients nor an engine's wrapper are
affected. Gradients and buffers of the model are unchanged afterwards; random states are the caller's responsibility.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainwright._types import Batch, JSONObject, without_tokens
from trainwright.support.model_modes import unchanged_model
from trainwright.support.tensor_tree import iterate_tensors, map_nested

MOST_PARAMETERS = 5  # number of parameters with the largest gradients to report
MOST_PROBES = 64  # limit for trials with parts of a batch, when searching for a sample

Losses = Callable[[], Iterator[torch.Tensor]]  # yields the losses of a window's micro-batches, one after another


@dataclass(slots=True)
class Findings:
    """Result of a probe."""

    losses: list[torch.Tensor] = field(default_factory=list)  # per micro-batch, detached
    module: str = ""  # first module with a non-finite output; empty if there is none
    inputs_are_finite: bool = True  # inputs of that module
    is_root: bool = False  # that module is the model itself, so the outputs of all others are finite
    # first module, in backward order, with a non-finite gradient of its output
    gradient_of: str = ""
    gradients: dict[str, float] = field(default_factory=dict)  # norm of each parameter's gradient
    error: str = ""  # type and message of an error; empty if there was none

    @property
    def is_finite(self) -> bool:
        """True if all losses and gradients are finite and there was no error."""
        norms = torch.tensor(list(self.gradients.values()), dtype=torch.float64)
        return not self.error and bool(norms.isfinite().all()) and all(map(is_finite, self.losses))

    @property
    def origin(self) -> str:
        """Describes where the value began; empty if everything is finite."""
        if self.module:
            where = f"the output of {self.module}"
            if self.is_root:
                return f"{where}; the outputs of its modules are finite"
            return where if self.inputs_are_finite else f"{where}, whose input is not finite"
        if not all(map(is_finite, self.losses)):
            return "the loss, after the last module"
        if self.gradient_of:
            return f"the gradient at the output of {self.gradient_of}; all outputs are finite"
        bad = [name for name, norm in self.gradients.items() if norm - norm != 0.0]
        return f"the gradient of {bad[-1]}; all outputs are finite" if bad else ""

    @property
    def largest(self) -> JSONObject:
        """Returns the parameters with the largest gradients, non-finite ones first: name -> norm."""
        by_norm = sorted(self.gradients.items(), key=lambda one: (one[1] - one[1] == 0.0, -one[1]))
        return dict(by_norm[:MOST_PARAMETERS])


def probe(model: nn.Module, losses: Losses, *, backward: bool = True) -> Findings:
    """Runs forward and backward of a window on the bare module; an error in either becomes part of the findings.

    Each loss is differentiated before the next one is requested. Without `backward`, if processes hold parts of the
    weights, only the forward passes are run.
    """
    found = Findings()
    sums: dict[str, torch.Tensor] = {}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with unchanged_model(model), _hooks(model, found), torch.set_grad_enabled(backward):
        try:
            for loss in losses():
                found.losses.append(loss.detach())
                if not backward:
                    continue
                gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
                for name, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        sums[name] = gradient if name not in sums else sums[name] + gradient
        except Exception as error:  # any error of the user's model: it is the one searched for, or ends the search
            found.error = f"{type(error).__name__}: {without_tokens(str(error))}"
    found.gradients = {name: float(gradient.norm()) for name, gradient in sums.items()}
    return found


def is_finite(value: Any) -> bool:
    """Returns True if no tensor in a nested value has NaN or infinity."""
    return all(bool(t.isfinite().all()) for t in iterate_tensors(value) if t.is_floating_point())


@contextmanager
def _hooks(model: nn.Module, found: Findings) -> Iterator[None]:
    """Installs hooks on all modules that record the first non-finite value, forward and backward."""
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}

    def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not found.module and not is_finite(outputs):
            found.module = names[module]
            found.inputs_are_finite = is_finite(inputs)
            found.is_root = module is model
        for tensor in iterate_tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: look(gradient, names[module]))  # type: ignore[no-untyped-call]

    def look(gradient: torch.Tensor, name: str) -> None:
        if not found.gradient_of and not is_finite(gradient):
            found.gradient_of = name

    handles = [module.register_forward_hook(after) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def select_rows(batch: Batch, rows: Sequence[int], size: int) -> Batch:
    """Returns some samples of a batch of `size`; entries without that first dimension are returned whole."""
    if not isinstance(batch, Mapping):
        return _rows(batch, rows, size)
    return {name: _rows(value, rows, size) for name, value in batch.items()}


def _rows(value: Any, rows: Sequence[int], size: int) -> Any:
    def pick(leaf: Any) -> Any:
        is_split = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
        return leaf[list(rows)] if is_split else leaf

    if isinstance(value, (list, tuple)) and len(value) == size:
        return type(value)(value[row] for row in rows)
    return map_nested(pick, value)


def find_bad_rows(size: int, is_bad: Callable[[Sequence[int]], bool]) -> list[int] | None:
    """Searches for the bad samples of a bad batch by halving it; `is_bad` tests some of them.

    Returns the samples that are bad by themselves: none if they are only bad in combination. None if the search would
    take too long, as it does if most samples are bad.
    """
    found: list[int] = []
    waiting = [range(size)]
    num_tried = 0
    while waiting:
        part = waiting.pop()
        if len(part) == 1:
            found.append(part[0])
            continue
        half = len(part) // 2
        num_tried += 2
        if num_tried > MOST_PROBES:
            return None
        waiting += [half_part for half_part in (part[half:], part[:half]) if is_bad(half_part)]
    return found


def weights_not_finite(model: nn.Module) -> list[str]:
    """Returns the names of the parameters that have NaN or infinity."""
    return [name for name, parameter in model.named_parameters() if not is_finite(parameter)]


def entries_not_finite(batch: Batch) -> list[str]:
    """Returns the names of a batch's entries that have NaN or infinity; entries of a list or tuple are numbered."""
    return [str(name) for name, value in _entries(batch) if not is_finite(value)]


def _entries(batch: object) -> Iterable[tuple[object, object]]:
    if isinstance(batch, Mapping):
        return batch.items()
    return enumerate(batch) if isinstance(batch, (list, tuple)) else ()
