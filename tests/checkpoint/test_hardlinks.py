"""Large files that did not change share their place on the disk with the older checkpoint, and nothing reaches both."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import MIN_BYTES, CheckpointStore, verified

from .._support.small import make_trainer

LARGE = b"f" * (MIN_BYTES + 1)
OTHER = b"g" * (MIN_BYTES + 1)


def save(store: CheckpointStore, step: int, run_id: str = "me", **files: bytes) -> Path:
    staging = store.stage(step)
    for name, content in files.items():
        (staging / name).write_bytes(content)
    return store.commit(staging, Manifest(step=step, run_id=run_id))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run")


def same_place(one: Path, other: Path, name: str) -> bool:
    return (one / name).stat().st_ino == (other / name).stat().st_ino


def test_what_is_large_and_unchanged_is_there_once(store: CheckpointStore) -> None:
    one = save(store, 1, frozen=LARGE, trained=LARGE, small=b"s")
    two = save(store, 2, frozen=LARGE, trained=OTHER, small=b"s")
    assert [name for name in ("frozen", "trained", "small") if same_place(one, two, name)] == ["frozen"]
    assert verified(one).path == one
    assert verified(two).path == two
    three = save(store, 3, frozen=LARGE)
    assert (one / "frozen").stat().st_nlink == 3
    store.remove(1)
    store.remove(2)
    assert verified(three).path == three
    assert (three / "frozen").read_bytes() == LARGE


def test_another_run_s_files_are_not_linked(store: CheckpointStore) -> None:
    one = save(store, 1, run_id="another", frozen=LARGE)
    two = save(store, 2, frozen=LARGE)
    assert not same_place(one, two, "frozen")


def test_saving_a_step_again_leaves_no_name_of_the_old_one(store: CheckpointStore) -> None:
    save(store, 1, frozen=LARGE)
    again = save(store, 1, frozen=LARGE)
    assert (again / "frozen").stat().st_nlink == 1
    assert verified(again).path == again


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(bytes(content))


def as_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("damage", [flipped, Path.unlink, as_link])
def test_a_damaged_file_is_not_taken_over(damage: Callable[[Path], None], store: CheckpointStore) -> None:
    """Its size and its manifest say that it is the same."""
    one = save(store, 1, frozen=LARGE)
    damage(one / "frozen")
    two = save(store, 2, frozen=LARGE)
    assert verified(two).path == two
    assert not (two / "frozen").is_symlink()
    assert (two / "frozen").stat().st_nlink == 1


def test_a_file_system_without_links(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **kwargs: object) -> None:
        raise OSError(95, "Operation not supported")

    save(store, 1, frozen=LARGE)
    monkeypatch.setattr(os, "link", refuses)
    two = save(store, 2, frozen=LARGE)
    assert verified(two).path == two
    assert sorted(path.name for path in two.iterdir()) == ["frozen", "manifest.json"]


class Mostly(torch.nn.Module):
    """Its weights are all in one file, of which none changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frozen", torch.ones(MIN_BYTES // 4 + 1))
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x[..., :4]).mean() * 0}


@pytest.mark.parametrize("save_async", [None, False])
def test_a_later_save_does_not_reach_an_older_checkpoint(save_async: bool | None, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, model=Mostly(), save_strategy="steps", save_steps=2, num_train_epochs=1, save_async=save_async
    )
    trainer.train()
    store = CheckpointStore(tmp_path)
    assert store.steps() == [2, 4, 6, 7]
    paths = [store.path(step) for step in store.steps()]
    assert (paths[0] / "model.safetensors").stat().st_nlink == 4
    with torch.no_grad():
        trainer.model.frozen.add_(1)
    trainer.save_model(str(tmp_path / "other"))
    trainer.state.global_step = 9
    trainer._save_checkpoint(trainer.model, None)
    assert not same_place(paths[-1], store.path(9), "model.safetensors")
    for path in paths:
        assert verified(path).path == path
