"""Batches are copied ahead, and nobody sees a copy that is under way.

No GPU is here: a double of a stream stands in for one. Like a device it carries out what it was given later, when
somebody waits for it, so a batch that is used without waiting holds what was in memory before.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from trainwright._types import TailBatch
from trainwright.data import prepared_dataloader
from trainwright.data.prepared_dataloader import DevicePrefetcher
from trainwright.run import run as run_module

from .._support.small import AugmentedStream, StopAt, data, differing, make_trainer, weights

CPU = torch.device("cpu")
UNTOUCHED = -7


class Device:
    """A device whose copies lag behind: those of a stream are done when another one waits for its event."""

    def __init__(self) -> None:
        self.is_copying = False
        self.jobs: list[Callable[[], Any]] = []
        self.log: list[str] = []
        self.kept: set[int] = set()
        self.stream: Any = Stream(self)  # in place of a torch.Stream
        self.computing: Any = Stream(self)

    def to(self, tensor: torch.Tensor, device: Any, *, non_blocking: bool) -> torch.Tensor:
        assert self.is_copying, "a copy on the stream that computes"
        assert non_blocking
        there = torch.full_like(tensor, UNTOUCHED)
        self.jobs.append(lambda: there.copy_(tensor))
        self.log.append("copy")
        return there


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.device.is_copying = True

    def __exit__(self, *error: Any) -> None:
        self.device.is_copying = False

    def record_event(self) -> list[Callable[[], Any]]:
        jobs = self.device.jobs
        self.device.jobs = []
        return jobs

    def wait_event(self, event: list[Callable[[], Any]]) -> None:
        assert self is self.device.computing
        self.device.log.append("wait")
        for job in event:
            job()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    to = torch.Tensor.to

    def copied(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return device.to(self, *args, **kwargs) if device.is_copying else to(self, *args, **kwargs)

    def kept(self: torch.Tensor, stream: Any) -> None:
        assert stream is device.computing
        device.kept.add(id(self))

    monkeypatch.setattr(torch.Tensor, "to", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", kept)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    return device


def copies_to(device: Device) -> DevicePrefetcher:
    return DevicePrefetcher(CPU, stream=device.stream, computing=lambda: device.computing)


Pair = collections.namedtuple("Pair", ["one", "other"])


@dataclass
class Boxes:
    """Has a `.to` of its own; what it does is its own affair."""

    x: torch.Tensor

    def to(self, *args: Any, **kwargs: Any) -> Boxes:
        raise AssertionError("moved by somebody who does not know it")


def test_every_kind_of_batch_arrives_as_it_was(device: Device) -> None:
    tensor = torch.arange(4)
    encoding = BatchEncoding({"x": tensor}, n_sequences=2)
    boxes = Boxes(tensor)
    batch = {
        "plain": tensor,
        "nested": [{"x": tensor}, (tensor, "text", 3)],
        "pair": Pair(tensor, None),
        "encoding": encoding,
        "boxes": boxes,
    }
    copies = copies_to(device)
    sent = copies.send(batch)
    assert sent.batch["plain"].tolist() == [UNTOUCHED] * 4  # still under way
    got = copies.receive(sent)
    moved = [got["plain"], got["nested"][0]["x"], got["nested"][1][0], got["pair"].one, got["encoding"]["x"]]
    assert [one.tolist() for one in moved] == [[0, 1, 2, 3]] * 5
    assert all(one is not tensor for one in moved)
    assert device.kept == {id(one) for one in moved}
    assert device.log == ["copy"] * 5 + ["wait"]
    assert got["nested"][1][1:] == ("text", 3)
    assert (type(got["pair"]), got["pair"].other) == (Pair, None)
    assert (type(got["encoding"]), got["encoding"].n_sequences) == (BatchEncoding, 2)
    assert got["boxes"] is boxes
    assert encoding["x"] is tensor


def test_a_batch_of_a_tail_keeps_its_weight(device: Device) -> None:
    copies = copies_to(device)
    got = copies.receive(copies.send(TailBatch({"x": torch.ones(2)}, num_samples=2, weight=0.5)))
    assert isinstance(got, TailBatch)
    assert (got.num_samples, got.weight, got["x"].tolist()) == (2, 0.5, [1.0, 1.0])


def test_what_is_not_pinned_or_too_large_stays(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = copies_to(device)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.numel() > 2)
    batch = {"pinned": torch.ones(3), "other": torch.ones(2), "text": "a"}
    got = copies.receive(copies.send(batch))
    assert got["pinned"] is not batch["pinned"]
    assert got["other"] is batch["other"]
    words = ["no tensor"]
    assert copies.receive(copies.send(words)) == words
    assert device.log == ["copy", "wait"]  # nobody waits for nothing

    monkeypatch.setattr(prepared_dataloader, "AT_MOST_BYTES", 100)
    copies.begin_window()
    sizes = [copies.receive(copies.send(torch.ones(15))).sum() for _ in range(3)]
    assert sizes == [15.0] * 3
    assert device.log[2:] == ["copy", "wait"]  # 60 of 100 bytes, and no second one of the window
    copies.begin_window()
    copies.send(torch.ones(15))
    assert device.log[4:] == ["copy"]


DATA: dict[str, Callable[[], Any]] = {
    "list": lambda: data.vectors(26),
    "stream": lambda: AugmentedStream(data.vectors(26)),
}


@pytest.fixture
def used(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Every loader copies to the double."""
    monkeypatch.setattr(run_module, "make_prefetcher", lambda dataloader, where, noting: copies_to(device))
    yield device
    assert "copy" in device.log


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(("accumulation", "workers"), [(1, 0), (3, 0), (3, 2)])
def test_training_is_the_same_also_after_a_resume(
    kind: str, accumulation: int, workers: int, device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"max_steps": 9, "gradient_accumulation_steps": accumulation, "dataloader_num_workers": workers}

    def trainer(name: str, **more: Any) -> Any:
        return make_trainer(tmp_path / name, train_dataset=DATA[kind](), **settings, **more)

    plain = trainer("plain")
    plain.train()
    assert device.log == []
    monkeypatch.setattr(run_module, "make_prefetcher", lambda dataloader, where, noting: copies_to(device))
    copied = trainer("copied")
    copied.train()
    assert device.log.count("wait") == {1: 9, 3: 21}[accumulation]  # seven batches an epoch
    trainer("twice", callbacks=[StopAt(4)]).train()
    resumed = trainer("twice")
    resumed.train(resume_from_checkpoint=True)
    for one in (copied, resumed):
        assert differing(weights(one.model), weights(plain.model)) == {}


def test_the_next_batch_is_under_way_while_this_one_is_computed(used: Device, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=3)
    step = type(trainer).training_step

    class Watching(type(trainer)):  # type: ignore[misc]
        def training_step(self, *args: Any) -> torch.Tensor:
            used.log.append("step")
            return step(self, *args)  # type: ignore[no-any-return]

    trainer.__class__ = Watching
    trainer.train()
    first = used.log.index("step")
    assert used.log[:first].count("copy") == 2 * len(data.vectors(1)[0])  # two batches of so many tensors
    assert used.log[:first].count("wait") == 1


def test_on_a_cpu_and_without_pinned_memory_nothing_is_copied_ahead(tmp_path: Path) -> None:
    dataloader = make_trainer(tmp_path).get_train_dataloader()
    assert prepared_dataloader.make_prefetcher(dataloader, CPU) is None
    assert prepared_dataloader.make_prefetcher(dataloader, torch.device("cuda", 0)) is None
