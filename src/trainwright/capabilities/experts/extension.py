"""The load of experts as an extension: counts the tokens that a router sends to each expert, for the next log.

It counts the ids of experts that a layer of experts is given, before any process sends a token to another. So
the numbers do not depend on how the experts are shared out. Counts stay on the device until a log or a save.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainwright._types import StateDict
from trainwright.errors import ModelError
from trainwright.loop.extension import Extension, Run
from trainwright.support.model_facts import expert_layers, num_experts
from trainwright.support.tensor_tree import local_part

Counts = dict[str, torch.Tensor]  # name of a layer -> tokens of each expert, and in the last place of none


class ExpertLoad(Extension):
    """Logs how evenly a mixture of experts uses its experts, over all processes, since the last log.

    A load is an expert's share of the routes (token, expert) of its layer, times the number of experts: 1.0 where all
    have the same. Padding is counted too, since it is computed, and so are the tokens that fill sequences up which
    processes share (`cp_size`, `sp_size`). The values are:

    - `experts/max_load` and `experts/min_load`: the highest and the lowest load of an expert in any layer. Wang et al.
      (2024, arXiv 2408.15664) call the first, less 1, the maximal violation.
    - `experts/unused`: share of all experts that got no token.
    - `experts/dropped`: share of the routes that lead to no expert. It is 0 with the experts of transformers, which
      have no limit of capacity.

    Args:
        each: also logs the load of each expert, as `experts/<layer>/<number>`.

    Raises:
        ModelError: when a run begins with a model without experts.

    Example:
        >>> trainer.add_extension(ExpertLoad())
    """

    name = "expert_load"
    order = 15  # after the guard, which may refuse the step before

    def __init__(self, *, each: bool = False) -> None:
        self._each = each
        self._run: Run | None = None
        self._hooks: list[RemovableHandle] = []
        self._counts: Counts = {}  # on the device, of this process
        self._starts: dict[int, Counts] = {}  # step -> counts before it, of the last two steps
        self._totals: dict[str, list[int]] = {}  # summed over all processes

    def open(self, run: Run) -> None:
        """Begins at zero."""
        self._counts = {}
        self._starts = {}
        self._totals = {}

    def begin(self, run: Run) -> None:
        """Listens to the layers of experts."""
        self._run = run
        layers = expert_layers(run.setup.model)
        if not layers:
            raise ModelError(
                f"ExpertLoad counts the tokens of experts, and {type(run.setup.model).__name__} has no layer with "
                "num_experts and weights (experts, rows, columns). Remove the extension."
            )
        for name, layer in layers.items():
            self._listen(name, layer)

    def _listen(self, name: str, layer: nn.Module) -> None:
        number = num_experts(layer)
        device = next(layer.parameters()).device
        self._counts.setdefault(name, torch.zeros(number + 1, dtype=torch.long, device=device))

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not (module.training and torch.is_grad_enabled()):  # an evaluation
                return
            if self._run is not None and self._run.progress.is_apart:
                return
            ids = next(_whole_numbers(args, kwargs))
            # A place more than experts for ids of none; bincount would wait for the device.
            places = torch.where((ids < 0) | (ids > number), number, ids.long())
            counts = torch.zeros_like(self._counts[name], device=ids.device)
            counts.scatter_add_(0, places, torch.ones_like(places))
            self._counts[name] = self._counts[name].to(ids.device) + counts

        self._hooks.append(layer.register_forward_pre_hook(count, with_kwargs=True))

    # -- windows that do not count -------------------------------------------------------------------------------------

    def mark(self) -> Counts:
        """Returns the counts before a window."""
        assert self._run is not None
        step = self._run.progress.state.global_step + 1
        self._starts = {known: counts for known, counts in self._starts.items() if known == step - 1}
        self._starts[step] = dict(self._counts)  # tensors are replaced, never changed
        return self._starts[step]

    def rewind(self, mark: Counts) -> None:
        """Goes back to the counts before the window."""
        self._counts = dict(mark)

    def refused(self, step: int) -> None:
        """Takes back the counts of a step without an update."""
        before = self._starts.get(step)
        if before is not None:
            after = self._starts.get(step + 1, self._counts)
            self._counts = {name: counts - after[name] + before[name] for name, counts in self._counts.items()}

    # -- a log ---------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Adds up the counts of all processes, in one exchange."""
        if self._run is None or not self._counts:
            return
        joined = torch.cat(list(self._counts.values()))
        every: list[int] = self._run.setup.engine.sum_tokens(joined).tolist()
        for name, counts in self._counts.items():
            own = [every.pop(0) for _ in range(len(counts))]
            before = self._totals.get(name, [0] * len(own))
            self._totals[name] = [new + old for new, old in zip(own, before, strict=True)]
        self._counts = {name: torch.zeros_like(counts) for name, counts in self._counts.items()}
        self._starts = {}

    def log(self) -> dict[str, float]:
        """Returns the loads since the last log."""
        loads = {name: load for name, totals in self._totals.items() if (load := relative_loads(totals[:-1]))}
        every = [load for of_layer in loads.values() for load in of_layer]
        if not every:
            return {}
        dropped = sum(totals[-1] for totals in self._totals.values())
        values = {
            "experts/max_load": max(every),
            "experts/min_load": min(every),
            "experts/unused": every.count(0.0) / len(every),
            "experts/dropped": dropped / sum(sum(totals) for totals in self._totals.values()),
        }
        if self._each:
            values |= {f"experts/{name}/{i}": load for name, of in loads.items() for i, load in enumerate(of)}
        self._totals = {}
        return values

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Returns the counts of all processes since the last log; `settle` came before."""
        return {"totals": dict(self._totals)}

    def load_state_dict(self, state: StateDict) -> None:
        """Goes on from the counts of a checkpoint, which are the same in all processes."""
        self._totals = {name: list(totals) for name, totals in state["totals"].items()}

    def close(self) -> None:
        """Stops listening."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._run = None


def relative_loads(tokens: list[int]) -> list[float]:
    """Returns the load of each expert from the tokens of each: 1.0 where all have the same; empty without tokens."""
    total = sum(tokens)
    return [number * len(tokens) / total for number in tokens] if total else []


def _whole_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the inputs of a layer of experts that are whole numbers, flat: the first are the ids of experts."""
    for one in (*args, *kwargs.values()):
        if isinstance(one, torch.Tensor) and not one.is_floating_point():
            yield local_part(one).flatten()
