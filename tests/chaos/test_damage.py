"""A real checkpoint, something of it missing, cut short or altered: the file is named, and an older one is taken."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright import get_last_checkpoint
from trainwright.checkpoint.store import verified
from trainwright.errors import CheckpointError

from .._support.small import StopAt, data, make_trainer, models

NUM_FLIPS = 100


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run that saved at steps 2 and 4, a model of transformers' with its tokenizer."""
    folder = tmp_path_factory.mktemp("whole")
    make_trainer(
        folder,
        model=models.seeded(lambda: models.bert(0.1)),
        train_dataset=data.texts(26),
        callbacks=[StopAt(4)],
        processing_class=data.tokenizer(),
        save_strategy="steps",
        save_steps=2,
    ).train()
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    logging.getLogger("trainwright").setLevel(logging.WARNING)
    return Path(shutil.copytree(whole, tmp_path / "run"))


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def truncate(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def assert_named(run: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the error of who named the checkpoint, and in the warning of who asked for the newest one."""
    newest = run / "checkpoint-4"
    older = run / "checkpoint-2"
    with pytest.raises(CheckpointError) as error:
        verified(newest)
    assert name in str(error.value)
    caplog.clear()
    assert get_last_checkpoint(run) == str(older)
    assert name in caplog.text


@pytest.mark.parametrize("damage", [delete, truncate, flip])
def test_every_file_is_named(
    damage: Callable[[Path, random.Random], None], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [name for name in files(run / "checkpoint-4") if (run / "checkpoint-4" / name).stat().st_size > 0]
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= set(names)
    for name in names:
        path = run / "checkpoint-4" / name
        intact = path.read_bytes()
        damage(path, random.Random(name))
        assert_named(run, name, caplog)
        path.write_bytes(intact)
    assert get_last_checkpoint(run) == str(run / "checkpoint-4")


@pytest.mark.costly
def test_a_hundred_flips_of_a_hundred_are_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(0)
    names = files(run / "checkpoint-4")
    sizes = [(run / "checkpoint-4" / name).stat().st_size for name in names]
    for _ in range(NUM_FLIPS):
        (name,) = draw.choices(names, sizes)
        path = run / "checkpoint-4" / name
        intact = path.read_bytes()
        while path.read_bytes() == intact or (name == "manifest.json" and _is_blank(path, intact)):
            path.write_bytes(intact)
            flip(path, draw)
        assert_named(run, name, caplog)
        path.write_bytes(intact)


def _is_blank(path: Path, intact: bytes) -> bool:
    """Whether only a space between two words of JSON became another kind of space."""
    return b"".join(path.read_bytes().split()) == b"".join(intact.split())


def test_training_goes_on_from_the_older_one(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(run / "checkpoint-4" / "optimizer.pt", random.Random(3))
    trainer = make_trainer(
        run,
        model=models.seeded(lambda: models.bert(0.1)),
        train_dataset=data.texts(26),
        callbacks=[StopAt(3)],
        log_level="warning",
    )
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    assert "optimizer.pt" in caplog.text
