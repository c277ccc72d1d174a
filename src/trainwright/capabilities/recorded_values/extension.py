"""Writes the fingerprints of all values of a few steps, in their order, into a file of each process.

    begin      random states of the process
    data       samples of a micro-batch, and its tensors as the collator made them
    weight     parameters and buffers, before the first recorded step
    forward    inputs and outputs of a module, as modules end
    loss       of a micro-batch
    backward   the gradient of a module's output
    gradient   of a parameter in this process, after each micro-batch
    clipped    norm of the gradients, and gradients as the optimizer gets them
    optimizer  its rates and settings
    update     parameters and buffers after the step
    prediction arrays and metrics of predictions that a caller makes after the last step

Each fingerprint waits for the device. Hooks are there in the recorded steps only.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import xxhash
from torch import nn

from trainwright._types import Batch, JSONObject, json_value
from trainwright.capabilities.recorded_values.fingerprint import fingerprint, named_tensors
from trainwright.capabilities.recorded_values.value_comparison import values_file
from trainwright.checkpoint import rng
from trainwright.config.coerce import StepRange
from trainwright.data.row_names import NamesOf
from trainwright.engine.base import Engine
from trainwright.loop.extension import Decision, Extension, MicroBatch, Run, StepFacts
from trainwright.support.door import OwnFolder, RelativeName
from trainwright.support.loss_normalization import LossOutput
from trainwright.support.model_facts import plain_name
from trainwright.support.tensor_tree import map_nested

NUMBERS = (bool, int, float, str)


class ValueRecorder(Extension):
    """Records the values of some steps.

    Args:
        steps: the steps; without a first one, they are counted from the start of the run.
        folder: the run's directory.
        engine: of the run.
        rank: this process.
        num_processes: processes of the run.
        names: names of the samples; None: they have none.
        settings: facts about the run to compare, such as its seed.
    """

    name = "recorded_values"
    order = -50  # before the guard, which may refuse the update

    def __init__(
        self,
        steps: StepRange,
        folder: str | Path,
        engine: Engine,
        *,
        rank: int = 0,
        num_processes: int = 1,
        names: NamesOf | None = None,
        settings: JSONObject | None = None,
    ) -> None:
        self._steps = steps
        self._folder = folder
        self._engine = engine
        self._rank = rank
        self._about = {"rank": rank, "num_processes": num_processes, "settings": settings or {}}
        self._names = names
        self._run: Run | None = None
        self._file: TextIO | None = None
        self._recorded = range(0)
        self._hooks: list[Any] = []  # Any: handles of torch, of several classes
        self._root = nn.Module()
        self._step = 0
        self._micro_batch = 0
        self._is_in_backward = False
        self._has_weights = False
        self._calls: dict[tuple[str, str], int] = {}  # in this micro-batch, by phase and name
        self._entered: list[dict[str, JSONObject]] = []  # fingerprints of the inputs of modules that run now

    def begin(self, run: Run) -> None:
        """Opens the file; a run that resumes adds to it."""
        first = self._steps.first or run.progress.state.global_step + 1
        self._recorded = range(first, first + self._steps.num)
        self._run = run
        self._has_weights = False
        path = values_file(self._folder, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = "wb" if run.start.checkpoint is None else "ab"
        opened = OwnFolder(self._folder).open(RelativeName.parse(path.name), mode)
        self._file = io.TextIOWrapper(opened, encoding="utf-8")
        self._write("run", "", facts=self._about)

    def window(self, batches: Sequence[Batch]) -> None:
        """Begins to record, if the step was asked for."""
        self._unhook()
        assert self._run is not None, "begin comes first"
        progress = self._run.progress
        self._step = progress.state.global_step + 1
        if self._step not in self._recorded:
            return
        self._rewound()
        self._write("begin", "", facts=_hashes(rng.capture()))
        ids = progress.window.current.sample_ids
        for number, batch in enumerate(batches):
            self._micro_batch = number
            samples = [] if not ids else [self._text(one) for one in ids[number]]
            tensors = {name: fingerprint(one) for name, one in named_tensors(batch)}
            self._write("data", "", values=tensors, facts={"samples": samples, "rows": _rows(batch)})
        self._micro_batch = 0
        self._root = self._engine.unwrap(self._run.setup.model)
        if not self._has_weights:
            self._has_weights = True
            self._write_weights("weight")
        self._hook()

    def _text(self, sample: object) -> str:
        return str(sample) if self._names is None else self._names.text(sample)

    def _write_weights(self, phase: str) -> None:
        weights = [*self._root.named_parameters(), *self._root.named_buffers()]
        for name, one in weights:
            self._write(phase, plain_name(name), values={"": fingerprint(one, with_place=True)})

    def _hook(self) -> None:
        # A compiled model is split here: a hook is not compiled with it.
        enter = torch.compiler.disable(self._enter)  # type: ignore[no-untyped-call]
        leave = torch.compiler.disable(self._leave)  # type: ignore[no-untyped-call]
        for name, module in self._root.named_modules():
            about = plain_name(name), type(module).__name__
            before = module.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
            self._hooks += [before, module.register_forward_hook(partial(leave, *about))]
        for name, one in self._root.named_parameters():
            if one.requires_grad:
                take = partial(self._take_gradient, name)
                self._hooks.append(one.register_post_accumulate_grad_hook(take))  # type: ignore[no-untyped-call]

    def _is_listening(self) -> bool:
        """Whether a forward pass belongs to training; a backward pass may run modules again to save memory."""
        return bool(self._hooks) and not self._is_in_backward and self._root.training and not self._is_apart

    @property
    def _is_apart(self) -> bool:
        return self._run is not None and self._run.progress.is_apart

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_apart:
            return
        if name == "" and self._is_in_backward and self._root.training:
            self._is_in_backward = False
            self._micro_batch += 1
            self._calls.clear()
        if not self._is_listening():
            return
        if name == "":
            self._entered.clear()  # left by an error
        given = {str(i): one for i, one in enumerate(args)} | kwargs
        self._entered.append({name: fingerprint(one) for name, one in named_tensors(given)})

    def _leave(self, name: str, kind: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_listening() or not self._entered:
            return
        given = self._entered.pop()
        found = dict(named_tensors(output))
        call = self._number("forward", name)
        values = {key: fingerprint(one) for key, one in found.items()}
        self._write("forward", name, kind=kind, call=call, given=given, values=values)
        for key, one in found.items():
            if one.requires_grad:
                take = partial(self._take_backward, name, kind, call, key)
                one.register_hook(take)  # type: ignore[no-untyped-call]

    def _take_backward(self, name: str, kind: str, call: int, key: str, gradient: torch.Tensor) -> None:
        self._write("backward", name, kind=kind, call=call, part=key, values={"": fingerprint(gradient)})

    def _take_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._write("gradient", plain_name(name), values={"": fingerprint(parameter.grad)})

    def micro_batch(self, batch: MicroBatch) -> None:
        """Records the loss, and that the backward pass comes next."""
        if not self._hooks:
            return
        loss = batch.loss.loss if isinstance(batch.loss, LossOutput) else batch.loss
        self._write("loss", "", values={name: fingerprint(one) for name, one in named_tensors(loss)})
        self._is_in_backward = True

    def decide(self, facts: StepFacts) -> Decision:
        """Records the gradients of the update, and its rates."""
        if self._hooks:
            self._micro_batch = 0
            norm = None if facts.grad_norm is None else float(facts.grad_norm)
            self._write("clipped", "norm", facts={"gradient norm": norm})
            for name, one in self._root.named_parameters():
                if one.grad is not None:
                    self._write("clipped", plain_name(name), values={"": fingerprint(one.grad)})
            self._write("optimizer", "", facts=_collect_settings(facts.optimizer))
        return Decision.APPLY

    def after_step(self, run: Run) -> None:
        """Records the new weights, and ends the recording of the step."""
        if self._hooks:
            self._unhook()
            self._micro_batch = 0
            self._write_weights("update")
            if self._file is not None:
                self._file.flush()

    def mark(self) -> None:
        """Nothing needs to be kept: a step that is tried again is written again."""

    def rewind(self, mark: object) -> None:
        """Marks the forward and backward passes of the step as void."""
        if self._hooks:
            self._rewound()
            self._write("rewound", "")

    def _rewound(self) -> None:
        self._micro_batch = 0
        self._is_in_backward = False
        self._calls.clear()
        self._entered.clear()

    def close(self) -> None:
        """Removes the hooks, and closes the file."""
        self._unhook()
        self._root = nn.Module()
        self._run = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _number(self, phase: str, name: str) -> int:
        """Returns how often a module has run in this micro-batch, from 0."""
        number = self._calls.get((phase, name), 0)
        self._calls[phase, name] = number + 1
        return number

    def _write(self, phase: str, name: str, *, kind: str = "", call: int = 0, **parts: Any) -> None:
        if self._file is None:
            return  # a backward pass after the run
        line: JSONObject = {"step": self._step, "micro_batch": self._micro_batch, "phase": phase, "name": name}
        more = {"kind": kind, "call": call, **parts}
        self._file.write(json.dumps(json_value(line | {key: one for key, one in more.items() if one})) + "\n")


def _rows(batch: Batch) -> list[str]:
    """Returns a hash of each row of a batch; none if its tensors have no rows in common."""
    tensors = [one for _, one in named_tensors(batch)]
    lengths = {len(one) if one.dim() else 0 for one in tensors}
    if len(lengths) != 1:
        return []
    return [
        xxhash.xxh3_64("".join(fingerprint(one[row])["hash"] for one in tensors).encode()).hexdigest()
        for row in range(lengths.pop())
    ]


def _hashes(states: rng.States) -> JSONObject:
    """Returns a hash of each generator's state."""
    texts = {name: repr(map_nested(_as_list, one)) for name, one in states.items()}
    return {name: xxhash.xxh3_64(text.encode()).hexdigest() for name, text in texts.items()}


def _as_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value


def _collect_settings(optimizer: Any) -> JSONObject:
    """Returns the settings of an optimizer's groups of parameters: `lr`, `betas`, ...; `lr (group 1)` for others."""
    inner = optimizer
    while hasattr(inner, "optimizer"):  # accelerate's wrapper, and others like it
        inner = inner.optimizer
    found: JSONObject = {"class": type(inner).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if key == "initial_lr":  # written by the schedule; says nothing about this step
                continue
            if isinstance(plain, NUMBERS) or (isinstance(plain, tuple) and all(isinstance(x, NUMBERS) for x in plain)):
                found[f"{key} (group {number})" if number else key] = plain
    return found
