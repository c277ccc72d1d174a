"""Copying ahead on a real GPU: the same losses as without, on batches that are there when they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import Trainer

from .._support.small import AugmentedStream, data, make_trainer, module

pytestmark = pytest.mark.gpu


class Watching(Trainer):
    devices: set[str]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.devices |= {value.device.type for value in inputs.values()}
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_losses_are_those_without(accumulation: int, workers: int, tmp_path: Path) -> None:
    losses = {}
    for pins in (True, False):
        trainer = make_trainer(
            tmp_path / str(pins),
            cls=Watching,
            model=module(dropout=0.0),
            use_cpu=False,
            max_steps=12,
            train_dataset=AugmentedStream(data.vectors(60)),
            dataloader_pin_memory=pins,
            gradient_accumulation_steps=accumulation,
            dataloader_num_workers=workers,
        )
        trainer.devices = set()
        trainer.train()
        assert trainer.devices == {"cuda" if pins else "cpu"}
        losses[pins] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[True] == losses[False]


def test_a_copy_that_lags_behind_is_waited_for() -> None:
    """The copying stream is held up by a long computation; what is received is what was sent all the same."""
    from trainwright.data.prepared_dataloader import DevicePrefetcher

    device = torch.device("cuda", torch.cuda.current_device())
    stream: Any = torch.Stream(device)
    copies = DevicePrefetcher(device, stream=stream, computing=lambda: torch.accelerator.current_stream(device))
    busy = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    for number in range(20):
        with stream:
            for _ in range(10):
                busy = torch.tanh(busy @ busy)
        batch = {"x": torch.full((1 << 20,), float(number)).pin_memory()}
        copies.begin_window()
        got = copies.receive(copies.send(batch))["x"]
        assert got.device.type == "cuda"
        assert float(got.min()) == float(got.max()) == number
        del got  # its memory is taken again by the next copy
