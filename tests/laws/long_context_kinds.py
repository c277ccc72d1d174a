"""Ways in which processes share sequences, layers and experts, for runs that are cut off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate import ParallelismConfig

CP = {"parallelism_config": ParallelismConfig(cp_size=2)}
SP = {"parallelism_config": ParallelismConfig(sp_size=2)}
EXPERTS = {"sizes": {"fsdp_size": 2, "ep_size": 2}}
LAYERS = {"sizes": {"tp_size": 2, "fsdp_size": 2}}
IN_PARTS = {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """DeepSpeed with a stage of ZeRO, and a batch that it checks."""
    return {"deepspeed": {"zero_optimization": {"stage": stage}, "train_batch_size": "auto", **more}}


@dataclass(frozen=True)
class Kind:
    """Settings of `trainer_of`, and with how many processes it runs."""

    settings: dict[str, Any]
    cell: str = "packed, 4"
    processes: int = 2


KINDS = {
    "cp": Kind(CP),
    "sp": Kind(SP),
    "cp + fsdp": Kind(CP | {"fsdp": True}),
    "cp + ep": Kind(CP | EXPERTS, "experts, packed, 4"),
    "sp + ep": Kind(SP | EXPERTS | IN_PARTS, "experts, packed, 4"),
    "ep": Kind(EXPERTS | IN_PARTS | {"replicas": 2}, "experts, packed, 4"),
    "cp + tp": Kind(CP | LAYERS, processes=4),
    "sp + tp": Kind(SP | LAYERS | IN_PARTS, processes=4),
    "tp": Kind(LAYERS | {"replicas": 2}, processes=4),
    "sp + zero 2": Kind(zero(2, sequence_parallel_size=2)),  # as DeepSpeed's own configuration asks for it
    "cp + zero 3": Kind(CP | zero(3)),
}
