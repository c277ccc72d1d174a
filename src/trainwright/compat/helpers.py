"""Helpers of the original that nothing of ours calls: lists of checkpoints, values of all ranks, weights in shards."""

from __future__ import annotations

import functools
import importlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from trainwright._types import IGNORE_INDEX, PREFIX_CHECKPOINT_DIR, Nested, read_json
from trainwright.checkpoint.retention import Keep, Saved, to_remove
from trainwright.checkpoint.weights import MAX_INDEX_BYTES, SAFE_WEIGHTS_INDEX_NAME, read_file
from trainwright.tensor_tree import map_nested, nested_concat, nested_numpify, nested_truncate

SAME_TIME_S = 1.0  # file systems that keep no times show directories as made at once


def sort_checkpoints(
    output_dir: str,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
    best_model_checkpoint: str | None = None,
) -> list[str]:
    """Lists the directories of checkpoints, oldest first.

    Args:
        output_dir: directory that holds them.
        checkpoint_prefix: their names are this prefix and a number.
        use_mtime: sort by the time of the last change, where the file system keeps such times; default: by number.
        best_model_checkpoint: the best one; where it is not the newest, it is put just before that.

    Returns:
        Their paths.
    """
    found = _numbered(Path(output_dir), checkpoint_prefix)
    order = sorted(found, key=lambda path: found[path])
    times = {path: path.stat().st_mtime for path in order}
    if use_mtime and order and max(times.values()) - min(times.values()) >= SAME_TIME_S:
        order.sort(key=lambda path: times[path])
    best = None if best_model_checkpoint is None else Path(best_model_checkpoint)
    if best in order[:-1]:
        order.remove(best)
        order.insert(-1, best)
    return [str(path) for path in order]


def rotate_checkpoints(
    output_dir: str,
    save_total_limit: int | None = None,
    best_model_checkpoint: str | None = None,
    use_mtime: bool = False,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
) -> None:
    """Deletes the oldest checkpoints beyond a limit, whoever wrote them; never the newest nor the best.

    Args:
        output_dir: directory that holds them.
        save_total_limit: number of checkpoints that stay; None, 0 or less: all.
        best_model_checkpoint: path of the best one.
        use_mtime: as for `sort_checkpoints`.
        checkpoint_prefix: as for `sort_checkpoints`.
    """
    if not save_total_limit or save_total_limit < 0:
        return
    order = [Path(path) for path in sort_checkpoints(output_dir, checkpoint_prefix, use_mtime)]
    best = None if best_model_checkpoint is None else Path(best_model_checkpoint)
    places = [Saved(place) for place in range(len(order))]
    best_place = order.index(best) if best in order else None
    for place in to_remove(places, Keep(last=save_total_limit), newest=len(order) - 1, best=best_place):
        shutil.rmtree(order[place], ignore_errors=True)


def _numbered(folder: Path, prefix: str) -> dict[Path, int]:
    """Directories whose whole name is the prefix and a number."""
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)")
    matches = {path: pattern.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())}
    return {path: int(match[1]) for path, match in matches.items() if match and path.is_dir()}


def distributed_concat(tensor: Nested, num_total_examples: int | None = None) -> Nested:
    """Joins nested tensors of all processes (of equal shapes) along the first dimension, cut to `num_total_examples`.

    Args:
        tensor: nested tensors, of the same shapes in all processes.
        num_total_examples: number of rows that stay; None: all.

    Returns:
        The nested value with joined tensors.

    Raises:
        AssertionError: there is no process group.
    """
    joined = map_nested(_gathered, tensor)
    return joined if num_total_examples is None else nested_truncate(joined, num_total_examples)


def distributed_broadcast_scalars(
    scalars: Sequence[int | float],
    num_total_examples: int | None = None,
    device: torch.device | str | None = "cuda",
) -> torch.Tensor:
    """Joins numbers of all processes into one tensor, cut to `num_total_examples`.

    Args:
        scalars: numbers of this process, as many in each.
        num_total_examples: how many of all stay; None: all.
        device: where the tensor is made; one that the backend of the group works with.

    Returns:
        A tensor of one dimension, in the order of ranks.

    Raises:
        AssertionError: there is no process group.
    """
    joined = _gathered(torch.tensor(scalars, device=device))
    return joined if num_total_examples is None else joined[:num_total_examples]


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    if not dist.is_available() or not dist.is_initialized():
        raise AssertionError("There is no process group: start the script with torchrun or accelerate launch.")
    mine = (tensor.reshape(1) if tensor.ndim == 0 else tensor).contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


@contextmanager
def torch_distributed_zero_first(local_rank: int) -> Iterator[None]:
    """Runs the block on local rank 0 first, while the others wait.

    Args:
        local_rank: rank of this process on its machine; -1: a single process.
    """
    if local_rank > 0:
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()


def find_executable_batch_size(
    function: Callable[..., object] | None = None, starting_batch_size: int = 128, auto_find_batch_size: bool = False
) -> Callable[..., Any]:  # of the function's own type
    """Returns a function with its first argument, the batch size, fixed, or reduced until the call fits into memory.

    Training itself keeps the effective batch (`loop/micro_batch_retry.py`).

    Args:
        function: takes the batch size first; None: a decorator is returned.
        starting_batch_size: the first batch size to try.
        auto_find_batch_size: try smaller ones after an error of memory.

    Returns:
        The function without its first argument.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            auto_find_batch_size=auto_find_batch_size,
        )
    if not auto_find_batch_size:
        return functools.partial(function, batch_size=starting_batch_size)
    from accelerate.utils import find_executable_batch_size as smaller_until_it_fits

    found: Callable[..., Any] = smaller_until_it_fits(function=function, starting_batch_size=starting_batch_size)
    return found


class EvalLoopContainer:
    """Collects nested tensors batch by batch.

    Args:
        do_nested_concat: join the batches; False keeps a list of them.
        padding_index: what fills a second dimension that is shorter than another batch's.
    """

    def __init__(self, do_nested_concat: bool = True, padding_index: int = IGNORE_INDEX) -> None:
        self.do_nested_concat = do_nested_concat
        self.padding_index = padding_index
        self.tensors: Nested = None
        self.arrays: Nested = None

    def add(self, tensors: Nested) -> None:
        """Adds a batch: nested tensors with one row for each sample."""
        self.tensors = self._joined(self.tensors, tensors if self.do_nested_concat else [tensors])

    def to_cpu_and_numpy(self) -> None:
        """Moves what was added since the last call off the device."""
        if self.tensors is not None:
            self.arrays = self._joined(self.arrays, nested_numpify(self.tensors))
            self.tensors = None

    def get_arrays(self) -> Nested:
        """Returns all batches as arrays; None if there was none."""
        self.to_cpu_and_numpy()
        return self.arrays

    def _joined(self, before: Nested, more: Nested) -> Nested:
        if before is None:
            return more
        return nested_concat(before, more, self.padding_index) if self.do_nested_concat else before + more


OLDER_INDEX = "pytorch_model.bin.index.json"


def load_sharded_checkpoint(
    model: nn.Module, folder: str | Path, strict: bool = True, prefer_safe: bool = True
) -> _IncompatibleKeys:
    """Loads the weights that lie in several files beside an index, one file after the other.

    Args:
        model: takes the weights.
        folder: holds the index and the files.
        strict: refuse an index that does not name the weights of the model.
        prefer_safe: take safetensors where torch's files are there too.

    Returns:
        The missing and the unexpected names.

    Raises:
        ValueError: there is no index.
        RuntimeError: with `strict`, the index and the model do not name the same weights; nothing was loaded.
    """
    indices = [path for name in (SAFE_WEIGHTS_INDEX_NAME, OLDER_INDEX) if (path := Path(folder) / name).is_file()]
    if not indices:
        raise ValueError(f"{folder} has no index of weights ({SAFE_WEIGHTS_INDEX_NAME} or {OLDER_INDEX}).")
    index = indices[0] if prefer_safe else indices[-1]
    files = read_json(index, max_bytes=MAX_INDEX_BYTES)["weight_map"]
    names = model.state_dict().keys()
    missing, unexpected = [n for n in names if n not in files], [n for n in files if n not in names]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"{folder} does not fit {type(model).__name__}. Missing: {', '.join(missing) or 'none'}. "
            f"Unexpected: {', '.join(unexpected) or 'none'}. strict=False loads what fits."
        )
    for name in sorted(set(files.values())):
        model.load_state_dict(read_file(Path(folder) / Path(name).name), strict=False)
    return _IncompatibleKeys(missing, unexpected)


# Samplers that nothing here uses, and a count: transformers' own.
OF_TRANSFORMERS = {
    "DistributedSamplerWithLoop": "trainer_pt_utils",
    "IterableDatasetShard": "trainer_pt_utils",
    "ShardSampler": "trainer_pt_utils",
    "number_of_arguments": "trainer_utils",
}


def __getattr__(name: str) -> Any:  # classes and a function of transformers
    if name in OF_TRANSFORMERS:
        return getattr(importlib.import_module(f"transformers.{OF_TRANSFORMERS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
