"""Bundles that no run writes: each damage to each file ends in a BundleError with a sentence, and nothing hangs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.capabilities.incidents import bundle
from trainwright.checkpoint import rng
from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.cli.replay import replay
from trainwright.errors import BundleError

from ...parity import models
from ..guard.poisoned import POISONS, trained
from .test_bundles import ROW, dropping, folders

MODEL = "tests.capabilities.incidents.test_bundles:dropping"
HUGE = 10**400


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    with rng.unchanged_random_states():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("run")
    trained(output_dir, model=dropping(), poison={ROW: POISONS["nan"]}, settings={"max_steps": 3})
    (folder,) = folders(output_dir)
    return folder


@pytest.fixture
def damaged(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "bundle"))


def signed(folder: Path) -> None:
    """Whoever changed it knew how."""
    manifest = Manifest.read(folder)
    if manifest is not None:
        Manifest(step=manifest.step, run_id=manifest.run_id, files=describe_files(folder)).write(folder)


def refused(folder: Path, name: str, model: str | None = MODEL) -> None:
    with pytest.raises(BundleError, match=name.replace(".", r"\.")) as found:
        replay(folder, model=model, precision=None, one_by_one=False)
    assert str(found.value).count(" ") > 3, "a sentence"


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def deep(path: Path) -> None:
    path.write_text("[" * 200_000)


def nested(path: Path) -> None:
    """As deep as can just be read."""
    path.write_text('{"batches": ' + "[" * 800 + "]" * 800 + ', "python": ' + "[" * 800 + "]" * 800 + "}")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def removed(path: Path) -> None:
    path.unlink()


FILES = ("incident.json", "batch.safetensors", "batch.json", "rng.json", "manifest.json")
DAMAGES = (truncated, deep, nested, pipe, directory, endless, removed)


@pytest.mark.parametrize("damage", DAMAGES, ids=[one.__name__ for one in DAMAGES])
@pytest.mark.parametrize("name", FILES)
def test_each_damage_to_each_file_is_refused(name: str, damage: Callable[[Path], None], damaged: Path) -> None:
    damage(damaged / name)
    signed(damaged)
    refused(damaged, name)


WRONG: tuple[Any, ...] = (None, 5, -1, HUGE, 1.5, "x", [], ["x"], {}, {"x": []}, True)


def keys(name: str, intact: Path) -> list[str]:
    return list(json.loads((intact / name).read_text()))


@pytest.mark.costly
@pytest.mark.parametrize("name", ["incident.json", "batch.json", "rng.json"])
def test_value_of_type_and_missing_key_ends_in_bundle_error_at_most(name: str, damaged: Path, tmp_path: Path) -> None:
    """Of some entries another value is possible: the replay then runs, to the end."""
    path = damaged / name
    before = json.loads(path.read_text())
    outcomes: dict[str, int] = {}
    changes = [(key, before | {key: value}) for key in before for value in WRONG]
    changes += [(key, {other: value for other, value in before.items() if other != key}) for key in before]
    for key, values in changes:
        path.write_text(json.dumps(values))
        signed(damaged)
        try:
            replay(damaged, model=MODEL, precision=None, one_by_one=False)
        except BundleError:
            outcomes[key] = outcomes.get(key, 0) + 1
    needed = {
        "incident.json": {"format", "loss_rule", "num_parts", "environment", "loss_settings", "losses"},
        "batch.json": {"batches"},
        "rng.json": {"python", "numpy", "cpu"},
    }
    assert needed[name] <= outcomes.keys(), outcomes


NAMES = ["eager", "sdpa", "flash_attention_2", "flex_attention", "sdpa_by_document"]


@pytest.fixture(scope="module")
def of_transformers(tmp_path_factory: pytest.TempPathFactory, intact: Path) -> Path:
    """A bundle whose model is one of transformers."""
    folder = Path(shutil.copytree(intact, tmp_path_factory.mktemp("bert") / "bundle"))
    model = models.seeded(models.bert)
    model.save_pretrained(folder)
    about = json.loads((folder / "incident.json").read_text())
    about |= {"model_class": type(model).__name__, "is_pretrained": True, "attn_implementation": "eager"}
    (folder / "incident.json").write_text(json.dumps(about))
    signed(folder)
    return folder


@pytest.mark.parametrize("name", ["kernels-community/flash-attn", "paged|sdpa", "../here", "Eager", 5, ["eager"]])
@pytest.mark.parametrize("place", ["incident.json", "config.json"])
def test_an_attention_that_may_be_code_from_elsewhere_is_refused(
    place: str, name: Any, of_transformers: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(of_transformers, tmp_path / "bundle"))
    values = json.loads((folder / place).read_text())
    (folder / place).write_text(json.dumps(values | {"attn_implementation": name}))
    signed(folder)
    refused(folder, "names the attention", model=None)


def test_the_known_names_of_attention_are_taken() -> None:
    for name in [None, *NAMES]:
        about = {"attn_implementation": name, "num_parts": 1, "environment": {"threads": 1}}
        bundle.check_incident(Path("bundle"), about)


@pytest.mark.parametrize("damage", [truncated, deep, pipe, directory, endless, removed], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_of_a_model_that_are_damaged_are_refused(
    name: str, damage: Callable[[Path], None], of_transformers: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(of_transformers, tmp_path / "bundle"))
    damage(folder / name)
    if damage is not removed:
        signed(folder)
    refused(folder, "bundle", model=None)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": "x"},
        {"hidden_size": -5},
        {"hidden_size": HUGE},
        {"num_hidden_layers": 10**9},
        {"vocab_size": []},
    ],
)
def test_settings_of_a_model_that_no_run_writes_are_refused(
    config: dict[str, Any], of_transformers: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(of_transformers, tmp_path / "bundle"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    signed(folder)
    refused(folder, "bundle", model=None)
