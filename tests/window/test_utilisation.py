"""Model FLOPs utilisation: known devices by name, and a number only where it means something."""

import time

import pytest

from trainwright.engine.device_info import peak_of
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
    assert peak_of(name) == peak


def test_utilisation_is_the_share_of_the_peak() -> None:
    (value,) = utilisation(50e12, time.time() - 2.0, peak=100e12).values()
    assert value == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize(("flops", "peak"), [(0, 1e12), (1e12, None)])
def test_nothing_is_said_of_what_is_not_known(flops: float, peak: float | None) -> None:
    assert utilisation(flops, time.time() - 1.0, peak=peak) == {}
