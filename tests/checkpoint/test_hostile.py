"""A checkpoint from a stranger: nothing in it is run, and each ends in an error that names the file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.errors import CheckpointError

from .._support.small import StopAt, make_trainer

WITNESS = "it-was-run"


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (WITNESS,)


def as_torch_file(path: Path) -> None:
    torch.save({"state": {}, "param_groups": [], "x": Payload()}, path)


def as_legacy_torch_file(path: Path) -> None:
    torch.save(Payload(), path, _use_new_zipfile_serialization=False)


def as_plain_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Payload()))


def sign_again(folder: Path) -> None:
    """Whoever wrote the payload wrote the manifest too."""
    manifest = Manifest.read(folder)
    assert manifest is not None
    values = {name: getattr(manifest, name) for name in ("step", "run_id", "cursor")}
    Manifest(**values, files=describe_files(folder)).write(folder)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_trainer(tmp_path / "run", callbacks=[StopAt(3)]).train()
    return tmp_path / "run" / "checkpoint-3"


@pytest.mark.parametrize("disguise", [as_torch_file, as_legacy_torch_file, as_plain_pickle])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin"])
@pytest.mark.filterwarnings("ignore:.*weights_only.*")
def test_a_payload_is_not_run_and_named(name: str, disguise: Any, checkpoint: Path, tmp_path: Path) -> None:
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    disguise(checkpoint / name)
    sign_again(checkpoint)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(checkpoint))
    assert not Path(WITNESS).exists()


@pytest.mark.parametrize("disguise", [as_torch_file, as_legacy_torch_file, as_plain_pickle])
@pytest.mark.parametrize("name", ["training_args.bin", "scaler.pt", "something.bin", "custom.py"])
def test_a_payload_where_nobody_looks_is_not_run(name: str, disguise: Any, checkpoint: Path, tmp_path: Path) -> None:
    disguise(checkpoint / name)
    sign_again(checkpoint)
    trainer = make_trainer(tmp_path / "run")
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 14
    assert not Path(WITNESS).exists()


STATES = {
    "empty": "",
    "cut-off": '{"global_step": 3, "log_hist',
    "a-list": "[]",
    "a-word": '"global_step"',
    "step-is-text": '{"global_step": "three"}',
    "history-is-a-number": '{"global_step": 3, "log_history": 5}',
    "callbacks-are-a-number": '{"global_step": 3, "stateful_callbacks": 5}',
}


@pytest.mark.parametrize("text", STATES.values(), ids=STATES.keys())
def test_a_record_of_another_shape_is_refused(text: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "trainer_state.json").write_text(text)
    sign_again(checkpoint)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(checkpoint))


def test_what_ours_writes_holds_nothing_but_numbers_and_tensors(checkpoint: Path) -> None:
    files = [path for path in checkpoint.iterdir() if path.suffix in (".pt", ".pth", ".bin")]
    assert {path.name for path in files} == {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
    for path in files:
        torch.load(path, weights_only=True)


def test_no_token_is_written(tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", callbacks=[StopAt(1)], hub_token="hf_" + "s" * 34).train()
    for path in (tmp_path / "run" / "checkpoint-1").iterdir():
        assert b"hf_sss" not in path.read_bytes(), path.name
