"""Waits of the host where a batch is cut, for batches that were copied to the stand-in in several ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainwright.data.prepared_dataloader import make_prefetcher
from trainwright.engine.sequence_parts import ContextShare, HeadShare, SequenceParts

from .._support import standin
from .._support.small import models

COUNTS = standin.COUNTS
LENGTH = 13
MASKS = {
    "whole": {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)},
    "padded": {"attention_mask": torch.tensor([[1] * LENGTH, [1] * 9 + [0] * 4])},
    "packed": {"position_ids": torch.tensor([[*range(5), *range(LENGTH - 5)]] * 2)},
    "one sample": {"position_ids": torch.arange(LENGTH).expand(2, -1)},
}


class Pinning:
    pin_memory = True


def waits(folder: Path) -> dict[str, dict[str, Any]]:
    """For each way, masks and copies: how often the host waited, and whether the batch is taken as masked."""
    device = torch.device("accel")
    model = models.llama()
    found = {}
    for way, kind in (("cp", ContextShare), ("sp", HeadShare)):
        for name, more in MASKS.items():
            ids = torch.arange(2 * LENGTH).reshape(2, LENGTH)
            batch = {"input_ids": ids, "labels": ids, **{key: value.contiguous() for key, value in more.items()}}
            pinned = {key: value.pin_memory() for key, value in batch.items()}
            for how in ("prefetched", "moved"):
                parts = SequenceParts(kind(None, size=2, place=1))
                copies = make_prefetcher(Pinning(), device, noting=parts.looks.noting)
                assert copies is not None
                if how == "prefetched":
                    moved = copies.receive(copies.send(pinned))
                else:
                    moved = {key: value.to(device) for key, value in pinned.items()}
                torch.accelerator.synchronize()
                COUNTS.clear()
                with parts.used(joins_outputs=False):
                    parts.cut(model, (), moved)
                    whole = parts.batch
                    assert whole is not None
                    masked = whole.seen is not None or whole.samples is not None
                found[f"{way}, {name}, {how}"] = {"waits": sum(COUNTS.waits.values()), "masked": masked}
    return found
