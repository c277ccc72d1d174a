"""Between two optimizer steps nothing waits for the device and nothing looks around.

Ten steps without a log or a save, during which reading a number back, asking for a package or an environment
variable, and touching a file raise. A guard that knows loss and norm to be in main memory may read them: nothing waits
for that. Two things are not the loop's affair: what a fused optimizer's kernel reads inside torch (the dispatcher is
left before it runs; torch's unfused AdamW reads its step count back on a CPU, and so has no row), and what the forward
of a model of transformers looks at.
"""

import builtins
import importlib.util
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trainwright
from trainwright.capabilities.guard import step_guard
from trainwright.state.meter import LossMeter

from . import doubles

FIRST = 4
LAST = 14
READS_BACK = ("_local_scalar_dense", "item", "is_nonzero", "equal")


class NotQuietError(BaseException):
    """Not an Exception, so that no `except Exception` on the way hides it."""


class NoReadBack(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS_BACK and not Quiet.is_paused:
            raise NotQuietError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


LOOKS_AROUND = (
    (torch.Tensor, "item"),
    (torch.Tensor, "tolist"),
    (torch.Tensor, "numpy"),
    (importlib.util, "find_spec"),
    (type(os.environ), "__getitem__"),
    (builtins, "open"),
    (io, "open"),
    (os, "stat"),
    (Path, "stat"),
    (os, "listdir"),
    (os, "scandir"),
    (os.path, "exists"),
    (os.path, "isfile"),
    (os.path, "isdir"),
)


class Quiet:
    """Between `begin` and `end`, looking around raises; `end` may be called again."""

    is_paused = False

    def __init__(self) -> None:
        self._patches = pytest.MonkeyPatch()
        self._mode: NoReadBack | None = None

    def begin(self) -> None:
        for owner, name in LOOKS_AROUND:
            self._patches.setattr(owner, name, _raises(f"{owner.__name__}.{name}", getattr(owner, name)))
        for owner, name in ((step_guard, "read"), (LossMeter, "read_step_loss")):
            self._patches.setattr(owner, name, _paused(getattr(owner, name)))
        # A torch that is built with CUDA reads the environment for it in each step of its optimizers.
        self._patches.setattr(torch.accelerator, "is_available", lambda: False)
        self._patches.setattr(torch.cuda, "is_available", lambda: False)
        self._mode = NoReadBack()
        self._mode.__enter__()

    def end(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        self._patches.undo()


def _raises(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if Quiet.is_paused:
            return original(*args, **kwargs)
        raise NotQuietError(f"{name} was called")

    return called


def _paused(read: Callable[..., float]) -> Callable[..., float]:
    def called(*args: Any) -> float:
        Quiet.is_paused, before = True, Quiet.is_paused
        try:
            return read(*args)
        finally:
            Quiet.is_paused = before

    return called


class QuietBetween(trainwright.TrainerCallback):
    """Quiet from the end of one step to the end of a later one."""

    def __init__(self) -> None:
        self.quiet = Quiet()
        self.num_steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == FIRST:
            self.quiet.begin()
        elif FIRST < state.global_step <= LAST:
            self.num_steps += 1
        if state.global_step == LAST:
            self.quiet.end()


def train_quietly(output_dir: Path, cls: Any = None, *, settings: dict[str, Any], **parts: Any) -> None:
    between = QuietBetween()
    trainer = doubles.trainer(
        output_dir, cls, settings={"max_steps": 20, "logging_steps": 20} | settings, callbacks=[between], **parts
    )
    try:
        trainer.train()
    finally:  # whatever reports a failure must be free to look around
        between.quiet.end()
    assert between.num_steps == LAST - FIRST


KINDS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 4},
    "no-clipping": {"max_grad_norm": 0.0},
    "weight-decay-cosine": {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 3},
    "sgd": {"optim": "sgd"},
    "counts-tokens": {"include_num_input_tokens_seen": "all"},
    "keeps-non-finite": {"logging_nan_inf_filter": False},
    "sequential": {"train_sampling_strategy": "sequential"},
    "watched-too": {"eval_strategy": "steps", "eval_steps": 20, "save_strategy": "steps", "save_steps": 20},
}


class Classifier(doubles.Regressor):
    """A loss that label smoothing can replace."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def labelled(size: int) -> list[dict[str, Any]]:
    return [{"x": item["x"], "labels": i % 3} for i, item in enumerate(doubles.samples(size))]


MODELS = (doubles.Regressor, doubles.CountsItems, Classifier)


@pytest.mark.parametrize("model", MODELS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
def test_ten_steps_are_quiet(settings: dict[str, Any], model: Any, tmp_path: Path) -> None:
    if model is Classifier:
        settings = settings | {"label_smoothing_factor": 0.1}
    make = labelled if model is Classifier else doubles.samples
    train_quietly(
        tmp_path, settings=settings, model=doubles.model(model), train_dataset=make(400), eval_dataset=make(8)
    )


def test_a_step_around_a_model_of_transformers_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.register_forward_pre_hook(lambda *_: monkeypatch.setattr(Quiet, "is_paused", True))
    model.register_forward_hook(lambda *_: monkeypatch.setattr(Quiet, "is_paused", False))
    ids = torch.randint(3, 32, (200, 8)).tolist()
    train_quietly(
        tmp_path,
        settings={"gradient_accumulation_steps": 2},
        model=model,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    )


class Records(trainwright.Trainer):
    """Records numbers, and says over how many items its loss is a mean."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **how: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **how)
        items = (inputs["labels"] > 0.1).sum()
        self.record("mean", outputs["logits"].mean(), weight=items)
        self.record("largest", outputs["logits"].max(), reduce="max")
        loss = trainwright.LossOutput(loss, num_items=items, metrics={"mine": loss})
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("accumulation", [1, 4])
def test_recording_is_quiet(accumulation: int, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": accumulation}
    train_quietly(tmp_path, Records, settings=settings, train_dataset=doubles.samples(400))


def read_backs_of_a_log(output_dir: Path, cls: Any) -> int:
    """Numbers of calls that wait for the device, in a log."""
    calls: list[str] = []

    class Counts(cls):  # type: ignore[misc]
        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                for name in ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__"):
                    original = getattr(torch.Tensor, name)
                    patch.setattr(torch.Tensor, name, lambda *a, n=name, f=original: (calls.append(n), f(*a))[1])
                super()._maybe_log_save_evaluate(*args, **kwargs)

    trainer = doubles.trainer(output_dir, Counts, settings={"max_steps": 4, "logging_steps": 4})
    trainer.train()
    assert ("mine" in trainer.state.log_history[0]) == (cls is Records)
    return len(calls)


def test_a_log_of_recorded_numbers_reads_no_more_often(tmp_path: Path) -> None:
    assert read_backs_of_a_log(tmp_path, Records) == read_backs_of_a_log(tmp_path, trainwright.Trainer) == 2


@pytest.mark.parametrize(
    "look",
    [
        lambda: torch.ones(()).item(),
        lambda: bool(torch.ones(()) > 0),
        lambda: float(torch.ones(())),
        lambda: int(torch.ones(())),
        lambda: torch.ones(2).tolist(),
        lambda: torch.equal(torch.ones(2), torch.ones(2)),
        lambda: importlib.util.find_spec("deepspeed"),
        lambda: builtins.open("x"),  # noqa: SIM115
        lambda: os.stat("."),
        lambda: os.environ.get("RANK"),
        lambda: os.path.exists("."),
        lambda: Path().exists(),
    ],
)
def test_the_guard_hears_a_step_that_is_not_quiet(look: Callable[[], Any], tmp_path: Path) -> None:
    class Looks(trainwright.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            look() if self.state.global_step > FIRST else None
            return super().training_step(*args, **kwargs)

    with pytest.raises(NotQuietError):
        train_quietly(tmp_path, Looks, settings={}, train_dataset=doubles.samples(400))
