"""On a GPU: runs resume to the bit, equal those of transformers, survive bad steps, and wait for the device rarely."""

from __future__ import annotations

import gc
import math
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from trainwright import Trainer, TrainerCallback

from . import cases
from .cases import DETERMINISTIC, DEVICE, NUM_STEPS, PRECISIONS, gap, gpt2, llama, losses, on_cuda, trained, weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]
SAVES = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": None}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 4},
    "workers": {"dataloader_num_workers": 2},
}


# -- resumes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
@cases.precisions
def test_a_resume_is_equal_to_the_bit(precision: str, feature: str, tmp_path: Path, record_property: Any) -> None:
    settings = PRECISIONS[precision] | FEATURES[feature] | DETERMINISTIC
    whole = trained(tmp_path / "whole", gpt2(), **settings, **SAVES)
    torch.rand(9, device=DEVICE)  # the generators of the device are elsewhere
    late = trained(tmp_path / "late", gpt2(), resume=str(tmp_path / "whole" / "checkpoint-8"), **settings)
    record_property("weight_gap", gap(weights(whole), weights(late)))
    assert late.state.global_step == NUM_STEPS
    assert losses(late)[-1] == losses(whole)[-1]
    assert gap(weights(whole), weights(late)) == 0.0


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from trainwright import TrainerCallback
from trainwright.checkpoint.store import CheckpointStore
from tests.gpu.cases import DETERMINISTIC, PRECISIONS, gpt2, trained
from tests.gpu.test_right import SAVES

class Kills(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 7:
            while CheckpointStore(args.output_dir).latest() is None:  # it is written while the run trains on
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

trained(Path(sys.argv[1]), gpt2(), callbacks=[Kills()], **PRECISIONS[sys.argv[2]], **DETERMINISTIC, **SAVES)
"""


@cases.precisions
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    precision: str, tmp_path: Path, record_property: Any, pytestconfig: pytest.Config
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "run"), precision]
    done = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=90)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    settings = PRECISIONS[precision] | DETERMINISTIC
    whole = trained(tmp_path / "whole", gpt2(), **settings)
    late = trained(tmp_path / "run", gpt2(), resume=True, **settings)
    record_property("weight_gap", gap(weights(whole), weights(late)))
    assert gap(weights(whole), weights(late)) == 0.0


def test_a_save_has_the_weights_of_its_step(tmp_path: Path, record_property: Any) -> None:
    """Files are written while the run trains on."""
    trained(tmp_path / "run", gpt2(), bf16=True, save_strategy="steps", save_steps=1, max_steps=6, **DETERMINISTIC)
    for step in (2, 5):
        short = trained(tmp_path / f"{step}", gpt2(), bf16=True, callbacks=[StopAt(step)], max_steps=6, **DETERMINISTIC)
        saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / f"checkpoint-{step}")
        states = {name: value.float() for name, value in saved.state_dict().items()}
        record_property(f"weight_gap_{step}", gap(states, weights(short)))
        assert gap(states, weights(short)) == 0.0


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self._step


@pytest.mark.parametrize("rounding", ["kahan", "kahan,moments=float32", "stochastic"])
def test_weights_in_bf16_learn_and_resume_to_the_bit(rounding: str, tmp_path: Path, record_property: Any) -> None:
    settings = {"optim": "adamw_bf16", "optim_args": f"rounding={rounding}"} | DETERMINISTIC
    wide = trained(tmp_path / "wide", gpt2(), bf16=True, **DETERMINISTIC)
    whole = trained(tmp_path / "whole", gpt2().bfloat16(), **settings, **SAVES)
    late = trained(tmp_path / "late", gpt2().bfloat16(), resume=str(tmp_path / "whole" / "checkpoint-8"), **settings)
    record_property("losses", [losses(wide), losses(whole)])
    record_property("weight_gap", gap(weights(whole), weights(late)))
    assert losses(whole) == pytest.approx(losses(wide), rel=2e-2)
    assert gap(weights(whole), weights(late)) == 0.0


# -- beside transformers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", ["plain", "accumulated"])
@cases.precisions
def test_weights_are_those_of_transformers(precision: str, feature: str, tmp_path: Path, record_property: Any) -> None:
    settings = PRECISIONS[precision] | FEATURES[feature] | DETERMINISTIC
    its = trained(tmp_path / "its", gpt2(), library="transformers", **settings)
    ours = trained(tmp_path / "ours", gpt2(), reproduce="transformers", **settings)
    record_property("weight_gap", gap(weights(its), weights(ours)))
    assert losses(its) == pytest.approx(losses(ours), rel=1e-6)
    assert gap(weights(its), weights(ours)) == 0.0


# -- guards ------------------------------------------------------------------------------------------------------------


class Poisoned(Trainer):
    """The loss of the eighth step is not a number."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * math.nan if self.state.global_step == 7 else loss


@cases.precisions
def test_a_bad_step_is_skipped(precision: str, tmp_path: Path) -> None:
    trainer = trained(tmp_path, gpt2(), cls=Poisoned, on_nonfinite="skip", **PRECISIONS[precision])
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())
    assert trainer.state.global_step == NUM_STEPS


@on_cuda
def test_a_batch_that_does_not_fit_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The device's own allocator refuses it."""
    with cases.little_memory(400_000_000):
        trainer = trained(tmp_path, gpt2(), auto_find_batch_size=True, per_device_train_batch_size=256, max_steps=3)
    assert "micro-batches are cut into 2 parts" in caplog.text
    assert trainer.state.global_step == 3


@on_cuda
def test_memory_is_let_go_with_the_trainer(tmp_path: Path, record_property: Any) -> None:
    trained(tmp_path / "warm", llama(), bf16=True, max_steps=2)
    gc.collect()
    before = torch.cuda.memory_allocated()
    trainer = trained(tmp_path / "run", llama(width=256), bf16=True, max_steps=2)
    held = torch.cuda.memory_allocated() - before
    del trainer
    gc.collect()
    record_property("left_bytes", torch.cuda.memory_allocated() - before)
    assert torch.cuda.memory_allocated() - before < held / 100


# -- waits -------------------------------------------------------------------------------------------------------------

FIRST = 8
LAST = NUM_STEPS
QUIET: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 4},
    "ledger": {"ledger": True},
    "chunked": {"loss_kernel": "chunked"},
}


class Watch(TrainerCallback):
    """Collects the warnings of waits between two steps."""

    def __init__(self) -> None:
        self.found: list[warnings.WarningMessage] = []
        self._recording: Any = None

    def after_step(self, step: int) -> None:
        if step == FIRST:
            self._recording = warnings.catch_warnings(record=True)
            self.found = self._recording.__enter__()
            warnings.simplefilter("always")
            if not cases.IS_REHEARSAL:
                torch.cuda.set_sync_debug_mode("warn")
        elif step == LAST - 1:
            if not cases.IS_REHEARSAL:
                torch.cuda.set_sync_debug_mode("default")
            self._recording.__exit__(None, None, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after_step(state.global_step)

    def waits(self) -> list[str]:
        # The switch of the mode tells of itself, at its first use.
        real = [
            one
            for one in self.found
            if "synchronizing" in str(one.message) and not one.filename.endswith("torch/cuda/__init__.py")
        ]
        return [f"{one.filename}:{one.lineno}" for one in real]


def by_hand(precision: str, after_step: Callable[[int], None]) -> None:
    model = llama().to(DEVICE).train()
    model.config.use_cache = False  # as both trainers set it; transformers looks for packed rows then, which waits
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, enabled=precision == "fp16")
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    loader = torch.utils.data.DataLoader(
        cases.Rows(), 8, collate_fn=transformers.default_data_collator, pin_memory=True
    )
    for step, batch in enumerate(loader, start=1):
        on_device = {name: value.to(DEVICE, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(DEVICE, dtype, enabled=precision != "fp32"):
            loss = model(**on_device).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after_step(step)
        if step == LAST:
            return


@on_cuda
@pytest.mark.parametrize("feature", QUIET)
@cases.precisions
def test_the_device_is_waited_for_as_rarely_as_by_hand(
    precision: str, feature: str, tmp_path: Path, record_property: Any
) -> None:
    """Between two logs."""
    hand = Watch()
    by_hand(precision, hand.after_step)
    ours = Watch()
    settings = PRECISIONS[precision] | QUIET[feature]
    accelerator = {"accelerator_config": {"non_blocking": True}}
    trained(tmp_path, llama(), callbacks=[ours], logging_strategy="no", **accelerator, **settings)
    record_property("hand", hand.waits())
    record_property("ours", ours.waits())
    assert len(ours.waits()) <= len(hand.waits()) * settings.get("gradient_accumulation_steps", 1)


# -- compilation and attention -----------------------------------------------------------------------------------------


@on_cuda
@pytest.mark.parametrize(
    "how",
    [
        {"torch_compile": "regional"},
        {"torch_compile": True},
        {"torch_compile": "regional", "torch_compile_mode": "reduce-overhead"},  # CUDA graphs
    ],
    ids=["regional", "whole", "graphs"],
)
def test_compiled_models_train_alike(how: dict[str, Any], tmp_path: Path, record_property: Any) -> None:
    plain = trained(tmp_path / "plain", llama(), bf16=True)
    compiled = trained(tmp_path / "compiled", llama(), bf16=True, **how)
    record_property("losses", [losses(plain), losses(compiled)])
    assert losses(compiled) == pytest.approx(losses(plain), rel=5e-3)


@on_cuda
def test_a_compiled_run_resumes_to_the_bit(tmp_path: Path, record_property: Any) -> None:
    settings = {"torch_compile": "regional", "bf16": True} | DETERMINISTIC
    whole = trained(tmp_path / "whole", gpt2(), **settings, **SAVES)
    late = trained(tmp_path / "late", gpt2(), resume=str(tmp_path / "whole" / "checkpoint-8"), **settings)
    record_property("weight_gap", gap(weights(whole), weights(late)))
    assert gap(weights(whole), weights(late)) == 0.0


PACKED: dict[str, Any] = {"packing": "best_fit", "packing_length": cases.LENGTH, "bf16": True}


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}], ids=["kept", "recomputed"])
def test_attention_by_document_waits_for_nothing(
    settings: dict[str, Any], tmp_path: Path, record_property: Any
) -> None:
    """Its ends of documents stay on the device, and no mask is made of the positions."""
    ours = Watch()
    quiet: dict[str, Any] = {"logging_strategy": "no", "accelerator_config": {"non_blocking": True}}
    rows = cases.Rows(is_ragged=True)
    trainer = trained(tmp_path, llama(), rows=rows, callbacks=[ours], **PACKED, **quiet, **settings)
    record_property("ours", ours.waits())
    assert trainer.model.config._attn_implementation == "sdpa_by_document"
    assert not ours.waits()


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("flex_attention", marks=on_cuda)])
def test_packed_rows_train_alike(attention: str, tmp_path: Path, record_property: Any) -> None:
    """In packed rows samples do not see each other, whatever computes attention; `sdpa` does it by document.

    The rows are long enough for flex attention, which has no kernel for fewer than 128 tokens where heads share keys.
    """
    rows = cases.Rows(is_ragged=True)
    positions = 3 * cases.LENGTH
    settings = PACKED | {"packing_length": positions}
    eager = trained(tmp_path / "eager", llama("eager", positions=positions), rows=rows, **settings)
    other = trained(tmp_path / "other", llama(attention, positions=positions), rows=rows, **settings)
    used = "sdpa_by_document" if attention == "sdpa" else attention
    assert other.model.config._attn_implementation == used
    record_property("losses", [losses(eager), losses(other)])
    assert losses(other) == pytest.approx(losses(eager), rel=5e-3)
