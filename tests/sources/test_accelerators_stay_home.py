"""Kinds of accelerators are named in `distributed/device.py` alone: neither in identifiers nor in strings elsewhere."""

import re

import pytest

from .parsed import files, text, words_in

HOME = "distributed/device.py"

KIND = re.compile(r"(?<![a-z])(cuda|mps|xpu|npu|hpu|mlu|musa|sdaa|mtia|tpu|rocm)(?![a-z])", re.IGNORECASE)

# Names of arguments, values and functions that the published surface asks for, rows of packages, and messages.
ALLOWED = {
    "__init__.py": {"integrations.tpu"},
    "compat/__init__.py": {"integrations.tpu"},
    "optim/optimizer_table.py": {
        "needs_cuda",
        "runs_cuda_kernels",
        " runs on CUDA devices only, and this run is on ",
        "adamw_torch_npu_fused",
        "torch_npu",
        "NpuFusedAdamW",
    },
    "config/deprecated.py": {"cuda_amp", "use_mps_device", "MPS is found by itself"},
    "config/enums.py": {"ADAMW_TORCH_NPU_FUSED", "adamw_torch_npu_fused", "TPU_METRICS_DEBUG", "tpu_metrics_debug"},
    "config/fields/own_fields.py": {"tpu_num_cores", "TPU cores"},
    "config/fields/shared_fields.py": {"no_cuda", "tpu_metrics_debug"},
    "config/rules/advice.py": {"tpu_metrics", "tpu_cores", "tpu_num_cores", "a TPU"},
    "distributed/world.py": {"TPU", "tpu"},  # ParallelMode.TPU
}


def kinds_in(source: str, allowed: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    return [(line, word) for line, word in words_in(source) if KIND.search(without(word, allowed)) is not None]


def without(word: str, allowed: frozenset[str]) -> str:
    for one in allowed:
        word = word.replace(one, "")
    return word


def test_no_kind_is_named() -> None:
    found = {
        name: kinds
        for name, path in files().items()
        if name != HOME and (kinds := kinds_in(text(path), frozenset(ALLOWED.get(name, ()))))
    }
    assert found == {}


def test_the_kinds_are_at_home() -> None:
    assert kinds_in(text(files()[HOME]))


@pytest.mark.parametrize(
    "source",
    [
        "if device.type == 'cuda': pass",
        "torch.cuda.synchronize()",
        "torch.backends.mps.is_available()",
        "from torch.xpu import Stream",
        "uses_cuda_graphs = 1",
        "x = f'{n} on NPU'",
        "f(hpu=True)",
    ],
)
def test_a_planted_kind_is_found(source: str) -> None:
    assert kinds_in(source)


@pytest.mark.parametrize(
    "source", ['"""On CUDA."""', "x = 1  # as cuda does", "inputs = steps = cudnn = input_ids = 0"]
)
def test_prose_and_lookalikes_are_left_alone(source: str) -> None:
    assert kinds_in(source) == []
