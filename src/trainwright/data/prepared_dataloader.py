"""PreparedDataLoader: torch's DataLoader with the interface of accelerate's prepared ones, for scripts and callbacks.

It owns the attributes that they read, and moves batches to the device. The training loop reads `host_batches` instead:
its `DevicePrefetcher` overlaps copies to the device with computation. Subclasses decide the content of a batch.

Its `dataset`, `collate_fn` and `worker_init_fn` are the user's own objects. torch iterates a copy of it (`inside`) that
has ours around them, as `Reading` says; it is made for each iteration, so a change of the user's takes effect there.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from operator import methodcaller
from typing import Any, TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from trainwright._types import Batch, DataLoaderLike, DatasetLike, has_length
from trainwright.data.bad_sample import LoaderWorkers
from trainwright.data.collator_layers import CollatorLayer
from trainwright.data.epochs import call_set_epoch
from trainwright.distributed.device import accelerator, pins_memory
from trainwright.state.interrupts import blocked, held_back

# Any: batches, datasets and samplers are the user's own types; GradientState is not typed.

Copy: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # to a device

AT_MOST_BYTES = 256 * 2**20  # per window: all its batches are then on the device at once, instead of one at a time


class Unwatched:
    """Stands in for a `PreparedDataLoader` if the user made the dataloader."""

    end_of_dataloader: bool = False  # the last batch returned was the last of its epoch

    def begin(self) -> None:
        """Begins an epoch."""
        self.end_of_dataloader = False

    def end(self) -> None:
        """Ends an epoch, without any effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a dataloader reads the user's objects.

    Attributes:
        dataset: reads the user's dataset; the dataset itself if nothing has to be added.
        collator: has our layers around the user's collator.
        start_worker: called in each new worker with its id, the user's dataset and the user's `worker_init_fn`.
    """

    dataset: DatasetLike
    collator: Any
    start_worker: Callable[..., None]


class PreparedDataLoader(DataLoader[Any]):
    """torch's DataLoader with accelerate's attributes."""

    reading: Reading | None = None  # None: the attributes are used as they are
    total_batch_size: int = 1  # samples over all processes
    source: DatasetLike = None  # the dataset given to the trainer; `dataset` may have fewer columns
    # where iterating moves the batches; None leaves them where the collator made them
    device: torch.device | None = None
    non_blocking: bool = False  # whether copies to the device are asynchronous
    gradient_state: Any = None  # accelerate's, which tracks the dataloaders being iterated
    # the last batch returned was the last one; without a known end, the iteration is over
    end_of_dataloader: bool = False
    skip_batches: int = 0
    use_stateful_dataloader: bool = False
    tells_dataset: bool = False  # whether to call `set_epoch` of the dataset
    fetches_ahead: bool = False  # an iteration outside of a `Loader` fetches one batch ahead, as accelerate's do
    rng_types: tuple[str, ...] = ()
    synchronized_generator: torch.Generator | None = None
    _is_open = False
    _persistent: PersistentWorkers | None = None  # the persistent workers, if there are any

    def host_batches(self) -> Iterator[Batch]:
        """Returns an iterator over the batches as the collator returned them."""
        if self.tells_dataset:
            call_set_epoch(self.dataset, self._keeps_epoch.epoch)
        if self.num_workers > 0 and self.persistent_workers:
            if self._persistent is None:
                self._persistent = PersistentWorkers(self.inside())
            return self._persistent.epoch()
        inside = self.inside()
        if self.num_workers == 0:
            return DataLoader.__iter__(inside)
        batches, started = _started_by(partial(DataLoader.__iter__, inside))
        return _read_workers(batches, LoaderWorkers(inside, started))

    def inside(self) -> DataLoader[Any]:
        """Returns the dataloader that torch iterates: a copy of this one with our objects around the user's."""
        inside = copy.copy(self)
        reading = self.reading
        if reading is not None:
            vars(inside)["dataset"] = reading.dataset  # torch refuses an assignment
            inside.collate_fn = _around(reading.collator, self.collate_fn)
            init = self._init_in_worker()
            inside.worker_init_fn = partial(reading.start_worker, dataset=self.dataset, init=init)
        return inside

    def _init_in_worker(self) -> Callable[[int], None] | None:
        """Returns the function that initializes a worker, with the user's dataset in it."""
        return self.worker_init_fn

    @property
    def num_missing(self) -> int:
        """Number of excluded samples by which an epoch is shorter than the dataset."""
        return int(getattr(self.batch_sampler, "num_missing", 0))

    def end_workers(self) -> None:
        """Ends persistent workers and the iteration that reads from them; the next iteration starts new ones."""
        workers = self._persistent
        self._persistent = None
        if workers is not None:
            workers.end()

    def __iter__(self) -> Any:  # torch declares its own iterator type
        return self._device_batches(self.host_batches())

    def _device_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        num_batches = len(self) if has_length(self) else None
        device = None if self.device is None or self.device.type == "cpu" else self.device
        move = methodcaller("to", device, non_blocking=self.non_blocking)
        if self._is_open:  # by a `Loader`, which maintains the attributes of an iteration itself
            yield from batches if device is None else (map_tensors(move, batch) for batch in batches)
            return
        self.begin()
        try:
            in_order = one_ahead(batches) if self.fetches_ahead else batches
            for number, batch in enumerate(in_order, start=1):
                is_last = number == num_batches
                if is_last is not self.end_of_dataloader:  # assigning to torch's DataLoader is slow
                    self.end_of_dataloader = is_last
                yield batch if device is None else map_tensors(move, batch)
            self.end_of_dataloader = True
        finally:
            self.end()

    def begin(self) -> None:
        """Registers this dataloader in `gradient_state` as the one being iterated."""
        self._is_open = True
        if self.gradient_state is None:
            self.reset()
        else:
            from accelerate.data_loader import DataLoaderStateMixin

            DataLoaderStateMixin.begin(self)

    def end(self) -> None:
        """Removes it from `gradient_state`, unless accelerate was reset while the iteration was open."""
        self._is_open = False
        if self.gradient_state is not None and self.gradient_state.initialized:
            from accelerate.data_loader import DataLoaderStateMixin

            DataLoaderStateMixin.end(self)

    def reset(self) -> None:
        """Marks a new iteration: the last batch is still to come."""
        self.end_of_dataloader = False

    @property
    def base_dataloader(self) -> PreparedDataLoader:
        """Returns self; in accelerate, this is the wrapped dataloader."""
        return self

    @property
    def total_dataset_length(self) -> int:
        """Returns the number of samples of the dataset, over all processes."""
        return len(self.dataset)  # type: ignore[arg-type]  # a TypeError for a stream without a length, as usual

    @property
    def remainder(self) -> int:
        """Returns the samples of the last batch over all processes, 0 for a full one.

        -1 if it is dropped or unknown.
        """
        if not has_length(self.dataset) or getattr(self.batch_sampler, "drop_last", False):
            return -1
        return self.total_dataset_length % self.total_batch_size

    @property
    def iteration(self) -> int:
        """Returns the epoch being read, or else the epoch of the next iteration."""
        # a batch sampler counts an epoch when the epoch begins
        begun = self._is_open and self._keeps_epoch is self.batch_sampler
        return int(getattr(self._keeps_epoch, "epoch", 0)) - begun

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Starts the next iteration at this epoch, from 0; if it already does, a resume's position in it is kept."""
        if epoch != self.iteration:
            self._keeps_epoch.set_epoch(epoch)

    @property
    def _keeps_epoch(self) -> Any:
        """Returns what counts the epochs: the batch sampler, or our reader of a stream."""
        return self.batch_sampler

    def get_sampler(self) -> Sampler[Any] | BatchSampler | None:
        """Returns the sampler of the samples; None for a stream."""
        return getattr(self.batch_sampler, "sampler", None)


def one_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yields the batches, each once the next one is fetched."""
    ends_with_none: Iterator[Any] = itertools.chain(batches, [None])
    for batch, _ in itertools.pairwise(ends_with_none):
        yield batch


def _around(layers: Any, collator: Any) -> Any:
    return layers.around(collator) if isinstance(layers, CollatorLayer) else collator


ITERATES = PreparedDataLoader.__iter__  # a subclass or a library may replace the method


class PersistentWorkers:
    """Workers that serve every epoch of one dataloader.

    torch's iterator ends its workers when it is released, but the dataloader that made it holds it forever. So the copy
    that torch iterates (`inside`) is kept here, and `end` releases it. An iterator that is collected in a reference
    cycle cannot tell its workers to end, since its queues are closed first; the workers get the message through a pipe.
    """

    def __init__(self, inside: DataLoader[Any]) -> None:
        told, tell = multiprocessing.Pipe(duplex=False)
        self._copy: DataLoader[Any] | None = inside
        inside.worker_init_fn = EndsWhenTold(inside.worker_init_fn, told)
        self._tells = weakref.finalize(self, tell.send_bytes, b"end")
        self._tells.atexit = False
        self._workers: LoaderWorkers | None = None
        self._epoch: Iterator[Batch] = iter(())

    def epoch(self) -> Iterator[Batch]:
        """Returns an iterator over the batches of an epoch; the first call starts the workers."""
        assert self._copy is not None
        batches, started = _started_by(partial(DataLoader.__iter__, self._copy))
        if self._workers is None:
            self._workers = LoaderWorkers(self._copy, started)
        self._workers.num_given = 0
        self._epoch = _read_workers(batches, self._workers)
        return self._epoch

    def end(self) -> None:
        """Ends the workers and the current iteration."""
        self._tells.detach()
        if isinstance(self._epoch, Generator):
            self._epoch.close()
        self._copy = None


class EndsWhenTold:
    """Initializes a worker; the worker then also ends once there is data in a pipe."""

    def __init__(self, start: Callable[[int], None] | None, told: Connection) -> None:
        self._start = start
        self._told = told

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker."""
        threading.Thread(target=self._wait, name="trainwright-end", daemon=True).start()
        if self._start is not None:
            self._start(worker_id)

    def _wait(self) -> None:
        with contextlib.suppress(EOFError):  # the main process is gone, which is handled elsewhere
            self._told.poll(None)
            os._exit(0)  # for any other code, torch raises in the main process


def _started_by(iterate: Callable[[], Iterator[Batch]]) -> tuple[Iterator[Batch], list[BaseProcess]]:
    """Returns an iterator made by a function, and the workers that it started."""
    before = set(multiprocessing.active_children())
    with held_back(), blocked():  # until `start_worker` ignores signals
        batches = iterate()
    return batches, [child for child in multiprocessing.active_children() if child not in before and child.daemon]


@contextlib.contextmanager
def started_in_epoch(dataloader: DataLoaderLike, epoch: int) -> Iterator[None]:
    """Wraps the opening of an epoch, in which persistent workers may be started; a run starts them in its first epoch.

    torch draws a seed for them when they start. In a later epoch, as after a resume, it is drawn from a copy of torch's
    generator, since an uninterrupted run draws nothing there.
    """
    inside: Any = getattr(dataloader, "base_dataloader", dataloader)  # accelerate's wrapper
    persists = isinstance(inside, DataLoader) and inside.persistent_workers
    if epoch == 0 or not persists or inside.generator is not None:
        yield
        return
    inside.generator = torch.Generator()
    inside.generator.set_state(torch.get_rng_state())
    try:
        yield
    finally:
        inside.generator = None


def _read_workers(batches: Iterator[Batch], workers: LoaderWorkers) -> Iterator[Batch]:
    """Yields the batches; after an error, inspects the workers and releases torch's iterator.

    The workers end with torch's iterator. The traceback of an error would keep it alive until garbage collection, at an
    arbitrary later time, and torch waits five seconds for each worker that no longer receives the signal to end.
    """
    try:
        for batch in batches:
            workers.num_given += 1
            yield batch
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(error, Exception):
            workers.look_at(error)
        _forget_iterator(error)
        raise
    finally:
        del batches


def _forget_iterator(error: BaseException) -> None:
    """Clears torch's frames, below this generator's, from an error and the errors that caused it."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__


def watched(dataloader: DataLoaderLike) -> PreparedDataLoader | Unwatched:
    """Returns the dataloader if it is ours; a wrapper that only looks like ours counts as user-made."""
    return dataloader if issubclass(type(dataloader), PreparedDataLoader) else Unwatched()


def inner_dataloader(dataloader: DataLoaderLike) -> Any:  # the user's own type
    """Returns the dataloader that is iterated inside another one, if that is ours or accelerate's; otherwise itself."""
    if issubclass(type(dataloader), PreparedDataLoader):
        return dataloader.inside()
    return getattr(dataloader, "base_dataloader", dataloader)


def host_batches(dataloader: DataLoaderLike) -> Iterator[Batch]:
    """Returns an iterator over the batches of any dataloader, not moved to the device if the dataloader is ours.

    If the `__iter__` of ours was replaced, the replacement is used.
    """
    is_ours = issubclass(type(dataloader), PreparedDataLoader) and type(dataloader).__iter__ is ITERATES
    if is_ours:
        batches: Iterator[Batch] = dataloader.host_batches()
        return batches
    with held_back() if getattr(dataloader, "num_workers", 0) else contextlib.nullcontext():
        return iter(dataloader)


# -- prefetching to the device --------------------------------------------------------------------------------------


@dataclass(slots=True)
class PrefetchedBatch:
    """A batch with tensors that may still be in transfer."""

    batch: object  # the batch, complete once the tensors have arrived
    tensors: list[torch.Tensor] = field(default_factory=list)  # its tensors that were sent
    event: torch.Event | None = None  # set when the last of them has arrived; None if none was sent


class DevicePrefetcher:
    """Copies the next batches to a device while the previous step is computed; this process never waits for a copy.

    A prefetched batch is copied on `stream`, out of pinned memory. When it is handed out, the computing stream
    (returned by `computing`) waits for that copy, and the allocator is told that this stream uses the memory too: a
    batch released while kernels still read it is not overwritten. Anything that is not a pinned tensor, or is inside an
    object other than a mutable mapping, a list or a tuple, is unchanged; `_prepare_inputs` moves it as usual.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        stream: torch.Stream,
        computing: Callable[[], torch.Stream],
        noting: Callable[[Copy], Copy] = lambda copy: copy,
    ) -> None:
        self._copy = noting(methodcaller("to", device, non_blocking=True))
        self._stream = stream
        self._computing = computing
        self._bytes_left = AT_MOST_BYTES

    def begin_window(self) -> None:
        """Resets the byte limit of a window: the batches copied so far are about to be used."""
        self._bytes_left = AT_MOST_BYTES

    def send(self, batch: object) -> PrefetchedBatch:
        """Starts copying a batch to the device; `receive` must be called before it is used."""
        sent = PrefetchedBatch(batch)
        with self._stream:
            sent.batch = map_tensors(lambda tensor: self._copied(tensor, sent.tensors), batch)
            if sent.tensors:
                sent.event = self._stream.record_event()
        return sent

    def receive(self, sent: PrefetchedBatch) -> Any:  # same type as the batch that was sent
        """Returns the batch, safe to use on the current computing stream."""
        if sent.event is not None:
            computing = self._computing()
            computing.wait_event(sent.event)
            for tensor in sent.tensors:
                tensor.record_stream(computing)
        return sent.batch

    def _copied(self, tensor: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.nbytes > self._bytes_left or not tensor.is_pinned():
            return tensor
        self._bytes_left -= tensor.nbytes
        tensors.append(self._copy(tensor))
        return tensors[-1]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Applies a function to the tensors of a batch.

    Returns a batch of the same kind with all other content unchanged.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, MutableMapping):
        values = {key: map_tensors(function, part) for key, part in batch.items()}
        if type(batch) is dict:
            return values
        changed = copy.copy(batch)
        for key, value in values.items():
            if value is not batch[key]:
                changed[key] = value
        return changed
    if type(batch) in (list, tuple) or (isinstance(batch, tuple) and hasattr(batch, "_make")):
        parts = [map_tensors(function, part) for part in batch]
        return batch._make(parts) if hasattr(batch, "_make") else type(batch)(parts)
    return batch


def make_prefetcher(
    dataloader: object, device: torch.device, *, noting: Callable[[Copy], Copy] = lambda copy: copy
) -> DevicePrefetcher | None:
    """Returns the prefetcher of a dataloader's batches to a device; None if copies cannot overlap with computation.

    Args:
        dataloader: of which the batches come.
        device: to which they are copied.
        noting: given the function that copies a tensor, returns one that does the same and may look at the tensor.
    """
    if not pins_memory(device) or not getattr(dataloader, "pin_memory", False):
        return None
    if accelerator() != device.type:
        return None
    computing = partial(torch.accelerator.current_stream, device)
    return DevicePrefetcher(device, stream=torch.Stream(device), computing=computing, noting=noting)
