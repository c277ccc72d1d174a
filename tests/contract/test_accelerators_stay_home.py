"""Kinds of accelerators are named in `distributed/device.py` alone: neither in identifiers nor in strings elsewhere."""

import ast
import re
from pathlib import Path

import pytest

import trainwright

from .test_brands_stay_home import docstrings, texts

SOURCE = Path(trainwright.__file__).parent
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
    tree = ast.parse(source)
    skipped = docstrings(tree)
    return [
        (node.lineno, text)  # type: ignore[attr-defined]
        for node in ast.walk(tree)
        if id(node) not in skipped
        for text in texts(node)
        if KIND.search(without(text, allowed)) is not None
    ]


def without(text: str, allowed: frozenset[str]) -> str:
    for one in allowed:
        text = text.replace(one, "")
    return text


def files() -> list[str]:
    names = [path.relative_to(SOURCE).as_posix() for path in sorted(SOURCE.rglob("*.py"))]
    return [name for name in names if name != HOME]


@pytest.mark.parametrize("name", files())
def test_no_kind_is_named(name: str) -> None:
    assert kinds_in((SOURCE / name).read_text(), frozenset(ALLOWED.get(name, ()))) == []


def test_the_kinds_are_at_home() -> None:
    assert kinds_in((SOURCE / HOME).read_text())


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
