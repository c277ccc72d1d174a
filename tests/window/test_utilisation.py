"""Model FLOPs utilisation: known devices by name, and a number only where it means something."""

from types import SimpleNamespace

import pytest

from trainwright.distributed.device import find_peak
from trainwright.state.throughput import utilisation


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", 65e12),
        ("Some Device 1", None),
    ],
)
def test_the_peak_is_that_of_the_device_and_of_no_other(name: str, peak: float | None) -> None:
    assert find_peak(name) == peak


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.state.throughput.time", SimpleNamespace(time=lambda: 102.0))


def test_utilisation_is_the_share_of_the_peak() -> None:
    assert list(utilisation(50e12, 100.0, peak=100e12).values()) == [0.25]


@pytest.mark.parametrize(("flops", "peak"), [(0, 1e12), (1e12, None)])
def test_nothing_is_said_of_what_is_not_known(flops: float, peak: float | None) -> None:
    assert utilisation(flops, 101.0, peak=peak) == {}
