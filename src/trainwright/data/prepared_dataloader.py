"""PreparedDataLoader: torch's DataLoader as accelerate's prepared ones behave where scripts and callbacks use them.

Owns the attributes that they read, and puts batches on the device. The training loop reads `host_batches` instead: it
copies to the device beside the computation. What a batch contains is decided by the subclasses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from trainwright._types import Batch, has_length
from trainwright.data.device_prefetch import map_tensors

# Any: batches, datasets and samplers are the user's own types; GradientState is not typed.


class Unwatched:
    """Takes the place of a `PreparedDataLoader` for a dataloader that the user made.

    Attributes:
        end_of_dataloader: the batch given last was the last one of its epoch.
    """

    end_of_dataloader: bool = False

    def begin(self) -> None:
        """Begins an epoch."""
        self.end_of_dataloader = False

    def end(self) -> None:
        """Ends an epoch; nobody is told."""


class PreparedDataLoader(DataLoader[Any]):
    """torch's DataLoader with accelerate's attributes.

    Attributes:
        total_batch_size: samples of a batch over all processes.
        source: the dataset that the trainer was given; `dataset` may have fewer columns.
        device: where iterating puts the batches; None leaves them where the collator made them.
        non_blocking: whether copies to the device are asynchronous.
        gradient_state: accelerate's, which knows the dataloaders that are being iterated.
        end_of_dataloader: the batch given last was the last one; of an open end, it is over.
    """

    total_batch_size: int = 1
    source: Any = None
    device: torch.device | None = None
    non_blocking: bool = False
    gradient_state: Any = None
    end_of_dataloader: bool = False
    skip_batches: int = 0
    use_stateful_dataloader: bool = False
    rng_types: tuple[str, ...] = ()
    synchronized_generator: torch.Generator | None = None
    _is_open = False

    def host_batches(self) -> Iterator[Batch]:
        """Returns an iterator over the batches as the collator made them."""
        return super().__iter__()

    def __iter__(self) -> Any:  # torch types it as its own iterator
        return self._device_batches(self.host_batches())

    def _device_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        num_batches = len(self) if has_length(self) else None
        self.begin()
        try:
            for number, batch in enumerate(batches, start=1):
                self.end_of_dataloader = number == num_batches
                yield self._on_device(batch)
            self.end_of_dataloader = True
        finally:
            self.end()

    def _on_device(self, batch: Batch) -> Batch:
        device = self.device
        if device is None or device.type == "cpu":
            return batch
        moved: Batch = map_tensors(lambda tensor: tensor.to(device, non_blocking=self.non_blocking), batch)
        return moved

    def begin(self) -> None:
        """Enters this dataloader in `gradient_state` as the one that is being iterated."""
        self.end_of_dataloader, self._is_open = False, True
        if self.gradient_state is not None:
            self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Removes it from `gradient_state`."""
        self._is_open = False
        if self.gradient_state is not None:
            self.gradient_state._remove_dataloader(self)

    @property
    def base_dataloader(self) -> PreparedDataLoader:
        """The dataloader itself; accelerate's wraps another one."""
        return self

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset, over all processes."""
        return len(self.dataset)  # type: ignore[arg-type]  # a TypeError for a stream without a length, as usual

    @property
    def remainder(self) -> int:
        """Samples of the last batch over all processes, 0 for a full one; -1 where it is dropped or not known."""
        if not has_length(self.dataset) or getattr(self.batch_sampler, "drop_last", False):
            return -1
        return self.total_dataset_length % self.total_batch_size

    @property
    def iteration(self) -> int:
        """The epoch that is read, or that the next iteration reads."""
        begun = self._is_open and self.batch_sampler is not None  # which counts an epoch when it begins
        return int(getattr(self._keeps_epoch, "epoch", 0)) - begun

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration reads this epoch; where it already does, a resume's place in it stays.

        Args:
            epoch: from 0.
        """
        if epoch != self.iteration:
            self._keeps_epoch.set_epoch(epoch)

    @property
    def _keeps_epoch(self) -> Any:
        """The batch sampler, or the stream where there is none."""
        return self.dataset if self.batch_sampler is None else self.batch_sampler

    def get_sampler(self) -> Sampler[Any] | BatchSampler | None:
        """Returns the sampler of the samples; None for a stream."""
        return getattr(self.batch_sampler, "sampler", None)


def watched(dataloader: Any) -> PreparedDataLoader | Unwatched:
    """Returns the dataloader if it is one of ours; a wrapper that only looks like one is a dataloader of the user."""
    return dataloader if issubclass(type(dataloader), PreparedDataLoader) else Unwatched()


def host_batches(dataloader: Any) -> Iterator[Batch]:
    """Returns an iterator over the batches of any dataloader, not copied to the device where it is one of ours."""
    return dataloader.host_batches() if issubclass(type(dataloader), PreparedDataLoader) else iter(dataloader)
