"""Objects put back as they were: attributes, the containers, small arrays and generators in them, buffers of modules.

It reaches what an object holds itself, down to the containers in its containers, and what a function has in its
closure. What is behind a global name, or an object of another library, is not followed.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

LARGE = 100_000  # entries of a container, or elements of a tensor outside of a module: more is data, which stays
MOST_VISITED = 1_000_000  # objects and entries
MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # the hooks, parameters and children of a module


@contextmanager
def unchanged_objects(*owners: object, without: Collection[str] = ()) -> Iterator[None]:
    """Puts objects back as they were, whatever happens to them inside.

    Args:
        owners: the objects; their attributes are bound to what they were bound to before.
        without: names of attributes of the owners that are left alone.
    """
    kept = _Kept()
    for owner in owners:
        kept.add(owner, without=without)
    try:
        yield
    finally:
        with torch.no_grad():
            kept.put_back()


class _Kept:
    """Functions that put back what was kept."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        self._num_visited = 0

    def put_back(self) -> None:
        for undo in self._undo:
            undo()

    def add(self, owner: object, *, without: Collection[str] = ()) -> None:
        """Keeps an object."""
        if isinstance(owner, (nn.Module, FunctionType)):
            self._add(owner)
        else:
            self._add_attributes(owner, without=without)

    def _add_attributes(self, owner: object, *, without: Collection[str] = ()) -> None:
        """Keeps the attributes of an object, and what they hold."""
        attributes = getattr(owner, "__dict__", None)
        if type(attributes) is not dict or id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        before = {name: value for name, value in attributes.items() if name not in without}
        self._undo.append(partial(_put_attributes_back, attributes, before, frozenset(without)))
        self._add_all(before.values())

    def _add_all(self, values: Iterable[object]) -> None:
        for value in values:
            self._add(value)

    def _add(self, value: Any) -> None:
        if type(value) in (int, float, bool, str, type(None)) or id(value) in self._seen:
            return
        self._num_visited += 1
        if self._num_visited > MOST_VISITED:
            return
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._add_module(module)
        elif isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and not value.requires_grad and value.numel() <= LARGE:
                self._add_tensor(value)
        elif type(value) in (*MAPPINGS, list, deque, set, tuple):
            self._add_container(value)
        elif (undo := _find_undo(value)) is not None:
            self._seen.add(id(value))
            self._undo.append(undo)
        elif isinstance(value, FunctionType):
            self._add_closure(value)
        elif not isinstance(value, type) and _is_own_package(str(type(value).__module__).partition(".")[0]):
            self._add_attributes(value)

    def _add_closure(self, function: FunctionType) -> None:
        """Keeps what the variables of a function's closure are bound to, and what they hold."""
        self._seen.add(id(function))
        if not _is_own_package(str(function.__module__).partition(".")[0]):
            return
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            self._undo.append(partial(setattr, cell, "cell_contents", value))
            self._add(value)

    def _add_module(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        buffers = dict(module.named_buffers(recurse=False))
        self._undo.append(partial(_put_buffers_back, module, buffers, frozenset(dir(module))))
        for buffer in buffers.values():
            self._add_tensor(buffer)
        self._add_attributes(module, without=OF_EVERY_MODULE)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            self._undo.append(partial(tensor.copy_, tensor.detach().clone()))

    def _add_container(self, container: Any) -> None:
        if len(container) > LARGE:
            return
        self._seen.add(id(container))
        self._num_visited += len(container)
        if type(container) in MAPPINGS:
            self._undo.append(partial(_put_entries_back, container, dict(container)))
            self._add_all(container.values())
            return
        entries = list(container)
        if type(container) is list:
            self._undo.append(partial(container.__setitem__, slice(None), entries))
        elif type(container) in (deque, set):
            self._undo.append(partial(_put_entries_back, container, entries))
        self._add_all(entries)


def _find_undo(value: Any) -> Callable[[], object] | None:
    """Returns what puts a generator of random numbers or an array back as it is now; None for other objects."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if type(value) is np.ndarray and value.size <= LARGE and value.flags.writeable:
        return partial(np.copyto, value, value.copy())
    return None


@functools.cache
def _is_own_package(package: str) -> bool:
    """Returns whether a package is the user's: neither this one, nor installed, nor of Python itself."""
    if package in sys.stdlib_module_names or package == __name__.partition(".")[0]:
        return False
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return not {"site-packages", "dist-packages"} & set(Path(path).parts)


def _put_attributes_back(attributes: dict[str, Any], before: dict[str, Any], without: frozenset[str]) -> None:
    for name in attributes.keys() - before.keys() - without:
        del attributes[name]
    attributes.update(before)


def _put_buffers_back(module: nn.Module, before: dict[str, torch.Tensor], names: frozenset[str]) -> None:
    for name, buffer in dict(module.named_buffers(recurse=False)).items():
        if name in before and buffer is not before[name]:
            setattr(module, name, before[name])
        elif name not in before and name in names:  # registered as None
            setattr(module, name, None)
        elif name not in before:
            delattr(module, name)


def _put_entries_back(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, deque):
        container.extend(before)
    else:
        container.update(before)
