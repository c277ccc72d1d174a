"""The most bytes of tensors in a step of each of several processes, its collectives, the bytes of its checkpoint."""

import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from tests._support.small import make_trainer
from tests._support.two_processes import tell
from tests.preflight.memory_cases import CASES
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright import TrainerCallback

FOLDER = Path(sys.argv[1])
TABLE: dict[str, tuple[str, dict[str, Any]]] = json.loads(sys.argv[2])  # name -> case, settings
STEP = 3  # the first whose steps before have made all that stays


class Meter(TorchDispatchMode):
    """Knows every storage from the operation that made it; after each operation it adds up those that still live.

    Also those that only torch's C++ holds, such as the buckets of DDP, and those that another thread lets go of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.highest = 0
        self.calls: dict[str, int] = {}
        self._storages: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._storages.get(id(storage))
        if known is None or known() is None:  # another may have had its place
            self._storages[id(storage)] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # comes again with the part of this process
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":  # DeepSpeed notes shapes so
                self.add(tensor)
        if self.is_on:
            self._look(func.name())
        return result

    def _look(self, name: str) -> None:
        alive = {key: storage for key, ref in self._storages.items() if (storage := ref()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        self.highest = max(self.highest, sum(storage.nbytes() for storage in alive.values()))
        if name.startswith(("c10d::", "_c10d_functional::")):
            self.calls[name] = self.calls.get(name, 0) + 1


class Marks(TrainerCallback):
    """Turns the meter on for one step, from the end of the one before."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gc.collect()  # what only cycles hold goes when Python likes
        self._meter.is_on = state.global_step == STEP - 1


for number, (name, (case_name, settings)) in enumerate(TABLE.items()):
    case = CASES[case_name]
    folder = FOLDER / str(number)
    gc.collect()
    rows = case.data() * 16  # data are no part of a step
    with Meter() as meter:
        torch.manual_seed(0)
        chosen = {"per_device_train_batch_size": 8, "max_steps": STEP + 1, "logging_steps": 10, "save_strategy": "no"}
        if sequences := settings.pop("sequences", None):
            settings["parallelism_config"] = ParallelismConfig(**sequences)
        chosen |= {"hang_timeout": 120, "save_async": False, **case.settings, **settings}
        trainer = make_trainer(
            folder,
            model=case.model(),
            train_dataset=rows,
            preflight=False,
            callbacks=[Marks(meter)],
            **chosen,
        )
        trainer.train()
    found: dict[str, Any] = {"peak": meter.highest, "calls": meter.calls}
    trainer._save_checkpoint(trainer.model, None)
    if os.environ["RANK"] == "0":
        [saved] = folder.glob("checkpoint-*")
        files = [path for path in saved.rglob("*") if path.suffix in (".safetensors", ".pt", ".distcp", ".bin")]
        found["saved"] = sum(path.stat().st_size for path in files if "rng" not in path.name)
    tell(**{name: found})
