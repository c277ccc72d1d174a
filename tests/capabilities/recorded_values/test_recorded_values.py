"""Two runs whose values part: the first step, module and operation are named; a run made twice never parts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright import TrainerCallback, capability_table
from trainwright.capabilities.recorded_values.fingerprint import distance, fingerprint, only_place
from trainwright.capabilities.recorded_values.value_comparison import read_values, values_file
from trainwright.checkpoint import rng
from trainwright.errors import ArgumentError, DataError

from ..._support.small import StopAt, data, differing, make_trainer, models, weights
from ..._support.two_processes import run as run_ranks
from ...cli.commands import call

NUM_SAMPLES = 12
PAGE = Path(__file__).parents[3] / "docs" / "advanced" / "debugging.md"
ATTENTION = "model.layers.0.self_attn"


def llama(
    dropout: float = 0.0, change: Callable[[Any], object] | None = None, attention: str | None = None
) -> nn.Module:
    model: Any = models.seeded(lambda: models.llama(dropout))
    if attention is not None:
        model.set_attn_implementation(attention)
    if change is not None:
        with torch.no_grad():
            change(model)
    return model


def of(folder: Path, **parts: Any) -> Any:
    parts = {"model": llama(), "train_dataset": data.sequences(NUM_SAMPLES), **parts}
    return make_trainer(folder, **{"gradient_accumulation_steps": 2, **parts})


def flip(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 5] *= -1


def nudge(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[2:4] += 1e-3


class Fast(nn.Module):
    """A kernel in place of a norm that rounds in another way."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps) * (1 + 1e-6)


def exchange(model: Any) -> None:
    layer = model.model.layers[1]
    layer.input_layernorm = Fast(layer.input_layernorm)


class Wrong(torch.autograd.Function):
    """Returns what it gets; its gradient is a little off."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1.001


def wrong_backward(model: Any) -> None:
    norm = model.model.layers[1].post_attention_layernorm
    kind = type(norm)
    norm.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, x: kind.forward(self, Wrong.apply(x))})


# name -> parts of the second trainer; phase, module and words of the report
PLANTED: dict[str, tuple[Callable[[], dict[str, Any]], str, str, tuple[str, ...]]] = {
    "seed": (lambda: {"seed": 5}, "random", "", ("python, numpy, cpu", "the seed")),
    "order": (lambda: {"data_seed": 3}, "data", "", ("other samples", "train[9]")),
    "size": (
        lambda: {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
        "data",
        "",
        ("the same samples in batches of another size (4 against 8)",),
    ),
    "rows": (lambda: {"train_dataset": data.sequences(12)[::-1]}, "data", "", ("another order", "train[9], row 0")),
    "flipped": (
        lambda: {"model": llama(change=flip)},
        "weights",
        "model.layers.1.mlp.up_proj.weight",
        ("only the value at [3, 5] differs", "1 of 22 weights differs"),
    ),
    "nudged": (
        lambda: {"model": llama(change=nudge)},
        "weights",
        "model.layers.1.mlp.up_proj.weight",
        ("weight: 0.0", "1 of 22 weights differs"),
    ),
    "type of weights": (
        lambda: {"model": llama().to(torch.bfloat16)},
        "weights",
        "model.embed_tokens.weight",
        ("float32 against bfloat16", "22 weights differ"),
    ),
    "autocast": (
        lambda: {"bf16": True},
        "forward",
        f"{ATTENTION}.q_proj",
        ("(Linear): its inputs are the same", "float32 against bfloat16"),
    ),
    "attention": (
        lambda: {"model": llama(attention="eager")},
        "forward",
        ATTENTION,
        (f"{ATTENTION} (LlamaAttention), in its own operations", "v_proj and before", "o_proj"),
    ),
    "dropout": (lambda: {"model": llama(0.3)}, "forward", ATTENTION, ("in its own operations", "v_proj", "o_proj")),
    "kernel": (
        lambda: {"model": llama(change=exchange)},
        "forward",
        "model.layers.1.input_layernorm",
        ("(LlamaRMSNorm | Fast): its inputs are the same",),
    ),
    "loss": (lambda: {"compute_loss_func": halved}, "loss", "", ("the modules are the same",)),
    "backward": (
        lambda: {"model": llama(change=wrong_backward)},
        "backward",
        "model.layers.1.self_attn.o_proj",
        ("(Linear) differs; that of model.layers.1.post_attention_layernorm (LlamaRMSNorm), before it, does not",),
    ),
    "clipping": (lambda: {"max_grad_norm": 0.1}, "gradient", "model.embed_tokens.weight", ("clipping",)),
    "rate": (lambda: {"learning_rate": 1e-3}, "optimizer", "", ("lr 0.01 against 0.001",)),
    "optimizer": (lambda: {"optim": "sgd"}, "optimizer", "", ("class AdamW against SGD",)),
}


def halved(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()) / 2


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one = of(tmp_path / "one")
    with pytest.raises(ArgumentError, match="Give it a Trainer of trainwright"):
        one.compare_with(torch.nn.Linear(2, 2))
    for packages in (5, "", [], [5]):
        with pytest.raises(ArgumentError, match="names no package"):
            one.check(against=packages)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_the_first_that_is_named(name: str, tmp_path: Path) -> None:
    parts, phase, module, words = PLANTED[name]
    one = of(tmp_path / "one")
    other = of(tmp_path / "other", **parts())
    report = one.compare_with(other, num_steps=1)
    first = report.first
    assert not report.is_same
    assert (first.step, first.micro_batch, first.phase, first.name) == (1, 0, phase, module)
    assert [word for word in words if word not in first.text] == []
    assert str(report).startswith("parts")
    assert first.text in str(report)


@pytest.mark.parametrize(
    "parts",
    [{}, {"model": llama}, {"activation_checkpointing": True}, {"logging_steps": 3}],
    ids=["alike", "copy", "recomputed", "logged"],
)
def test_runs_that_compute_the_same_do_not_part(parts: dict[str, Any], tmp_path: Path) -> None:
    made = {name: value() if callable(value) else value for name, value in parts.items()}
    report = of(tmp_path / "one").compare_with(of(tmp_path / "other", **made), num_steps=2)
    assert report.is_same, str(report)
    assert report.steps == (1, 2)
    assert report.num_compared > 300


@pytest.mark.parametrize("name", ["attention", "kernel"])
def test_a_tolerance_accepts_another_rounding(name: str, tmp_path: Path) -> None:
    one = of(tmp_path / "one", optim="sgd")
    other = of(tmp_path / "other", optim="sgd", **PLANTED[name][0]())
    assert not one.compare_with(other).is_same
    assert one.compare_with(other, tolerance=1e-4).is_same


def test_precisions_are_compared_by_tolerance(tmp_path: Path) -> None:
    one = of(tmp_path / "one", optim="sgd")
    other = of(tmp_path / "other", optim="sgd", bf16=True)
    report = one.compare_with(other, tolerance=0.05)
    assert report.is_same, str(report)
    assert f"From {ATTENTION}.q_proj on, float32 and bfloat16; compared by a tolerance of 0.05." in report.notes
    assert report.settings == {"precision": ("no", "bf16")}
    broken = of(tmp_path / "broken", optim="sgd", bf16=True, model=llama(change=flip))
    assert one.compare_with(broken, tolerance=0.05).first.name == "model.layers.1.mlp.up_proj.weight"


def test_both_trainers_stay_as_they_are(tmp_path: Path) -> None:
    one = of(tmp_path / "one")
    other = of(tmp_path / "other", model=llama(0.3))
    before = [weights(trainer.model) for trainer in (one, other)]
    states = rng.capture()
    one.compare_with(other)
    assert rng.same(states, rng.capture())
    assert not any(differing(old, weights(trainer.model)) for old, trainer in zip(before, (one, other), strict=True))
    assert [hooks for module in one.model.modules() for hooks in module._forward_hooks] == []
    assert not any(values_file(tmp_path / name, 0).exists() for name in ("one", "other"))


CALLS: dict[str, Callable[[Any], object]] = {
    "compare_with()": lambda trainer: trainer.compare_with(trainer),
    "check(against=...)": lambda trainer: trainer.check(against="transformers==5.0.0"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_the_capability_says_what_it_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tuple(row for row in capability_table.TABLE if row.name != "recorded_values")
    monkeypatch.setattr(capability_table, "TABLE", others)
    with pytest.raises(NotImplementedError, match=rf"^{re.escape(name)} needs the capability 'recorded_values'"):
        CALLS[name](make_trainer(tmp_path))


def trained(folder: Path, **parts: Any) -> Any:
    trainer = of(folder, **parts)
    trainer.train()
    return trainer


def test_a_recorded_run_trains_the_same_and_is_the_same_twice(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"max_steps": 4, "eval_dataset": data.sequences(4), "eval_strategy": "steps"}
    plain = trained(tmp_path / "plain", model=llama(0.3), **parts)
    one = trained(tmp_path / "one", model=llama(0.3), record_values="2-3", **parts)
    trained(tmp_path / "two", model=llama(0.3), record_values="2-3", **parts)
    assert not differing(weights(plain.model), weights(one.model))
    shown = call("diff", str(tmp_path / "one"), str(tmp_path / "two"))
    assert (shown.exit_code, shown.output[:4]) == (0, "same")
    (recorded,) = read_values(tmp_path / "one").values()
    assert recorded.steps == {2, 3}
    assert not values_file(tmp_path / "plain", 0).exists()


def test_the_command_names_the_parting_for_people_and_programs(tmp_path: Path) -> None:
    trained(tmp_path / "one", record_values=1, max_steps=2)
    trained(tmp_path / "eager", record_values=1, max_steps=2, model=llama(attention="eager"))
    trained(tmp_path / "late", record_values="2-2", max_steps=2)
    runs = str(tmp_path / "one"), str(tmp_path / "eager")
    shown = call("diff", *runs)
    assert shown.exit_code == 1
    assert "forward   model.layers.0.self_attn (LlamaAttention), in its own operations" in shown.output
    document = json.loads(call("diff", *runs, "--json").stdout)
    assert (document["is_same"], document["first"]["name"]) == (False, ATTENTION)
    assert call("diff", *runs, "--tolerance", "1e-3").exit_code == 0
    for other, words in ((tmp_path, "record_values=2"), (tmp_path / "late", "no recorded step in common: 1 and 2")):
        refused = call("diff", runs[0], str(other))
        assert refused.exit_code == 2
        assert words in refused.stderr


def test_the_page_shows_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: dict[str, dict[str, Any]] = {
        "sdpa": {},
        "eager": PLANTED["attention"][0](),
        "bf16": PLANTED["autocast"][0](),
        "flipped": PLANTED["flipped"][0](),
    }
    for name, parts in runs.items():
        trained(tmp_path / "runs" / name, record_values=2, max_steps=2, **parts)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    commands = block.split("$ trainwright ")[1:]
    assert len(commands) == 4
    for command in commands:
        words, *said = command.strip().split("\n")
        shown = call(*shlex.split(words, comments=True))
        assert shown.exit_code == ("exit code 1" in words)
        pattern = "\n".join(".*".join(map(re.escape, line.split("..."))) for line in said)
        assert re.fullmatch(pattern, shown.output.strip()), (words, shown.output)


def test_a_resumed_run_adds_to_its_record(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "record_values": "1-3"}
    trained(tmp_path / "whole", model=llama(0.3), **settings)
    trained(tmp_path / "parts", model=llama(0.3), callbacks=[StopAt(2)], **settings)
    of(tmp_path / "parts", model=llama(0.3), **settings).train(resume_from_checkpoint=True)
    whole, parts = (read_values(tmp_path / name)[0] for name in ("whole", "parts"))
    assert parts.steps == {1, 2, 3}
    shown = call("diff", str(tmp_path / "whole"), str(tmp_path / "parts"))
    assert shown.exit_code == 0, shown.output
    assert whole.num_processes == 1


class DropOnce(TrainerCallback):
    """Ends the epoch after the first micro-batch of the second step: its window is dropped."""

    is_done = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == 1 and not self.is_done
        self.is_done = self.is_done or control.should_epoch_stop


def test_a_window_that_is_dropped_is_void(tmp_path: Path) -> None:
    trained(tmp_path, record_values="1-2", max_steps=5, per_device_train_batch_size=2, callbacks=[DropOnce()])
    records = read_values(tmp_path)[0].records
    number = {step: [key for key in records if key.step == step and key.phase != "weight"] for step in (1, 2)}
    assert [key[1:] for key in number[1]] == [key[1:] for key in number[2]]
    assert max(key.call for key in number[2]) == 0


def test_file_that_was_cut_off_is_read_and_damaged_one_is_named(tmp_path: Path) -> None:
    trained(tmp_path, record_values=1, max_steps=1)
    path = values_file(tmp_path, 0)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:40])
    assert len(read_values(tmp_path)[0].records) == len(lines) - 2  # one line is about the run
    path.write_text("".join([*lines[:3], "no JSON\n", *lines[3:]]))
    with pytest.raises(DataError, match=r"values-rank0\.jsonl:4 is not a line"):
        read_values(tmp_path)


TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@given(st.sampled_from(TYPES), st.integers(1, 9), st.integers(1, 9), st.data())
def test_the_only_value_that_differs_is_found(dtype: torch.dtype, rows: int, columns: int, draw: st.DataObject) -> None:
    one = (torch.arange(rows * columns).reshape(rows, columns) % 50 + 1).to(dtype)
    place = draw.draw(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1)))
    other = one.clone()
    other[place] += 3
    found = [fingerprint(tensor, with_place=True) for tensor in (one, other)]
    assert only_place(*found) == place
    assert only_place(*found[::-1]) == place
    assert only_place(found[0], found[0]) is None
    if rows * columns > 1:
        second = (place[0], (place[1] + 1) % columns) if columns > 1 else ((place[0] + 1) % rows, 0)
        other[second] += 5
        assert only_place(found[0], fingerprint(other, with_place=True)) is None


@given(st.integers(1, 5000), st.floats(1e-7, 1.0), st.integers(0, 99))
def test_the_distance_is_that_of_the_tensors(size: int, scale: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    one = torch.randn(size, generator=g, dtype=torch.float64)
    gap = scale * torch.randn(size, generator=g, dtype=torch.float64)
    real = float(gap.norm() / max(one.norm(), (one + gap).norm()))
    assert 0.05 * real < distance(fingerprint(one), fingerprint(one + gap)) < 4 * real


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.tensor(True),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(4, 6).t(),
        torch.eye(3).to_sparse(),
        torch.tensor([1.0, float("nan"), float("inf")]),
        torch.empty(3, device="meta"),
        torch.ones(5, dtype=torch.float8_e4m3fn),
    ],
    ids=["empty", "bool", "complex", "transposed", "sparse", "not finite", "meta", "float8"],
)
def test_every_kind_of_tensor_has_a_fingerprint(tensor: torch.Tensor) -> None:
    found = fingerprint(tensor, with_place=True)
    assert json.dumps(found) == json.dumps(fingerprint(tensor.clone(), with_place=True))
    assert found["shape"] == list(tensor.shape)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_compiled_model_is_recorded_by_module(tmp_path: Path) -> None:
    trained(tmp_path / "plain", record_values=1, max_steps=2, optim="sgd")
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    trained(tmp_path / "compiled", record_values=1, max_steps=2, optim="sgd", **compiled)
    shown = call("diff", str(tmp_path / "plain"), str(tmp_path / "compiled"), "--tolerance", "1e-4")
    assert shown.exit_code == 0, shown.output
    plain, other = (
        {key for key in read_values(tmp_path / name)[0].records if key.phase == "forward"}
        for name in ("plain", "compiled")
    )
    assert plain == other


@pytest.mark.slow
def test_runs_of_one_and_two_processes_are_compared_by_what_they_share(tmp_path: Path) -> None:
    script = Path(__file__).with_name("values_of_two.py")
    run_ranks(script, str(tmp_path / "two"), folder=tmp_path, timeout_s=150)
    trained(tmp_path / "one", record_values=2, optim="sgd")
    runs = str(tmp_path / "one"), str(tmp_path / "two")
    shown = call("diff", *runs, "--tolerance", "1e-4")
    assert shown.exit_code == 0, shown.output
    assert "1 and 2 processes: compared are weights, gradients of the update" in shown.output
    assert len(read_values(tmp_path / "two")) == 2
