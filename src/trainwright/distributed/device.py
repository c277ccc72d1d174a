"""Accelerators: the capabilities of each kind of device, and the calls to its module in torch.

This is the one file that names kinds of accelerators. The rest of the package asks its functions, which use
`torch.accelerator` and `torch.get_device_module`, so that a kind that this file has never heard of (a backend on
torch's PrivateUse1 key, for example) works by the same code. A kind that cannot do something is a row of `KINDS`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from trainwright.errors import ArgumentError

# Any: the modules of devices and their random states, which each backend brings along.


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Capabilities of a kind of device; the defaults apply to accelerators missing from the table."""

    is_accelerator: bool = True
    is_numbered: bool = True  # a machine may have several
    serves_data_parallel: bool = False  # torch's DataParallel drives several of them from one process
    has_streams: bool = True  # copies out of pinned memory overlap with the computation
    skips_in_optimizer: bool = True  # fused optimizers read `found_inf`, and skip the update if it is set
    runs_triton: bool = False
    captures_graphs: bool = False  # the compiler's mode "reduce-overhead" captures launches once and replays them
    attends_by_length: bool = False  # torch has a kernel for attention of different lengths, in 16 bits
    block_bytes: int = 1  # the allocator rounds up to multiples of it
    scheduler_resource: str | None = None  # name by which Ray counts them
    accelerate_scales: bool = False  # accelerate makes a gradient scaler for fp16 on it, and refuses fp16 elsewhere


KINDS = {
    "cpu": Kind(is_accelerator=False, is_numbered=False, has_streams=False, skips_in_optimizer=False),
    "cuda": Kind(
        serves_data_parallel=True,
        runs_triton=True,
        captures_graphs=True,
        attends_by_length=True,
        block_bytes=512,
        scheduler_resource="gpu",
        accelerate_scales=True,
    ),
    "mps": Kind(is_numbered=False, has_streams=False, skips_in_optimizer=False, accelerate_scales=True),
    "xpu": Kind(scheduler_resource="gpu", accelerate_scales=True),
    "npu": Kind(scheduler_resource="NPU", accelerate_scales=True),
    "hpu": Kind(scheduler_resource="HPU", accelerate_scales=True),
    "mlu": Kind(accelerate_scales=True),
    "musa": Kind(accelerate_scales=True),
    "sdaa": Kind(accelerate_scales=True),
    "meta": Kind(is_accelerator=False, is_numbered=False, has_streams=False, skips_in_optimizer=False),
}
OTHER = Kind()


def get_kind(device: torch.device | str) -> Kind:
    """Returns the capabilities of this kind of device; `device` may also be the name of a kind."""
    name = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    return KINDS.get(name, OTHER)


@functools.lru_cache(maxsize=1)
def accelerator() -> str | None:
    """Returns the kind of the accelerator of this machine, None without one; it is looked up once."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def find_module(kind: str) -> ModuleType | None:
    """Returns torch's module for a kind of device, such as `torch.cuda`; None if there is none."""
    with suppress(RuntimeError, AttributeError):
        module: ModuleType = torch.get_device_module(kind)
        return module
    return None


def _function(kind: str, *names: str) -> Callable[..., Any] | None:
    """Returns the first of these functions that the module of a kind has, or its submodules by dotted names."""
    module = find_module(kind)
    for name in names:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None


# -- the device of a process -------------------------------------------------------------------------------------------


def placed(kind: str | None, *, index: int) -> torch.device:
    """Returns the device of a kind with a number; that of a kind without numbers has none. None is the CPU."""
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, index) if get_kind(kind).is_numbered else torch.device(kind)


def make_current(device: torch.device) -> None:
    """Makes a device current in this process, if there can be several of its kind."""
    if device.type == accelerator() and get_kind(device).is_numbered:
        torch.accelerator.set_device_index(device)


def group_backend(kind: str) -> str:
    """Returns the backend of a process group between devices of a kind: torch's default, else gloo."""
    import torch.distributed as dist

    with suppress(ValueError, RuntimeError):
        return dist.get_default_backend_for_device(kind)
    return "gloo"


def refuse_missing() -> None:
    """Raises ArgumentError for a run that was meant for a TPU and would train on the CPU."""
    if os.environ.get("PJRT_DEVICE", "").upper() == "TPU":
        raise ArgumentError(
            "PJRT_DEVICE=TPU asks for a TPU, and torch finds no accelerator. A TPU is reached through a package that "
            "adds it to torch as a device of its own; torch_xla is not used, since it ends with torch 2.9 and this "
            "package needs 2.10. Install such a package, train on GPUs, or unset PJRT_DEVICE (or pass use_cpu=True) to "
            "train on the CPU."
        )


HIDING_ACCELERATORS = {"CUDA_VISIBLE_DEVICES": ""}  # variables with which a process finds none of CUDA's devices


def device_variables(name: str) -> dict[str, str]:
    """Returns the variables with which a new process finds this device alone: "cpu", or an accelerator by number."""
    device = torch.device(name)
    if not get_kind(device).is_accelerator:
        return dict(HIDING_ACCELERATORS)
    if device.type != "cuda":
        return {"ACCELERATE_TORCH_DEVICE": name}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = device.index or 0
    chosen = str(number) if not visible else visible.split(",")[number].strip()
    return {"CUDA_VISIBLE_DEVICES": chosen}


# Variables for deterministic kernels. CUDA, Ascend's runtime and the packages of attention read them when they start.
DETERMINISTIC_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "ASCEND_LAUNCH_BLOCKING": "1",
    "HCCL_DETERMINISTIC": "1",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}


def make_deterministic() -> None:
    """Makes the libraries of accelerators compute the same numbers each time, at the price of speed."""
    os.environ.update(DETERMINISTIC_VARIABLES)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def find_name(device: torch.device) -> str | None:
    """Returns the name of the product, such as "NVIDIA H100"; None if unknown."""
    ask = _function(device.type, "get_device_name")
    if ask is None or not get_kind(device).is_accelerator:
        return None
    return str(ask(device))


def ray_resources() -> dict[str, int]:
    """Returns the part of this machine's accelerators that one trial of Ray takes; {} without any that Ray counts."""
    kind = accelerator()
    name = None if kind is None else get_kind(kind).scheduler_resource
    return {} if name is None else {name: 1}


# -- random states -----------------------------------------------------------------------------------------------------


def is_in_use() -> bool:
    """Returns False while there is an accelerator that this process has not used yet; True without one."""
    kind = accelerator()
    is_initialized = None if kind is None else _function(kind, "is_initialized")
    return True if is_initialized is None else bool(is_initialized())


def random_states() -> dict[str, Any]:
    """Returns the states of the accelerator's generators by its kind, {} without one.

    One process without a group may use all devices of the machine and keeps a list of their states; with several
    processes, each keeps the state of its own device. The names are the same as in transformers' files.
    """
    kind = accelerator()
    if kind is None:
        return {}
    drives_all = torch.accelerator.device_count() > 1 and not torch.distributed.is_initialized()
    name = "get_rng_state_all" if drives_all else "get_rng_state"
    read = _function(kind, name, f"random.{name}")
    return {} if read is None else {kind: read()}


def set_random_states(states: dict[str, Any]) -> None:
    """Restores the states of `random_states`, or of a file with other entries too; missing devices are ignored."""
    kind = accelerator()
    if kind is None or kind not in states:
        return
    state = states[kind]
    if not isinstance(state, list):
        write = _function(kind, "set_rng_state", "random.set_rng_state")
        if write is not None:
            write(state)
        return
    write = _function(kind, "set_rng_state_all", "random.set_rng_state_all")
    if write is not None:
        write(state[: torch.accelerator.device_count()])


# -- memory ------------------------------------------------------------------------------------------------------------


def pins_memory(device: torch.device | str) -> bool:
    """Returns True if copies between pinned memory and a device run during its computation."""
    return get_kind(device).has_streams


def pins_memory_here() -> bool:
    """Returns True if the machine's accelerator takes copies from pinned memory."""
    kind = accelerator()
    return kind is not None and pins_memory(kind)


def empty_cache(device: torch.device) -> None:
    """Frees the memory of a device that torch holds without using it, and the graphs that torch keeps for MPS."""
    if not get_kind(device).is_accelerator:
        return
    for name in ("empty_cache", "graph_cache.empty_cache"):
        empty = _function(device.type, name)
        if empty is not None:
            empty()


def synchronize(device: torch.device) -> None:
    """Waits until everything that was begun on a device is done; nothing to wait for on the CPU."""
    if not get_kind(device).is_accelerator:
        return
    wait = _function(device.type, "synchronize")
    if wait is not None:
        wait()


def total_bytes(device: torch.device) -> int | None:
    """Returns the memory of a device; None for the CPU, and if unknown or shared with the host."""
    if not get_kind(device).is_accelerator:
        return None
    properties = _function(device.type, "get_device_properties")
    if properties is not None and hasattr(found := properties(device), "total_memory"):
        return int(found.total_memory)
    tell = _function(device.type, "mem_get_info")
    return None if tell is None else int(tell(device)[1])


def free_bytes(device: torch.device) -> int:
    """Returns the memory of a device that this process may take and has not; 0 for the CPU, and if unknown."""
    tell = _function(device.type, "mem_get_info") if get_kind(device).is_accelerator else None
    if tell is None:
        return 0
    free, total = tell(device)
    share = _function(device.type, "get_per_process_memory_fraction")
    held = _function(device.type, "memory_reserved")
    allowed = total if share is None or held is None else share(device) * total - held(device)
    return int(min(free, allowed))


class DelayedScalar:
    """A scalar of a device that the host reads later: its copy waits for nothing, and reading waits for the copy.

    Args:
        device: device of the scalar.
    """

    def __init__(self, device: torch.device) -> None:
        self._copy = torch.zeros((), pin_memory=pins_memory(device))
        self._event = torch.Event(device) if pins_memory(device) else None

    def send(self, value: torch.Tensor) -> None:
        """Begins to copy a scalar."""
        self._copy.copy_(value, non_blocking=self._event is not None)
        if self._event is not None:
            self._event.record()

    def read(self) -> float:
        """Returns the scalar that was sent last, once its copy is done."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.item()


class DeviceMemory:
    """Statistics of the accelerator's allocator, as the current device has them; all 0 without an accelerator."""

    def __init__(self) -> None:
        self._kind = accelerator()

    @property
    def is_known(self) -> bool:
        """True if there is an accelerator that reports the memory of its tensors."""
        return self._kind is not None and self._reader("memory_allocated", "current_allocated_memory") is not None

    def reset_peak(self) -> None:
        """The peak counts from now on."""
        reset = self._reader("reset_peak_memory_stats")
        if reset is not None:
            reset()

    def allocated_bytes(self) -> int:
        """Returns the bytes of the tensors on the device."""
        read = self._reader("memory_allocated", "current_allocated_memory")
        return 0 if read is None else int(read())

    def peak_bytes(self) -> int:
        """Returns the maximum number of bytes since `reset_peak`; the current number if there is no peak counter."""
        read = self._reader("max_memory_allocated")
        return self.allocated_bytes() if read is None else int(read())

    def _reader(self, *names: str) -> Callable[..., Any] | None:
        return None if self._kind is None else _function(self._kind, *names)


# -- formats and speed -------------------------------------------------------------------------------------------------

# Part of the device's name -> operations per second. The first that matches counts, so the longer name comes first.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}
AMPERE = (8, 0)  # compute capability


def supports_bf16(device: torch.device, *, emulated: bool = False) -> bool | None:
    """Returns True if a device computes in bf16; None if it cannot be asked.

    With `emulated`, also if it converts to fp32 and back.
    """
    if not get_kind(device).is_accelerator:
        return None
    ask = _function(device.type, "is_bf16_supported")
    if ask is None:
        return None
    return bool(ask(including_emulation=emulated) if device.type == "cuda" else ask())


def supports_tf32(device: torch.device) -> bool | None:
    """Returns True if a device has TF32, NVIDIA's since Ampere."""
    return torch.cuda.get_device_capability(device) >= AMPERE if device.type == "cuda" else False


def tf32_switches() -> list[tuple[Any, str]]:
    """Returns the settings of torch, as owners and names of attributes, that allow TF32."""
    return [(torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32")]


def peak_flops(device: torch.device) -> float | None:
    """Peak operations per second of a device; None if unknown."""
    name = find_name(device)
    return None if name is None else find_peak(name)


def find_peak(device_name: str) -> float | None:
    """Returns the peak of a device in bf16 operations per second, by its name; None: not in the table."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


def has_compiler(device: torch.device) -> bool:
    """Returns True if the compiler that torch.compile needs for a device is installed."""
    if get_kind(device).runs_triton:
        return importlib.util.find_spec("triton") is not None
    return shutil.which("g++") is not None


def runs_flash_attention(device: torch.device) -> bool:
    """Returns True if the package flash_attn is installed, and its kernels run on this device."""
    return get_kind(device).runs_triton and importlib.util.find_spec("flash_attn") is not None


def runs_cuda_kernels(device: torch.device) -> bool:
    """Returns True if kernels that a package brings for CUDA run on a device."""
    return device.type == "cuda"
