"""Checkpoints in parts are read, and none of them runs code."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from trainwright.engine import sharded_state
from trainwright.engine.sharded_state import read
from trainwright.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def written(folder: Path, **values: Any) -> Path:
    save({"model": values}, storage_writer=FileSystemWriter(folder))
    return folder


def test_whole_tensors_come_back(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    folder = written(tmp_path / sharded_state.MODEL, **{"layer.weight": weight, "layer.bias": torch.ones(2)})
    found = read(folder, under="model")
    assert found.keys() == {"layer.weight", "layer.bias"}
    assert torch.equal(found["layer.weight"], weight)
    assert sharded_state.has_weights(tmp_path)
    assert not sharded_state.has_optimizer(tmp_path)
    assert torch.equal(sharded_state.read_weights(tmp_path)["layer.bias"], torch.ones(2))


def test_the_state_of_an_optimizer_without_any_is_loaded() -> None:
    """SGD without momentum keeps nothing for a weight, only its settings."""
    model = torch.nn.Linear(3, 2)
    source, target = (torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.5, 0.1))
    sharded_state.load_whole_optimizer_state(model, target, source.state_dict())
    assert [group["lr"] for group in target.param_groups] == [0.5]


def test_a_description_that_would_run_code_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", a=torch.ones(1))
    (folder / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(CheckpointError, match="is not part of one"):
        read(folder, under="model")
    assert not (tmp_path / "sprung").exists()


def test_a_value_that_would_run_code_is_refused(tmp_path: Path) -> None:
    """What is not a tensor is pickled by torch, and torch would unpickle it."""
    folder = written(tmp_path / "model", a=torch.ones(1), b=3)
    data = next(folder.glob("*.distcp"))
    stored = io.BytesIO()
    trap = io.BytesIO()
    torch.save(3, stored)
    torch.save(Trap(tmp_path / "sprung"), trap)
    content = data.read_bytes()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.b")
    data.write_bytes(content + trap.getvalue())
    place.offset = len(content)
    place.length = len(trap.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError):
        read(folder, under="model", into={"a": torch.zeros(1), "b": 0})
    assert not (tmp_path / "sprung").exists()


def test_a_file_outside_is_not_opened(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", a=torch.ones(1))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="which is outside of it"):
        read(folder, under="model")


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1})])
def test_an_invalid_description(content: bytes, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", a=torch.ones(1))
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as a distributed checkpoint"):
        read(folder, under="model")
