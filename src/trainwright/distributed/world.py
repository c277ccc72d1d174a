"""World: rank, sizes and device of this process. The only reader of the launchers' environment variables.

Nothing is started here; `process_group.py` starts the process group. The variables are set by torchrun,
`accelerate launch` and the MPI launchers set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trainwright.errors import ArgumentError

if TYPE_CHECKING:
    import torch

RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
WORLD_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
LOCAL_SIZE = (
    "LOCAL_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "LOCAL_SIZE",  # of DeepSpeed
)
CURE = "Start all processes with one launcher, such as torchrun, and unset variables that another launcher has set."
PARALLEL_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
# All variables that `World.detect` reads.
READ = (
    *RANK,
    *WORLD_SIZE,
    *LOCAL_RANK,
    *LOCAL_SIZE,
    "ACCELERATE_USE_CPU",
    "ACCELERATE_TORCH_DEVICE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_LOCALID",
)
TRUE_WORDS = ("1", "true", "t", "yes", "y", "on")
LAUNCHER_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MASTER_", "SLURM_STEP_", "SLURM_PROCID")


@contextmanager
def reading_launchers_variables() -> Iterator[None]:
    """Turns errors of packages about values of a launcher's variables into an ArgumentError that names all of these."""
    try:
        yield
    except ArgumentError:
        raise
    except (ValueError, KeyError, RuntimeError) as error:
        names = {*RANK, *WORLD_SIZE, *LOCAL_RANK, *LOCAL_SIZE}
        known = [name for name in sorted(os.environ) if name in names or name.startswith(LAUNCHER_PREFIXES)]
        given = [f"{name}={os.environ[name]!r}" for name in known]
        is_of_device = "start of device string" in str(error)
        if not given or (isinstance(error, RuntimeError) and not is_of_device):
            raise
        raise ArgumentError(
            f"The processes and devices of this run could not be set up: {error}. The environment says "
            f"{', '.join(given)}. {CURE}"
        ) from error


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a process that no launcher started; a precision that one has configured stays."""
    names = {*READ, *RANK, *WORLD_SIZE, *LOCAL_RANK, *LOCAL_SIZE}
    prefixes = (*LAUNCHER_PREFIXES, "TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_")
    kept = ("ACCELERATE_MIXED_PRECISION",)
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not (name in names or name.startswith(prefixes))
    }


class ParallelMode(Enum):
    """Cooperation of the devices of a run."""

    NOT_PARALLEL = "not_parallel"  # one device
    NOT_DISTRIBUTED = "not_distributed"  # several devices, one process
    DISTRIBUTED = "distributed"  # one process per device
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    TPU = "tpu"


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank, sizes and device of this process. The device is looked up when it is first asked for."""

    process_index: int = 0  # rank of this process
    local_process_index: int = 0  # rank of this process on its node
    world_size: int = 1  # number of processes
    local_world_size: int = 1  # number of processes on this node
    use_cpu: bool = False  # whether accelerators are left alone
    launched: bool = False  # whether a distributed launcher started this process, possibly as the only one
    device_name: str | None = None  # whatever the machine has; None: the first accelerator, or the CPU

    @classmethod
    def for_process(cls, *, use_cpu: bool = False) -> World:
        """Returns the result of `detect`, cached until the variables or the process group change."""
        variables = getattr(os.environ, "_data", None)  # os.environ raises and catches an error for each that is unset
        if variables is None:
            return cls.detect(use_cpu=use_cpu)
        return _detected(use_cpu, _process_group(), tuple(map(variables.get, _KEYS)))

    @classmethod
    def detect(cls, *, use_cpu: bool = False, environ: Mapping[str, str] | None = None) -> World:
        """Reads the launcher's variables if there is no process group yet; ArgumentError for contradictions."""
        env = os.environ if environ is None else environ
        slurm = read_slurm(env)
        env = {**slurm, **env} if slurm else env  # a copy of the environment takes longer than all look-ups
        rank, size = _process_group() or (_first(env, RANK, 0), _first(env, WORLD_SIZE, 1))
        local_rank = _first(env, LOCAL_RANK, -1)
        _check_ranks(rank, size, local_rank, _first(env, LOCAL_SIZE, 0))
        return cls(
            process_index=rank,
            local_process_index=max(local_rank, 0),
            world_size=size,
            local_world_size=_first(env, LOCAL_SIZE, 1),
            use_cpu=use_cpu or is_true(env.get("ACCELERATE_USE_CPU")),
            launched=size > 1 or local_rank >= 0,
            device_name=env.get("ACCELERATE_TORCH_DEVICE"),
        )

    def variables(self) -> dict[str, str]:
        """Environment variables that torch reads, for launchers that set others."""
        is_known = self.local_world_size > 1 or self.world_size == 1  # not every launcher sets it
        return {
            "RANK": str(self.process_index),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_process_index),
            **({"LOCAL_WORLD_SIZE": str(self.local_world_size)} if is_known else {}),
        }

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return max(1, self.world_size // max(1, self.local_world_size))

    @property
    def is_distributed(self) -> bool:
        """True if there is one process per device; for a single process, only with an accelerator."""
        return self.world_size > 1 or (self.launched and not self.use_cpu and _accelerator()[0] is not None)

    @property
    def device(self) -> torch.device:
        """Returns the device of this process; ArgumentError if the environment asks for a TPU."""
        import torch

        from trainwright.distributed import device

        kind, count = (None, 0) if self.use_cpu else _accelerator()
        if self.device_name is not None and not self.use_cpu:
            return torch.device(self.device_name)
        if kind is None and not self.use_cpu:
            device.refuse_missing()
        index = self.local_process_index % max(1, count) if self.launched else 0
        return device.placed(kind, index=index)

    @property
    def n_gpu(self) -> int:
        """Number of devices of this process: more than one only without a launcher; 0 on the CPU."""
        if self.use_cpu:
            return 0
        from trainwright.distributed.device import get_kind

        kind, count = _accelerator()
        if kind is not None and get_kind(kind).serves_data_parallel and not self.is_distributed:
            return count
        return 1 if kind is not None or self.is_distributed else 0

    @property
    def parallel_mode(self) -> ParallelMode:
        """Cooperation of the devices of this run."""
        return self.mode_with(self.n_gpu)

    def mode_with(self, num_devices: int) -> ParallelMode:
        """Parallel mode for a number of devices in this process, which may be fewer than it has."""
        if self.is_distributed:
            return ParallelMode.DISTRIBUTED
        return ParallelMode.NOT_DISTRIBUTED if num_devices > 1 else ParallelMode.NOT_PARALLEL


def configured_precision() -> str:
    """Mixed precision that `accelerate launch` was configured with: "no", "fp16", "bf16" or "fp8"."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def configured_backend() -> str | None:
    """Backend that `accelerate launch` was configured with: "fsdp", "deepspeed", or None."""
    chosen = (name for name in ("fsdp", "deepspeed") if is_true(os.environ.get(f"ACCELERATE_USE_{name.upper()}")))
    return next(chosen, None)


def configured_fsdp_version() -> int:
    """Version of FSDP that `accelerate launch` was configured with; 1 by default, as in accelerate."""
    return int(os.environ.get("FSDP_VERSION") or 1)


@reading_launchers_variables()
def configured_deepspeed() -> dict[str, Any] | str:  # Any: values of a JSON file
    """DeepSpeed configuration of `accelerate launch`: the path of a file, or the settings themselves."""
    env = os.environ
    if env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        return env["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
    zero: dict[str, object] = {"stage": int(env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))}
    for name in ("optimizer", "param"):
        prefix = f"ACCELERATE_DEEPSPEED_OFFLOAD_{name.upper()}"
        if (device := env.get(f"{prefix}_DEVICE", "none")) != "none":
            path = {"nvme_path": env.get(f"{prefix}_NVME_PATH", "none")} if device == "nvme" else {}
            zero[f"offload_{name}"] = {"device": device, **path}
    if is_true(env.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL")):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    clipping = env.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    return {
        "zero_optimization": zero,
        "gradient_clipping": clipping if clipping == "auto" else float(clipping),
        **{name: {"enabled": "auto"} for name in ("fp16", "bf16")},
    }


def runs_in_kubeflow() -> bool:
    """Returns True if the controller of a Kubeflow TrainJob started this process and takes its metrics."""
    is_off = os.environ.get("DISABLE_KUBEFLOW_INTEGRATION", "").upper() == "TRUE"
    return "KUBEFLOW_TRAINER_SERVER_URL" in os.environ and not is_off


@reading_launchers_variables()
def configured_parallelism() -> dict[str, int] | None:
    """Returns the sizes of the ParallelismConfig of `accelerate launch`; None without one."""
    if not is_true(os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        return None
    return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in PARALLEL_SIZES}


@reading_launchers_variables()
def read_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """Torch's variables for a task of `srun`; none for independent tasks, and where another launcher set its own."""
    needed = ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if not all(name in env for name in needed) or any(name in env for name in RANK):
        return {}
    tasks = int(env["SLURM_STEP_NUM_TASKS"])
    nodes = int(env.get("SLURM_STEP_NUM_NODES", "1"))
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(max(1, tasks // max(1, nodes))),
    }


def launcher_keeps_the_store() -> bool:
    """Returns True if torchrun hosts the store of the process group, and may restart processes with the same one."""
    return is_true(os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))


def is_true(word: str | None) -> bool:
    """Returns True if the value of an environment variable means true."""
    return word is not None and word.strip().lower() in TRUE_WORDS


def _check_ranks(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Raises ArgumentError if ranks and sizes contradict each other; `local_size` is 0 if unknown."""
    problems = []
    if rank >= size:
        problems.append(f"this is process {rank} (RANK, counted from 0) of {size} (WORLD_SIZE)")
    if local_size and local_rank >= local_size:
        problems.append(f"it is process {local_rank} (LOCAL_RANK) of {local_size} on its node (LOCAL_WORLD_SIZE)")
    if local_size > size:
        problems.append(f"the node has {local_size} processes (LOCAL_WORLD_SIZE) of {size} in all (WORLD_SIZE)")
    if problems:
        raise ArgumentError(f"The launcher's variables contradict each other: {'; '.join(problems)}. {CURE}")


def _first(env: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    """First number from zero up among the variables `names`."""
    return next((int(text) for name in names if (text := env.get(name, "")).isdecimal()), default)


_KEYS = tuple(os.environ.encodekey(name) for name in READ)


@lru_cache(maxsize=8)
def _detected(use_cpu: bool, group: tuple[int, int] | None, variables: tuple[object, ...]) -> World:
    """The world of this process, by all that it depends on."""
    return World.detect(use_cpu=use_cpu)


def _process_group() -> tuple[int, int] | None:
    """Returns rank and size of the existing process group; None without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


@lru_cache(maxsize=1)
def _accelerator() -> tuple[str | None, int]:
    """Type and number of the accelerators of this machine, asked once."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return (None, 0) if found is None else (found.type, torch.accelerator.device_count())


def barrier() -> None:
    """Waits for all processes of the process group, if there is one."""
    if _process_group() is not None:
        sys.modules["torch.distributed"].barrier()
