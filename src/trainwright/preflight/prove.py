"""Invariants that `prove()` tests on copies of the trainer, with the user's data and hooks, and its report.

New processes run this module, instead of the user's script, for the gradients of a step.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.utils.data import Subset

from trainwright._types import JSONObject, counted, has_length
from trainwright.callbacks.base import TrainerCallback
from trainwright.capability_table import BATCHING_FIELDS, OFF_IN_COPIES
from trainwright.config.fields import SETTINGS, get_value
from trainwright.config.protocol import Arguments
from trainwright.config.summary import differing as differing_arguments
from trainwright.distributed.device import HIDING_ACCELERATORS
from trainwright.errors import ModelError, ProcessFailedError
from trainwright.optim.factory import steps_in_backward
from trainwright.preflight.trainer_copy import AnyTrainer, left_as_it_was, make_copy
from trainwright.run import build
from trainwright.run.internals import Internals
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support.deadline import end_group
from trainwright.support.host import available_bytes
from trainwright.support.html_table import html_section, html_table
from trainwright.support.model_facts import num_bytes

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Proof of one law."""

    name: str
    law: str  # the law, as a sentence
    holds: bool | None  # None if it could not be tested
    evidence: str  # the observed gap, or why it could not be tested
    cure: str = ""  # the setting that makes it hold; empty if it holds

    def to_dict(self) -> JSONObject:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ProofReport:
    """Proofs for a model and its data."""

    proofs: tuple[Proof, ...]

    @property
    def holds(self) -> bool:
        """Returns True if every testable invariant holds."""
        return all(proof.holds is not False for proof in self.proofs)

    def of(self, name: str) -> Proof:
        return next(proof for proof in self.proofs if proof.name == name)

    def lines(self) -> Iterator[str]:
        """Yields the lines of the report for the console."""
        for word, law, evidence, cure in self._rows():
            yield f"{word:10}{law}: {evidence}"
            if cure:
                yield f"{'':10}-> {cure}"

    def _repr_html_(self) -> str:
        return html_section("Proofs", html_table(self._rows(), header=("", "law", "evidence", "what to change")))

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for proof in self.proofs:
            word = {True: "holds", False: "FAILS", None: "not tried"}[proof.holds]
            yield word, proof.law, proof.evidence, proof.cure

    def to_dict(self) -> JSONObject:
        """Returns plain values, for JSON."""
        return {"proofs": [proof.to_dict() for proof in self.proofs]}

    def __str__(self) -> str:
        return "\n".join(self.lines())


COPIES = 8  # copies of the weights: two models, gradients and states of one, and a checkpoint
WINDOW = 8  # samples of the step used to compare gradients
NUM_EVALUATED = 48
# Gaps due to another order of additions.
EXACT = 1e-4  # in fp32
ROUNDED = 3e-2  # in 16 bits

# Settings of a short run: nothing is logged, shown, evaluated or ended early.
SHORT: JSONObject = {
    "eval_strategy": "no",
    "eval_on_start": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "push_to_hub": False,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "disable_tqdm": True,
    "save_total_limit": None,
    "preflight": False,
    "max_train_time": None,
    "save_every": None,
    "resume_from_checkpoint": None,
    "cooldown": None,
    "report_to": [],
    "auto_find_batch_size": False,
    "save_only_model": False,
    "overwrite_output_dir": None,
    "hang_timeout": 0.0,
    "slurm_requeue": False,
    "dataloader_num_workers": 0,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None,
    "profile": None,
    **{name: SETTINGS[name].default for name in OFF_IN_COPIES},
}
# A fixed order of samples for all batch sizes: only then can two ways to split them be compared.
IN_ORDER: JSONObject = {
    "train_sampling_strategy": "sequential",
    **dict.fromkeys(BATCHING_FIELDS),
    "max_steps": 1,
    "max_grad_norm": 0.0,
    "warmup_steps": 0,
    "neftune_noise_alpha": None,
}


def prove(trainer: AnyTrainer, *, num_steps: int) -> ProofReport:
    """Tests every invariant; see `Trainer.prove`."""
    laws: tuple[tuple[str, str, Callable[[Any, int], tuple[bool, str, str]]], ...] = (
        ("resume", "a resumed run equals an uninterrupted one", resume),
        ("accumulation", "8 batches of 1 equal 2 batches of 4", accumulation),
        ("evaluation", "the evaluation loss does not depend on the batch size", evaluation),
        ("processes", "two processes equal one", processes),
    )
    with quietly(trainer):
        return ProofReport(tuple(_tried(trainer, num_steps, *law) for law in laws))


def _tried(trainer: AnyTrainer, num_steps: int, name: str, law: str, attempt: Callable[..., Any]) -> Proof:
    try:
        holds, evidence, cure = attempt(trainer, num_steps)
    except Exception as error:
        # A ModelError is a sentence of this module's, or of a check of the trainer.
        kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
        reason = f"{kind}{error}".splitlines()[0]
        return Proof(name=name, law=law, holds=None, evidence=reason)
    return Proof(name=name, law=law, holds=holds, evidence=evidence, cure="" if holds else cure)


@contextmanager
def quietly(trainer: AnyTrainer) -> Iterator[None]:
    """Silences the short runs; afterwards accelerate's state, one per process, is the trainer's again."""
    logger = logging.getLogger("trainwright")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with left_as_it_was(trainer.model):
            yield
    finally:
        logger.setLevel(level)
        if Internals(trainer).engine.trains_bare:
            build.make_engine(trainer.args)


def short_copy(
    trainer: AnyTrainer, folder: str, *, has_dropout: bool = True, parts: JSONObject | None = None, **settings: Any
) -> Any:
    """Returns a copy of the trainer with its own state and the seed of a fresh start; it writes into `folder`.

    `parts` are changed attributes, `settings` changed fields of the arguments. ModelError if memory is too short.
    """
    _check_alone(trainer)
    size = num_bytes(trainer.model) * COPIES
    if Internals(trainer).engine.device.type == "cpu" and size > available_bytes():
        raise ModelError(f"{COPIES} copies of the weights do not fit into memory")
    scheduler = None if trainer._created_lr_scheduler else trainer.lr_scheduler
    model, optimizer, scheduler = copy.deepcopy((trainer.model, trainer.optimizer, scheduler))
    settings = {"output_dir": folder, **SHORT, **settings}
    known = {name: value for name, value in settings.items() if hasattr(trainer.args, name)}
    copies = {"optimizer": optimizer, "lr_scheduler": scheduler, "_created_lr_scheduler": False, "model_init": None}
    tested = model if has_dropout else without_dropout(model)
    copied = make_copy(trainer, known, model=tested, **copies, **(parts or {}))
    copied.create_accelerator_and_postprocess()
    build.seed_everything(copied.args)
    return copied


def _check_alone(trainer: AnyTrainer) -> None:
    if not Internals(trainer).engine.trains_bare:
        raise ModelError(
            "it needs one process that holds the whole model; start without a launcher and without settings that share "
            "the model out or exchange its layers"
        )


def resume(trainer: AnyTrainer, num_steps: int) -> tuple[bool, str, str]:
    """Proves that a run stopped halfway and resumed ends with the weights of an uninterrupted one."""
    half = max(num_steps // 2, 1)
    length: JSONObject = {"max_steps": num_steps, "warmup_steps": min(trainer.args.warmup_steps, half)}
    saves: JSONObject = {"save_strategy": "steps", "save_steps": half, "save_async": False}
    with tempfile.TemporaryDirectory() as folder:
        whole = short_copy(trainer, folder, **length, **saves)
        whole.train()
        resumed = short_copy(trainer, folder, **length, **(saves | {"save_strategy": "no"}))
        resumed.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{half}"))
    names = differing(_weights(whole.model), _weights(resumed.model))
    if not names:
        return True, f"{counted(num_steps, 'step')}, stopped after {half}: every weight is bit for bit the same", ""
    largest = gap(_weights(whole.model), _weights(resumed.model))
    cure = (
        "Something outside the checkpoint has an effect: your own generator, or state in the model or dataset that "
        "state_dict() does not include. For random draws in samples, set seed_samples=True."
    )
    what = f"{counted(len(names), 'weight')} {'differs' if len(names) == 1 else 'differ'}"
    return False, f"{what} after {counted(num_steps, 'step')}, by {largest:.2g} relative to the largest value", cure


def _check_samples(trainer: AnyTrainer) -> None:
    if not has_length(trainer.train_dataset) or len(trainer.train_dataset) < WINDOW:
        raise ModelError(f"the training data have no {WINDOW} samples that can be taken in order")


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().float().cpu() for name, value in model.state_dict().items()}


def _gradients(trainer: AnyTrainer, **settings: Any) -> dict[str, torch.Tensor]:
    """Returns the gradients of a step over the first samples, in their order."""
    if steps_in_backward(trainer.args):
        raise ModelError(f"optim={trainer.args.optim!r} uses gradients up during the backward pass")
    _check_samples(trainer)
    keeper = GradientCapture()
    with tempfile.TemporaryDirectory() as folder:
        copied = short_copy(trainer, folder, has_dropout=False, **IN_ORDER, **settings)
        copied.callback_handler.add_callback(keeper)
        copied.train()
    return keeper.gradients


def accumulation(trainer: AnyTrainer, num_steps: int) -> tuple[bool, str, str]:
    """Proves that the gradients of a window do not depend on how it is cut into micro-batches."""

    def both(**more: Any) -> tuple[Tensors, Tensors]:
        one = _gradients(trainer, per_device_train_batch_size=1, gradient_accumulation_steps=WINDOW, **more)
        return one, _gradients(trainer, per_device_train_batch_size=4, gradient_accumulation_steps=2, **more)

    seen = gap(*both())
    allowed = allowed_gap(trainer)
    evidence = f"the gradients of {WINDOW} samples differ by {seen:.2g} relative to the largest one"
    if seen <= allowed:
        return True, evidence, ""
    if get_value(trainer.args, "loss_weighting") != "items":
        cured = gap(*both(loss_weighting="items"))
        if cured <= allowed:
            return False, evidence, f"With loss_weighting='items', they differ by {cured:.2g}."
    if any(isinstance(module, BATCH_NORMS) for module in trainer.model.modules()):
        return False, evidence, "Batch normalisation sees micro-batches; use GroupNorm, or freeze its statistics."
    cure = (
        "The loss of a sample depends on the other samples in its batch: check padding without an attention_mask, "
        "and losses that are neither a sum over num_items_in_batch nor a mean over label items."
    )
    return False, evidence, cure


def allowed_gap(trainer: AnyTrainer) -> float:
    """Returns the gap that rounding may cause, relative to the largest value."""
    halves = any(p.dtype in (torch.float16, torch.bfloat16) for p in trainer.model.parameters())
    return ROUNDED if halves or trainer.args.mixed_precision != "no" else EXACT


def evaluation(trainer: AnyTrainer, num_steps: int) -> tuple[bool, str, str]:
    """Proves that the loss of an evaluation does not depend on the batch size."""
    data = trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset
    data = next(iter(data.values())) if isinstance(data, dict) else data
    if not has_length(data):
        raise ModelError("the evaluation data have no length")
    indices = range(min(len(data), NUM_EVALUATED))
    data = data.select(indices) if hasattr(data, "select") else Subset(data, indices)
    losses = []
    for size in (8, 3):
        with tempfile.TemporaryDirectory() as folder:
            parts = {"compute_metrics": None, "eval_dataset": data}
            copied = short_copy(trainer, folder, parts=parts, per_device_eval_batch_size=size)
            losses.append(copied.evaluate()["eval_loss"])
    seen = abs(losses[0] - losses[1]) / max(abs(losses[0]), 1e-12)
    evidence = f"{losses[0]:.6g} in batches of 8, {losses[1]:.6g} in batches of 3"
    cure = (
        "The loss is not a mean over the items of a batch, or a sample's loss depends on its neighbours: check padding "
        "without an attention_mask, and sums in the loss."
    )
    return seen <= allowed_gap(trainer), evidence, cure


def processes(trainer: AnyTrainer, num_steps: int) -> tuple[bool, str, str]:
    """Proves that two processes compute the same gradients as one, for the same samples."""
    alone: JSONObject = {"per_device_train_batch_size": WINDOW, "gradient_accumulation_steps": 1}
    together = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    if trainer.optimizer is not None and not trainer._created_lr_scheduler:
        raise ModelError("optimizers=(...) holds parameters of this process; pass optimizer_cls_and_kwargs instead")
    if (reason := getattr(trainer, "reason_for_one_process", None)) is not None:
        raise ModelError(reason)
    recipe = _recipe(trainer, together)
    _check_can_be_sent(recipe)
    try:
        two = get_gradients(recipe, num_processes=2)
        if Internals(trainer).engine.device.type == "cpu":
            one = _gradients(trainer, bf16=False, fp16=False, **alone)
        else:
            one = get_gradients(_recipe(trainer, alone), num_processes=1)
    except Exception as error:
        raise ModelError(
            f"it could not be made anew in another process ({error}). Classes and functions must be in a module that "
            "can be imported, not in the script itself"
        ) from error
    seen = gap(one, two)
    evidence = f"the gradients of {WINDOW} samples differ by {seen:.2g} relative to the largest one"
    cure = (
        "A loss that is a mean over label items needs average_tokens_across_devices=True and a model that takes "
        "num_items_in_batch, or loss_weighting='items'; batch normalisation needs SyncBatchNorm."
    )
    return seen <= EXACT, evidence, cure


def _recipe(trainer: AnyTrainer, sizes: JSONObject) -> JSONObject:
    """Returns the recipe from which another process makes this trainer, on the CPU, for a short run."""
    _check_alone(trainer)
    _check_samples(trainer)
    settings = SHORT | IN_ORDER | sizes | {"use_cpu": True, "bf16": False, "fp16": False, "log_level": "error"}
    known = {name: value for name, value in settings.items() if hasattr(trainer.args, name)}
    names = ("train_dataset", "data_collator", "processing_class", "compute_loss_func", "optimizer_cls_and_kwargs")
    model = without_dropout(copy.deepcopy(trainer.model).cpu())
    return {
        "trainer": type(trainer),
        "arguments": type(trainer.args),
        "settings": {**differing_arguments(trainer.args), **known, "report_to": "none"},
        "parts": {"model": model, **{name: getattr(trainer, name) for name in names}},
    }


def _check_can_be_sent(recipe: JSONObject) -> None:
    """Raises ModelError for a part of a recipe that cannot be pickled."""
    for name, part in ({"the class of the trainer": recipe["trainer"]} | recipe["parts"]).items():
        try:
            pickle.dumps(part)
        # whatever the user's class raises
        except Exception as error:
            raise ModelError(
                f"{name} cannot be sent to another process ({error}). Take lambdas, and functions and classes that "
                "are made inside of a function, out of it: define them at the top level of a module"
            ) from error


# -- gradients of a step, also in other processes
# -----------------------------------------------------------------------

Tensors = Mapping[str, torch.Tensor]


class GradientCapture(TrainerCallback):
    """Keeps the gradients of the first step, as passed to the optimizer."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        model = kwargs["model"]
        if not self.gradients and isinstance(model, nn.Module):
            named = model.named_parameters()
            self.gradients = {name: p.grad.detach().float().cpu() for name, p in named if p.grad is not None}


def gap(one: Tensors, other: Tensors) -> float:
    """Returns the largest difference relative to the largest value; infinity if the names differ."""
    if one.keys() != other.keys() or not one:
        return float("inf")
    largest = max(float(value.abs().max()) for value in one.values() if value.numel())
    difference = max(float((value - other[name]).abs().max()) for name, value in one.items() if value.numel())
    return difference / largest if largest > 0 else difference


def differing(one: Tensors, other: Tensors) -> list[str]:
    """Returns the names of tensors that are not bit-identical."""
    return [name for name in one if name not in other or not torch.equal(one[name], other[name])]


def without_dropout(model: nn.Module) -> nn.Module:
    """Sets all dropout of a model to 0 in place, since its draws depend on the split into batches."""
    for module, name in _dropout_rates(model):
        setattr(module, name, 0.0)
    return model


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[None]:
    """Turns off a model's dropout within the context."""
    rates = [(module, name, getattr(module, name)) for module, name in _dropout_rates(model)]
    without_dropout(model)
    try:
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)


def _dropout_rates(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
            if is_rate and isinstance(value, float):
                yield module, name


TIMEOUT_S = 180.0
GRADIENTS = "gradients.safetensors"
RECIPE = "recipe.pickle"


def get_gradients(recipe: JSONObject, *, num_processes: int, timeout_s: float = TIMEOUT_S) -> dict[str, torch.Tensor]:
    """Returns the gradients of the first step of a trainer made from a recipe in several processes.

    In the recipe, "trainer" and "arguments" are classes, "settings" and "parts" their arguments. Raises
    ProcessFailedError if a process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Held by this process, as in torchrun: a free port that is only looked up may be taken before it is used.
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            "localhost", 0, is_master=True, wait_for_workers=False
        )
        (Path(folder) / RECIPE).write_bytes(pickle.dumps(recipe))
        processes = [_start(rank, num_processes, store.port, folder) for rank in range(num_processes)]
        end = time.monotonic() + timeout_s
        try:
            for process in processes:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                end_group(process)
        for rank, process in enumerate(processes):
            if process.returncode != 0:
                lines = (Path(folder) / f"{rank}.log").read_text(errors="replace").strip().splitlines()
                raise ProcessFailedError(lines[-1] if lines else f"process {rank} ended with {process.returncode}")
        return safetensors.torch.load_file(Path(folder) / GRADIENTS)


def _start(rank: int, num_processes: int, port: int, folder: str) -> subprocess.Popen[bytes]:
    world = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_processes,
        "LOCAL_WORLD_SIZE": num_processes,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": 1,
        **HIDING_ACCELERATORS,
    }
    env = {**os.environ, **{name: str(value) for name, value in world.items()}}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    with open(Path(folder) / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "trainwright.preflight.prove", folder],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )


def main() -> None:
    """Trains one step from the recipe in a folder, as one of several processes; rank 0 writes the gradients."""
    folder = Path(sys.argv[1])
    # Written by the parent process into a directory that only this user can write to.
    recipe: JSONObject = pickle.loads((folder / RECIPE).read_bytes())
    keeper = GradientCapture()
    args = recipe["arguments"](**{**recipe["settings"], "output_dir": str(folder / "run")})
    trainer = recipe["trainer"](args=args, callbacks=[keeper], **recipe["parts"])
    trainer.train()
    if os.environ["RANK"] == "0":
        safetensors.torch.save_file({n: g.contiguous() for n, g in keeper.gradients.items()}, folder / GRADIENTS)
    trainer.end()


if __name__ == "__main__":
    main()
