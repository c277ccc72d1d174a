"""Orders of calls in several processes: `order_runs.py KIND...`. It tells what the test beside it judges.

For each kind of engine and each order: whether the weights are, to the bit, those of `train()` alone.
"""

import functools
import importlib.util
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig, LlamaConfig, LlamaForCausalLM

from tests._support.two_processes import tell
from trainwright import Trainer, TrainingArguments
from trainwright.run.internals import Internals

FOLDER = Path("runs")
ROWS = [{"input_ids": (row := [1 + (i * j) % 7 for j in range(8)]), "labels": row} for i in range(32)]
STEPS = 2
OURS = ("tied", "one_row", "adapter", "own_optimizer", "sizes")


def fsdp(**settings: Any) -> dict[str, Any]:
    return {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **settings}}


def zero(stage: int) -> dict[str, Any]:
    return {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage}}}


# By kind of engine: the arguments, or what else makes its trainer.
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": fsdp(),
    "fsdp, whole after forward": fsdp(reshard_after_forward=False),
    "fsdp, small units": fsdp(transformer_layer_cls_to_wrap=None, min_num_params=1),
    "fsdp, recomputed": fsdp(activation_checkpointing=True),
    "fsdp, sharded files": fsdp(state_dict_type="SHARDED_STATE_DICT"),
    "fsdp, bf16": {**fsdp(), "bf16": True},
    "fsdp, tied": {**fsdp(), "tied": True},
    "fsdp, one row": {**fsdp(), "one_row": True},
    "fsdp, adapter": {**fsdp(), "adapter": True},
    "fsdp, compiled": {**fsdp(), "torch_compile": True, "torch_compile_backend": "eager"},
    "fsdp, accumulating": {**fsdp(), "gradient_accumulation_steps": 2},
    "fsdp, own optimizer": {**fsdp(), "own_optimizer": True},
    "parts": {"sizes": {"fsdp_size": 2}},
    "cp": {"parallelism_config": lambda: ParallelismConfig(cp_size=2)},
    "cp + fsdp": {"parallelism_config": lambda: ParallelismConfig(cp_size=2), "fsdp": True},
    "tp": {"sizes": {"tp_size": 2}},
    "zero 1": zero(1),
    "zero 3": zero(3),
}


class OneRow(nn.Module):
    """Has parameters with a single row, of which one of two processes has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.hidden = nn.Linear(4, 1)
        self.scale = nn.Linear(1, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.scale(self.hidden(self.embed(input_ids))).squeeze(-1)
        return {"loss": (scores - labels.float()).square().mean(), "logits": scores}


def make_model(settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    if settings.get("one_row"):
        return OneRow()
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=100,
        tie_word_embeddings=bool(settings.get("tied")),
    )
    model: Any = LlamaForCausalLM(config)
    if "sizes" in settings:
        # Written here: `save_pretrained` writes in the main process alone where there is a process group already.
        path = FOLDER / f"whole_{os.environ['RANK']}"
        config.save_pretrained(path)
        save_file(model.state_dict(), path / "model.safetensors", metadata={"format": "pt"})
        return LlamaForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**settings["sizes"]))
    if settings.get("adapter"):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return model


def make_trainer(kind: str, place: Path) -> Trainer:
    settings = dict(KINDS[kind])
    ours = {name: settings.pop(name) for name in OURS if name in settings}
    if callable(settings.get("parallelism_config")):
        settings["parallelism_config"] = settings["parallelism_config"]()
    if "one_row" in ours:
        settings["fsdp_config"] = {}
    args = TrainingArguments(
        str(place),
        **{
            "max_steps": STEPS,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "logging_steps": 1,
            "learning_rate": 0.01,
            "optim": "adamw_torch",
            "per_device_train_batch_size": 2,
            "save_strategy": "no",
            **settings,
        },
    )
    model = make_model(ours)
    # No decay, as in the optimizer of `make_own_optimizer`, which trains the same.
    own = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    optimizer = own if "own_optimizer" in ours else None
    return Trainer(model, args, train_dataset=ROWS, eval_dataset=ROWS[:8], optimizers=(optimizer, None))


def read_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Reads all weights, with those below an adapter, which are frozen and of which an engine gathers nothing."""
    gathered = Internals(trainer).engine.whole_weights(trainer.model) or {}
    # All processes gather all tensors: the main process alone has been given some of them already.
    state = {name: in_one_piece(value) for name, value in trainer.model.state_dict().items()}
    return {name: value.detach().cpu().clone() for name, value in {**state, **gathered}.items()}


def in_one_piece(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


# -- orders ------------------------------------------------------------------------------------------------------------


def save(trainer: Trainer) -> None:
    trainer.save_model(str(FOLDER / "saved"))


def leave_at_once(trainer: Trainer) -> None:
    """Leaves a loop over the steps before its first update."""
    for _ in trainer.steps():
        break


def call_model(trainer: Trainer) -> None:
    """A forward pass of the user's own, between an evaluation and training."""
    trainer.evaluate()
    batch = {name: torch.tensor([row[name] for row in ROWS[:2]]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        trainer.model(**batch)


def make_optimizer_early(trainer: Trainer) -> None:
    call_model(trainer)
    trainer.create_optimizer()


def make_own_optimizer(trainer: Trainer) -> None:
    """From parameters as the user finds them after a forward pass of his own."""
    call_model(trainer)
    decays = set(trainer.get_decay_parameter_names(trainer.model))
    named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name in decays], "weight_decay": trainer.args.weight_decay},
        {"params": [p for name, p in named if name not in decays], "weight_decay": 0.0},
    ]
    trainer.optimizer = torch.optim.AdamW(groups, lr=0.01)


BEFORE: dict[str, Callable[[Trainer], object]] = {
    "evaluate": lambda trainer: trainer.evaluate(),
    "predict": lambda trainer: trainer.predict(ROWS[:4]),
    "save_model": save,
    "evaluate and save_model": lambda trainer: (trainer.evaluate(), save(trainer)),
    "check": lambda trainer: trainer.check(),
    "steps left early": leave_at_once,
    "a call of the model": call_model,
    "create_optimizer": make_optimizer_early,
    "an optimizer of the user's": make_own_optimizer,
}


def compare(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> Any:
    if one.keys() != other.keys():
        return f"names differ: {sorted(one.keys() ^ other.keys())[:4]}"
    return max((float((one[name] - other[name]).abs().max()) for name in one if one[name].numel()), default=0.0)


def run_order(kind: str, order: str) -> dict[str, torch.Tensor]:
    place = FOLDER / kind.replace(" ", "_") / order.replace(" ", "_")
    trainer = make_trainer(kind, place)
    if order in BEFORE:
        BEFORE[order](trainer)
    trainer.train()
    if order.startswith("twice"):
        if order == "twice, evaluate between":
            trainer.evaluate()
        trainer.train()
    return read_weights(trainer)


def compare_order(kind: str, order: str, once: Any) -> Any:
    return compare(once, run_order(kind, order))


def run_kind(kind: str) -> dict[str, Any]:
    start = read_weights(make_trainer(kind, FOLDER / "start"))
    once = run_order(kind, "train")
    told: dict[str, Any] = {"trained": compare(start, once)}
    for order in BEFORE:
        told[order] = attempt(functools.partial(compare_order, kind, order, once))
    told["twice"] = attempt(lambda: compare(run_order(kind, "twice"), run_order(kind, "twice, evaluate between")))
    return told


def attempt(measure: Callable[[], Any]) -> Any:
    try:
        return measure()
    except Exception as error:  # the same in all processes; the other orders are judged all the same
        return "".join(traceback.format_exception(error))[-1500:]


if __name__ == "__main__":
    logging.getLogger("trainwright").setLevel("ERROR")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    for chosen in sys.argv[1:]:
        if KINDS[chosen].get("deepspeed") and importlib.util.find_spec("deepspeed") is None:
            continue
        tell(**{chosen: attempt(functools.partial(run_kind, chosen))})
    tell(done=True)
