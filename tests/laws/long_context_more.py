"""Processes that share sequences: checkpoints, and with two of them what is refused. `long_context_more.py FOLDER`."""

import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tests._support.small import StopAt, models
from tests._support.two_processes import tell
from tests.laws.long_context import VOCAB, llama, outcome, packed, trainer_of
from tests.laws.long_context_kinds import KINDS
from tests.parity.sides import OURS

FOLDER = Path(sys.argv[1])
WORLD = int(os.environ["WORLD_SIZE"])
# (kind, the other kind of which it resumes a checkpoint)
PAIRS = {
    2: [
        ("cp", "sp"),
        ("sp", "cp + fsdp"),
        ("cp + fsdp", "cp"),
        ("cp + ep", "sp + ep"),
        ("sp + ep", "cp + ep"),
        ("sp + zero 2", "cp + zero 3"),
        ("cp + zero 3", "sp"),
        ("cp", "sp + zero 2"),
    ],
    4: [("cp + tp", "sp + tp"), ("sp + tp", "tp"), ("tp", "cp + tp")],
}[WORLD]
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "adam_epsilon": 1e-3}
SAVING = {"save_strategy": "steps", "save_steps": 2, **ADAM}


def made(name: str, folder: Path, **more: Any) -> Any:
    return trainer_of(KINDS[name].cell, folder, **KINDS[name].settings, **more)


def cut_off_and_resumed(*, zero: bool) -> None:
    """Two runs, of which one is cut off after two steps and resumed; and one that resumes what the other kind saved."""
    for name, kind in KINDS.items():
        if kind.processes != WORLD or name == "ep" or ("zero" in name) is not zero:
            continue
        tell(**{f"{name}: whole": outcome(made(name, FOLDER / f"whole {name}", **SAVING))})
        stopped = made(name, FOLDER / f"cut {name}", **SAVING)
        stopped.add_callback(StopAt(2))
        stopped.train()
        again = made(name, FOLDER / f"cut {name}", **SAVING)
        tell(**{f"{name}: resumed": outcome(again, resume_from_checkpoint=True)})
    for name, other in PAIRS:
        if ("zero" in name + other) is not zero:
            continue
        resumed = made(name, FOLDER / f"{name} from {other}", **ADAM)
        source = str(FOLDER / f"whole {other}" / "checkpoint-2")
        tell(**{f"{name}: from {other}": outcome(resumed, resume_from_checkpoint=source)})


class OwnLoss(nn.Module):
    """No model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.table(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def state_space() -> nn.Module:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)
    return transformers.MambaForCausalLM(config)


def with_pictures() -> list[dict[str, Any]]:
    return [{**row, "pixel_values": torch.zeros(3, 4, 4)} for row in packed()]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "module": (OwnLoss, "cp", {}),
    "classifier": (models.bert, "cp", {}),
    "encoder-decoder": (models.t5, "sp", {}),
    "state space": (state_space, "cp", {}),
    "heads": (lambda: llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=36), "sp", {}),
    "attentions": (lambda: llama("eager", output_attentions=True), "cp", {}),
    "pictures": (llama, "cp", {"remove_unused_columns": False, "train_dataset": with_pictures()}),
}


def refused() -> None:
    for name, (build, kind, settings) in REFUSED.items():
        data = settings.get("train_dataset", packed())
        more = {key: value for key, value in settings.items() if key != "train_dataset"}
        try:
            chosen = {"max_steps": 1, **KINDS[kind].settings, **more}
            OURS.make(build(), FOLDER / "no", chosen, train_dataset=data).train()
        except Exception as error:
            tell(**{f"refused: {name}": f"{type(error).__name__}: {error}"})


logging.getLogger("trainwright").setLevel("ERROR")
torch.manual_seed(0)
warnings.filterwarnings("ignore", "FSDP2-wrapped module")
cut_off_and_resumed(zero=False)
if WORLD == 2:
    refused()
if importlib.util.find_spec("deepspeed") is not None:
    cut_off_and_resumed(zero=True)  # last: ZeRO 3 changes how transformers loads models while its arguments are there
tell(done=True)
