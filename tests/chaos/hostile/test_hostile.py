"""A checkpoint from a stranger: nothing in it is run, and each ends in an error that names the file."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainwright import TrainingArguments
from trainwright.checkpoint.manifest import Manifest, describe_files, digest
from trainwright.errors import CheckpointError, NonFiniteWeightsError
from trainwright.run.resume import find_checkpoint

from ..._support.small import StopAt, make_trainer

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
def test_a_payload_in_an_unread_place_is_not_run(name: str, disguise: Any, checkpoint: Path, tmp_path: Path) -> None:
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
    "step-is-negative": '{"global_step": -5}',
    "epoch-is-not-a-number": '{"global_step": 3, "epoch": NaN}',
    "operations-are-negative": '{"global_step": 3, "total_flos": -1.0}',
    "callbacks-are-a-number": '{"global_step": 3, "stateful_callbacks": 5}',
}


@pytest.mark.parametrize("text", STATES.values(), ids=STATES.keys())
def test_a_record_of_another_shape_is_refused(text: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "trainer_state.json").write_text(text)
    sign_again(checkpoint)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("depth", [800, 200_000])
def test_arguments_that_are_nested_too_deeply_are_not_compared(depth: int, checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "training_args.json"
    values = path.read_text().rstrip().removesuffix("}")
    path.write_text(values + ', "lr_scheduler_kwargs": ' + "[" * depth + "]" * depth + "}")
    sign_again(checkpoint)
    trainer = make_trainer(tmp_path / "run")
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 14


def test_what_ours_writes_holds_nothing_but_numbers_and_tensors(checkpoint: Path) -> None:
    files = [path for path in checkpoint.iterdir() if path.suffix in (".pt", ".pth", ".bin")]
    assert {path.name for path in files} == {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
    for path in files:
        if path.name != "training_args.bin":  # an object, for people who load it; nothing of ours reads it
            torch.load(path, weights_only=True)


def test_no_token_is_written(tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", callbacks=[StopAt(1)], hub_token="hf_" + "s" * 34).train()
    for path in (tmp_path / "run" / "checkpoint-1").iterdir():
        assert b"hf_sss" not in path.read_bytes(), path.name


# -- names and links that lead out of the directory ------------------------------------------------------------------

NAMES = ["../secret", "/etc/hostname", "sub/../../secret", "..", "C:\\secret", "..\\secret", "\\\\host\\secret"]


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_that_names_something_outside_is_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """Whether it is there, and what it holds, is told to nobody."""
    (tmp_path / "run" / "secret").write_text("s")
    manifest = Manifest.read(checkpoint)
    assert manifest is not None
    entry = {"size": 1, "xxh3": digest(tmp_path / "run" / "secret")}
    replace(manifest, files=manifest.files | {name: entry}).write(checkpoint)
    with pytest.raises(CheckpointError, match=r"manifest\.json lists .* outside the directory"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(checkpoint))


def to_a_file(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to(outside)


def to_a_directory(path: Path, outside: Path) -> None:
    path.with_name("more").symlink_to(outside.parent, target_is_directory=True)


def to_nothing(path: Path, outside: Path) -> None:
    path.with_name("more").symlink_to("nothing-there")


def to_itself(path: Path, outside: Path) -> None:
    path.with_name("more").symlink_to("more")


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("link", [to_a_file, to_a_directory, to_nothing, to_itself])
def test_a_link_that_leaves_the_directory_is_refused(
    link: Any, has_manifest: bool, checkpoint: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "elsewhere" / "model.safetensors"
    outside.parent.mkdir()
    outside.write_bytes((checkpoint / "model.safetensors").read_bytes())  # the same, so no checksum tells
    link(checkpoint / "model.safetensors", outside)
    if not has_manifest:
        (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"(model\.safetensors|more) is a link that leaves"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(checkpoint))


def test_a_link_within_the_directory_and_to_it_is_followed(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "optimizer.pt").rename(checkpoint / "kept.pt")
    (checkpoint / "optimizer.pt").symlink_to("kept.pt")
    sign_again(checkpoint)
    (tmp_path / "by-another-name").symlink_to(checkpoint, target_is_directory=True)
    trainer = make_trainer(tmp_path / "run")
    trainer.train(resume_from_checkpoint=str(tmp_path / "by-another-name"))
    assert trainer.state.global_step == 14


@pytest.mark.timeout(60)
@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json", "more.pt"]
)
def test_a_pipe_in_a_checkpoint_is_refused_and_not_waited_for(name: str, has_manifest: bool, run: Path) -> None:
    path = run / "checkpoint-3" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if not has_manifest:
        (run / "checkpoint-3" / "manifest.json").unlink()
        (run / "checkpoint-3" / "training_args.json").unlink()
    assert str(find_checkpoint("auto", str(run))) == str(run / "checkpoint-2")
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is a pipe"):
        find_checkpoint(str(run / "checkpoint-3"), str(run))


# -- JSON that is there to fill the memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "trainer_state.json"])
@pytest.mark.parametrize("kind", ["deep", "huge"])
def test_json_that_is_too_deep_or_too_large_is_refused(name: str, kind: str, checkpoint: Path, tmp_path: Path) -> None:
    with (checkpoint / name).open("w") as file:
        if kind == "deep":
            file.write("[" * 200_000)
        else:
            file.truncate(3 << 30)  # a hole: it takes no place on the disk, and would take gigabytes in memory
    if name == "trainer_state.json":  # of a checkpoint that looks like one of transformers: no sums to check first
        (checkpoint / "manifest.json").unlink()
        (checkpoint / "training_args.json").unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(checkpoint))


def test_an_index_of_shards_that_is_too_deep_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text("[" * 200_000)
    sign_again(checkpoint)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize(
    "change",
    [{"files": []}, {"files": {"a": 1}}, {"files": {"a": {}}}, {"step": "3"}, {"run_id": 7}, {"written_at": None}],
)
def test_a_manifest_of_another_shape_is_refused(change: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    """Its own checksum is right: whoever changed it knew how."""
    manifest = Manifest.read(checkpoint)
    assert manifest is not None
    replace(manifest, **change).write(checkpoint)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        make_trainer(tmp_path / "run").train(resume_from_checkpoint=str(checkpoint))


# -- values that no run writes, signed by whoever wrote them -----------------------------------------------------------

HUGE = 10**30


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("trained")
    make_trainer(folder, callbacks=[StopAt(3)], save_strategy="steps", save_steps=2).train()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def state_with(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "trainer_state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def manifest_with(**values: Any) -> Callable[[Path], None]:
    """Its own checksum is right."""
    return lambda folder: replace(Manifest.read(folder), **values).write(folder)  # type: ignore[type-var, union-attr]


def cursor_with(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = Manifest.read(folder)
        assert manifest is not None
        replace(manifest, cursor=(manifest.cursor or {}) | values).write(folder)

    return change


def as_tensors(name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(value, folder / name)


def as_bytes(name: str, value: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(value)


CRAFTED: dict[str, Callable[[Path], object]] = {
    **{
        f"state {name} {value!r:.9}": state_with(**{name: value})
        for name, value in [
            ("global_step", HUGE),
            ("global_step", None),
            ("global_step", 2.5),
            ("global_step", 2),
            ("epoch", math.inf),
            ("epoch", "x"),
            ("epoch", []),
            ("max_steps", HUGE),
            ("max_steps", "3"),
            ("num_train_epochs", HUGE),
            ("num_input_tokens_seen", [1]),
            ("total_flos", "many"),
            ("total_flos", math.inf),
            ("best_metric", {}),
            ("best_global_step", HUGE),
            ("best_model_checkpoint", 5),
            ("log_history", {"a": 1}),
            ("stateful_callbacks", [1]),
        ]
    },
    "state deep": as_bytes("trainer_state.json", b"[" * 200_000),
    "state long number": as_bytes("trainer_state.json", b'{"global_step": ' + b"9" * 5000 + b"}"),
    "state no text": as_bytes("trainer_state.json", b"\xff\xfe\xff"),
    **{
        f"cursor {name} {value!r:.9}": cursor_with(**{name: value})
        for name, value in [
            ("epoch", HUGE),
            ("epoch", "1"),
            ("epoch", None),
            ("samples", HUGE),
            ("samples", -1),
            ("samples", 1.5),
            ("seed", "x"),
            ("num_samples", []),
            ("chunk", 0),
            ("chunk", "4"),
            ("batch_size", HUGE),
            ("micro_batches", 0),
            ("shift", HUGE),
            ("shift", None),
            ("unit", 5),
            ("order", []),
        ]
    },
    **{
        f"manifest {name} {value!r:.9}": manifest_with(**{name: value})
        for name, value in [
            ("step", HUGE),
            ("step", -1),
            ("world_size", HUGE),
            ("world_size", "2"),
            ("written_at", 10**400),
            ("cursor", [1]),
            ("files", {"a": {"size": HUGE}}),
        ]
    },
    **{
        f"file {name}": as_tensors(name, value)
        for name, value in [
            ("rng_state.pth", [1, 2]),
            ("data_position.pth", 7),
            ("rng_state.pth", torch.zeros(2)),
        ]
    },
    "file optimizer.pt": as_bytes("optimizer.pt", b"PK nothing"),
    "file model.safetensors": as_bytes("model.safetensors", b"\xff" * 64),
}


@pytest.mark.parametrize("change", CRAFTED.values(), ids=CRAFTED.keys())
def test_value_that_no_run_writes_is_refused_and_auto_takes_older_one(
    change: Callable[[Path], None], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(run / "checkpoint-3")
    if Manifest.read(run / "checkpoint-3") is not None:
        sign_again(run / "checkpoint-3")
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        assert str(find_checkpoint("auto", str(run))) == str(run / "checkpoint-2")
    assert "checkpoint-3 is skipped" in caplog.text
    with pytest.raises(CheckpointError):
        make_trainer(run).train(resume_from_checkpoint=str(run / "checkpoint-3"))


# -- lengths that no run writes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_steps", [0, 1])
def test_length_before_the_step_of_its_record_is_not_used(
    max_steps: int, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A schedule of that length would have ended: the rate would be 0 from here on."""

    def rates(folder: Path) -> list[float]:
        trainer = make_trainer(folder, log_level="warning", save_strategy="no")
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-3"))
        return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]

    whole = rates(run / "whole")
    state_with(max_steps=max_steps)(run / "checkpoint-3")
    sign_again(run / "checkpoint-3")
    caplog.clear()
    assert rates(run / "again") == whole
    assert f"max_steps={max_steps}, before its step 3" in caplog.text


# -- weights that were signed by whoever changed them ------------------------------------------------------------------


def change_weights(folder: Path, change: Callable[[torch.Tensor], torch.Tensor], *, only_first: bool = True) -> str:
    """Changes the first trained weight, or all; returns its name."""
    weights = load_file(folder / "model.safetensors")
    name = min(weights)
    weights |= {one: change(weights[one]) for one in ([name] if only_first else weights)}
    save_file(weights, folder / "model.safetensors")
    sign_again(folder)
    return name


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8], ids=str)
def test_whole_numbers_in_place_of_weights_are_refused(dtype: torch.dtype, run: Path) -> None:
    name = change_weights(run / "checkpoint-3", lambda one: one.to(dtype))
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} has numbers of {dtype}"):
        make_trainer(run).train(resume_from_checkpoint=str(run / "checkpoint-3"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_of_another_precision_are_loaded(dtype: torch.dtype, run: Path) -> None:
    change_weights(run / "checkpoint-3", lambda one: one.to(dtype), only_first=False)
    trainer = make_trainer(run)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-3"))
    assert trainer.state.global_step == 14


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("asked", ["auto", "checkpoint-3"])
def test_weights_that_are_not_finite_are_refused_with_the_newest_older_checkpoint(
    value: float, asked: str, run: Path
) -> None:
    name = change_weights(run / "checkpoint-3", lambda one: one.fill_(value))
    with pytest.raises(NonFiniteWeightsError, match=rf"{re.escape(name)}\. Resume from .*checkpoint-2,"):
        make_trainer(run).train(resume_from_checkpoint=asked if asked == "auto" else str(run / asked))


def test_weights_that_are_not_finite_without_an_older_checkpoint(run: Path) -> None:
    for step in (2, 3):
        change_weights(run / f"checkpoint-{step}", lambda one: one.fill_(float("nan")))
    with pytest.raises(NonFiniteWeightsError, match="No older checkpoint beside it"):
        make_trainer(run).train(resume_from_checkpoint=str(run / "checkpoint-3"))


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_weights_that_are_not_finite_are_resumed_where_that_is_asked_for(
    policy: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_weights(run / "checkpoint-3", lambda one: one.fill_(float("nan")))
    make_trainer(run, max_steps=4, log_level="warning", on_nonfinite=policy).train(
        resume_from_checkpoint=str(run / "checkpoint-3")
    )
    assert ("The weights in" in caplog.text) == (policy == "warn")


def test_nan_in_the_state_of_an_optimizer_is_named_at_the_resume(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = run / "checkpoint-3" / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    state["state"][0]["exp_avg"].fill_(float("nan"))
    torch.save(state, path)
    sign_again(path.parent)
    make_trainer(run, max_steps=4, log_level="warning", on_nonfinite="ignore").train(
        resume_from_checkpoint=str(path.parent)
    )
    assert "optimizer.pt has NaN in exp_avg of" in caplog.text


@pytest.mark.parametrize("token", [5, ["hf_x"], {"token": "hf_x"}, b"hf_x"])
def test_a_token_is_text(token: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hub_token"):
        TrainingArguments(output_dir=str(tmp_path), hub_token=token)
