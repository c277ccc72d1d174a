"""Checkpoints whose weights are not finite: not written over good ones, or marked, and never taken for good."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

import trainwright
from trainwright import TrainerCallback
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.optimizer_check import JOINED, SMALL, find_nan, find_nan_name
from trainwright.checkpoint.store import PIECE, CheckpointStore, WeightCheck
from trainwright.checkpoint.weights import read_file, weight_files
from trainwright.engine import sharded_state
from trainwright.errors import CheckpointNotFoundError, NonFiniteError

from ..._support.small import make_trainer
from ..._support.two_processes import run
from ...cli.commands import call
from . import sharded_saves
from .poisoned import BATCH, POISONS, trained, trainer

SAVES = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1}
NAN_AT_3 = {4: POISONS["nan"]}


@pytest.mark.parametrize("save_safetensors", [True, False])
@pytest.mark.parametrize("save_async", [True, False])
def test_no_such_checkpoint_is_written_over_a_good_one(
    save_async: bool, save_safetensors: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SAVES, "on_nonfinite": "warn", "save_async": save_async, "save_total_limit": 2}
    settings["save_safetensors"] = save_safetensors
    with caplog.at_level(logging.ERROR, logger="trainwright"):
        one = trained(tmp_path, poison=NAN_AT_3, settings=settings)
    assert one.state.global_step == 6
    assert CheckpointStore(tmp_path).steps() == [1, 2]
    assert "checkpoint-3 is not written: " in caplog.text
    assert "is not finite" in caplog.text
    assert str(CheckpointStore(tmp_path).latest()) == str(tmp_path / "checkpoint-2")


def test_with_ignore_they_are_marked_and_nothing_takes_them_for_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SAVES, "on_nonfinite": "ignore", "save_total_limit": 2}
    trained(tmp_path, poison=NAN_AT_3, settings=settings)
    store = CheckpointStore(tmp_path)
    assert {1, 2} <= set(store.steps())
    assert store.non_finite() == set(store.steps()) - {1, 2} != set()
    assert "is not finite" in str(Checkpoint(store.path(6)).non_finite_mark)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        assert str(store.latest()) == str(store.path(2))
    resumed = trainer(tmp_path, settings={**settings, "max_steps": 3})
    resumed.train(resume_from_checkpoint=True)
    assert all(bool(value.isfinite().all()) for value in resumed.model.state_dict().values())


def test_the_first_checkpoint_is_written_since_nothing_better_is_there(tmp_path: Path) -> None:
    trained(tmp_path, poison={0: POISONS["nan"]}, settings={**SAVES, "on_nonfinite": "warn", "max_steps": 2})
    store = CheckpointStore(tmp_path)
    assert store.steps() == [1, 2]
    assert store.non_finite() == {1, 2}
    assert store.latest() is None


def test_guarded_runs_write_finite_weights_only(tmp_path: Path) -> None:
    trained(tmp_path, poison=NAN_AT_3, settings=SAVES)
    store = CheckpointStore(tmp_path)
    assert store.steps() == [1, 2, 3, 4, 5, 6]
    assert store.non_finite() == set()


DTYPES = {"float": torch.float32, "half": torch.bfloat16, "count": torch.int64}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", [0, PIECE, PIECE + 4])
def test_each_element_is_looked_at(place: int, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "a": torch.full((3,), torch.finfo(dtype).max, dtype=dtype),
        "b": torch.zeros(PIECE + 5, dtype=dtype),
        "count": torch.tensor(3),
        "mask": torch.full((2,), -torch.inf, dtype=dtype),
    }
    check = WeightCheck(buffers=frozenset({"mask"}))
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    assert check.find(tmp_path) is None
    for value in (torch.nan, torch.inf, -torch.inf):
        tensors["b"][place] = value
        safetensors.torch.save_file(tensors, path)
        assert check.find(tmp_path) == ("model.safetensors", "b")


def test_the_tensor_of_thousands_that_is_not_finite_is_named(tmp_path: Path) -> None:
    tensors = {
        f"layer.{number}.{kind}": torch.ones(number % 4, dtype=DTYPES[kind]) for number in range(600) for kind in DTYPES
    }
    tensors |= {f"mask.{number}": torch.full((2,), -torch.inf) for number in range(3)}
    check = WeightCheck(buffers=frozenset(name for name in tensors if "mask" in name))
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    assert check.find(tmp_path) is None
    for name in ("layer.1.float", "layer.599.float", "layer.301.half"):
        bad = tensors | {name: tensors[name].clone().fill_(torch.nan)}
        safetensors.torch.save_file(bad, path)
        assert check.first_in(path) == name


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"12",
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0[]",
        (40).to_bytes(8, "little") + b'{"a":{"dtype":"F32","data_offsets":[0,8]}}',
    ],
)
def test_a_file_of_that_name_which_is_no_safetensors_is_not_looked_at(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert WeightCheck().find(tmp_path) is None


def test_torch_files_are_looked_at_and_others_are_not(tmp_path: Path) -> None:
    check = WeightCheck(buffers=frozenset({"mask"}))
    bad = torch.tensor([1.0, torch.nan])
    for name in ("optimizer.pt", "training_args.bin"):
        torch.save({"a": bad}, tmp_path / name)
    (tmp_path / "pytorch_model-of-mine.bin").write_bytes(b"no file of torch")
    torch.save([bad], tmp_path / "pytorch_model_list.bin")
    torch.save({"mask": bad, "kept": "text"}, tmp_path / "pytorch_model-00001-of-00002.bin")
    assert check.find(tmp_path) is None
    torch.save({"mask": bad, "a": bad}, tmp_path / "pytorch_model-00002-of-00002.bin")
    assert check.find(tmp_path) == ("pytorch_model-00002-of-00002.bin", "a")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_piece_of_sharded_weights_is_looked_at(tmp_path: Path) -> None:
    check = WeightCheck(buffers=frozenset({"mask"}), shards=sharded_state.weights_in)
    weights = {"a.weight": torch.ones(3), "b": torch.zeros(5), "mask": torch.full((2,), -torch.inf), "count": 3}
    for bad, value in ((None, 0.0), ("a.weight", torch.nan), ("b", torch.inf)):
        folder = tmp_path / str(bad)
        kept = {name: one.clone() for name, one in weights.items() if isinstance(one, torch.Tensor)}
        if bad is not None:
            kept[bad][2] = value
        save_shards({"model": {**weights, **kept}}, checkpoint_id=folder / sharded_state.MODEL, no_dist=True)
        assert check.find(folder) == (None if bad is None else (f"{sharded_state.MODEL}/__0_0.distcp", bad))
    assert WeightCheck().find(tmp_path) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nan_in_a_sharded_optimizer_is_found_and_infinity_is_not(tmp_path: Path) -> None:
    state = {"a.weight": {"exp_avg": torch.ones(3), "step": torch.tensor(2.0)}}
    for place, value in (("one", 1.0), ("inf", torch.inf), ("nan", torch.nan)):
        state["a.weight"]["exp_avg"][1] = value
        at = tmp_path / place / sharded_state.OPTIMIZER
        save_shards({"optimizer": {"state": state}}, checkpoint_id=at, no_dist=True)
        found = find_nan(tmp_path / place, shards=sharded_state.optimizer_in)
        expected = (f"{sharded_state.OPTIMIZER}/__0_0.distcp", "state.a.weight.exp_avg")
        assert found == (expected if place == "nan" else None)


def test_an_optimizer_of_other_objects_is_not_looked_at(tmp_path: Path) -> None:
    for saved in ({"state": [torch.tensor([torch.nan]), Path("x")]}, [torch.nan], torch.tensor([torch.nan]), {}):
        torch.save(saved, tmp_path / "optimizer.pt")
        assert find_nan(tmp_path, shards=sharded_state.optimizer_in) is None
    torch.save({"state": {0: [{"m": torch.tensor([torch.nan], dtype=torch.bfloat16)}]}}, tmp_path / "optimizer.pt")
    assert find_nan(tmp_path, shards=sharded_state.optimizer_in) == ("optimizer.pt", "state.0.0.m")
    (tmp_path / "optimizer.pt").write_bytes(b"no file of torch")
    assert find_nan(tmp_path, shards=sharded_state.optimizer_in) is None


class BreaksState(trainwright.TrainerCallback):
    """Puts NaN into the optimizer's state after step 3: the weights stay finite in its save."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            next(iter(kwargs["optimizer"].state.values()))["exp_avg"][0] = torch.nan


class Rewrites(trainwright.Trainer):
    """Its override changes the optimizer's file after it is written."""

    def _save_optimizer_and_scheduler(self, output_dir: str | None) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        path = Path(str(output_dir), "optimizer.pt")
        saved = torch.load(path, weights_only=True)
        if self.state.global_step == 3:
            saved["state"][0]["exp_avg"][0] = torch.nan
        torch.save(saved, path)


def steps_read_back(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Directories in which an optimizer's file is read from now on."""
    found: list[str] = []
    load = torch.load

    def noting(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(path).name == "optimizer.pt":
            found.append(Path(path).parent.name)
        return load(path, *args, **kwargs)

    monkeypatch.setattr(torch, "load", noting)
    return found


@pytest.mark.parametrize("save_async", [True, False])
def test_an_optimizer_is_tested_before_it_is_written_and_not_read_back(
    save_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = steps_read_back(monkeypatch)
    settings = {**SAVES, "max_steps": 3, "save_async": save_async}
    trained(tmp_path, settings=settings, callbacks=[BreaksState()])
    assert read == []
    assert CheckpointStore(tmp_path).non_finite() == {3}
    assert "exp_avg in optimizer.pt is not finite" in str(Checkpoint(tmp_path / "checkpoint-3").non_finite_mark)


def test_an_optimizer_that_an_override_may_have_changed_is_read_back(tmp_path: Path) -> None:
    trained(tmp_path, settings={**SAVES, "max_steps": 4}, cls=Rewrites)
    assert CheckpointStore(tmp_path).non_finite() == {3}


def test_the_state_of_thousands_with_nan_is_named() -> None:
    sizes = (0, 1, 3, SMALL, SMALL + 1)
    states = {
        number: {"m": torch.full((sizes[number % 5],), torch.inf), "half": torch.ones(2, dtype=torch.bfloat16)}
        for number in range(JOINED + 30)
    }
    states[0]["step"] = torch.tensor(3)
    assert find_nan_name({"state": states}) is None
    for number, name in ((1, "m"), (4, "m"), (JOINED + 29, "half"), (JOINED + 27, "m")):
        good = states[number][name]
        states[number][name] = good.clone().index_fill_(0, torch.tensor([len(good) - 1]), torch.nan)
        assert find_nan_name({"state": states}) == f"state.{number}.{name}"
        states[number][name] = good


@pytest.mark.process
@pytest.mark.parametrize(
    "engine",
    ["fsdp", pytest.param("zero-2", marks=pytest.mark.slow)],  # DeepSpeed is installed for slow tests only
)
def test_all_processes_refuse_or_mark_a_checkpoint_alike(engine: str, tmp_path: Path) -> None:
    if engine == "zero-2":
        pytest.importorskip("deepspeed", reason="heavy; installed for the slow tests (requirements-engines.txt)")
    done = run(
        Path(sharded_saves.__file__),
        str(tmp_path / "runs"),
        engine,
        folder=tmp_path,
        environment={"DS_ACCELERATOR": "cpu"} if engine == "zero-2" else None,
    )
    for told in done.told:
        for name in ("asynchronous", "at once"):
            assert told[name] == {"steps": [1, 2], "bad": [], "marks": [], "newest": 4}, name
        assert (told["marked"]["steps"], told["marked"]["bad"]) == ([1, 2, 3, 4], [3, 4])
        assert all("is not finite" in mark for mark in told["marked"]["marks"])
    assert "is not written: " in done.out


def committed_after_a_bad_step(folder: Path, draw: random.Random) -> list[Path]:
    """Checkpoints of a run with one bad step after its first save; step, value, policy and saves are drawn."""
    save_steps = draw.choice([1, 2, 3])
    bad_step = draw.randint(save_steps + 1, 9)
    limit = draw.choice([None, 1, 2])
    settings = {
        "max_steps": 10,
        "logging_steps": 10,
        "save_strategy": "steps",
        "save_steps": save_steps,
        "on_nonfinite": draw.choice(["skip", "rollback", "stop", "warn"]),
        "save_total_limit": limit,
        "save_async": draw.choice([True, False]),
        "rollback_every": draw.choice([0, 1, 4]),
        "save_safetensors": draw.choice([True, True, False]),
        "incidents": draw.random() < 0.2,
    }
    value = POISONS[draw.choice(list(POISONS))]
    one = trainer(folder, poison={(bad_step - 1) * BATCH + draw.randrange(BATCH): value}, settings=settings)
    try:
        one.train()
    except NonFiniteError:
        assert settings["on_nonfinite"] == "stop"
    return [CheckpointStore(folder).path(step) for step in CheckpointStore(folder).steps()]


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(10), marks=pytest.mark.costly),
        pytest.param(range(100), marks=pytest.mark.slow),  # ten times the one above
    ],
    ids=["ten", "hundred"],
)
def test_no_committed_checkpoint_of_many_runs_has_bad_weights(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        folders = committed_after_a_bad_step(tmp_path / str(seed), random.Random(seed))
        assert folders, seed
        for folder in folders:
            (file,) = weight_files(folder)
            assert all(bool(value.isfinite().all()) for value in read_file(file).values()), (seed, folder)


def test_a_callback_that_breaks_the_weights_is_caught_too(tmp_path: Path) -> None:
    class Breaks(trainwright.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                next(kwargs["model"].parameters()).data[0] = torch.inf

    with pytest.raises(NonFiniteError, match=r"Step 6: .* the weights \(body\.0\.weight\)"):
        trained(tmp_path, settings=SAVES, callbacks=[Breaks()])
    assert CheckpointStore(tmp_path).steps() == [1, 2, 3, 4]


class PoisonsState(TrainerCallback):
    """Puts a value that is not finite into the optimizer's state before the first save."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            next(iter(kwargs["optimizer"].state.values()))["exp_avg_sq"].fill_(torch.nan)
            control.should_save = control.should_training_stop = True


def test_a_marked_checkpoint_is_named_where_no_other_is_left(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "no"}
    make_trainer(tmp_path / "run", callbacks=[PoisonsState()], **settings).train()
    said = r"no complete checkpoint but checkpoint-2, in which state\.0\.exp_avg_sq"
    with pytest.raises(CheckpointNotFoundError, match=said):
        make_trainer(tmp_path / "run", **settings).train(resume_from_checkpoint=True)
    shown = call("verify", str(tmp_path / "run" / "checkpoint-2")).output
    assert "a resume skips it, since state.0.exp_avg_sq" in " ".join(shown.split())
