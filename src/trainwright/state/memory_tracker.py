"""Memory taken by the stages of a trainer (init, train, eval, test): host RAM by sampling, GPU by its allocator."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from trainwright.support.counterparts import Counterpart

if TYPE_CHECKING:
    import psutil

SAMPLE_EVERY_S = 0.01
END_LIMIT_S = 1.0

STAGES = {
    "__init__": "init",
    "train": "train",
    "_inner_training_loop": "train",
    "_finalize_training": "train",
    "evaluate": "eval",
    "predict": "test",
}


class AllocatorStatistics(Protocol):
    """Statistics of the allocator of a device."""

    @property
    def is_known(self) -> bool:
        """True if there is a device that has them."""

    def reset_peak(self) -> None:
        """The peak counts from now on."""

    def allocated_bytes(self) -> int:
        """Returns the bytes of the tensors on the device."""

    def peak_bytes(self) -> int:
        """Returns the most bytes since `reset_peak`."""


class TrainerMemoryTracker(Counterpart, original="transformers.trainer_utils"):
    """Adds `<stage>_mem_{cpu,gpu}_{alloc,peaked}_delta` in bytes to a stage's metrics.

    Only the outermost stage is measured: an evaluation inside of training belongs to training. The numbers of
    `__init__` go with the first stage after it.

    Args:
        skip_memory_metrics: do nothing at all.
        device_memory: statistics of the allocator of the device; None: only the host is measured.

    Attributes:
        stages: method of the trainer -> name of its stage.
        peak_monitoring: whether a stage is being measured.
        cpu_mem_used_peak: highest resident memory that the stage has had so far, in bytes.
    """

    stages = STAGES

    def __init__(self, skip_memory_metrics: bool = False, device_memory: AllocatorStatistics | None = None) -> None:
        self.skip_memory_metrics = skip_memory_metrics
        self._device = device_memory
        self.cur_stage: str | None = None
        self._reports: dict[str, dict[str, int]] = {}  # of stages that were ended, until they are added to metrics
        self._process: psutil.Process | None = None
        if not skip_memory_metrics:
            import psutil

            self._process = psutil.Process()
        self.peak_monitoring = False
        self.cpu_mem_used_peak = 0
        self._sampler: threading.Thread | None = None
        self._is_over: threading.Event | None = None  # set when a stage ends; a tracker at rest can be pickled
        self._before: dict[str, int] = {}

    def cpu_mem_used(self) -> int:
        """Returns the resident memory of this process, in bytes."""
        import psutil

        return int((self._process or psutil.Process()).memory_info().rss)

    def start(self, stage: str | None = None) -> None:
        """Starts a stage.

        Args:
            stage: its name; None for that of the calling method.
        """
        if self.skip_memory_metrics:
            return
        stage = self.derive_stage() if stage is None else stage
        if self.cur_stage not in (None, stage):
            return
        self.abandon()  # the same stage, begun before and never ended
        self.cur_stage = stage
        gc.collect()
        assert self._process is not None
        self._before = {"cpu": self._process.memory_info().rss}
        if self._device is not None and self._device.is_known:
            self._device.reset_peak()
            self._before["gpu"] = self._device.allocated_bytes()
        self.cpu_mem_used_peak = self._before["cpu"]
        self.peak_monitoring = True
        self._is_over = threading.Event()
        self._sampler = threading.Thread(target=self.peak_monitor_func, daemon=True)
        self._sampler.start()

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None, stage: str | None = None) -> None:
        """Ends a stage.

        Args:
            metrics: gets the report; None keeps that of "init" for the next stage.
            stage: its name; None for that of the calling method.
        """
        if self.skip_memory_metrics:
            return
        stage = self.derive_stage() if stage is None else stage
        self.stop(stage)
        if metrics is not None:
            self.update_metrics(stage, metrics)

    def derive_stage(self) -> str:
        """Returns the stage of the method that calls `start` or `stop_and_update_metrics`."""
        name = sys._getframe(2).f_code.co_name
        return self.stages.get(name, name)

    def stop(self, stage: str) -> None:
        """Ends a stage and keeps its report; no effect while another stage is measured.

        Args:
            stage: its name.
        """
        if self.cur_stage != stage or self._sampler is None:
            return
        self._reports[stage] = self._report(stage)
        self.cur_stage = None

    def update_metrics(self, stage: str, metrics: dict[str, Any]) -> None:
        """Adds the report of a stage that was ended, once; before it the report of the constructor, if it is new.

        Args:
            stage: its name.
            metrics: gets the numbers.
        """
        if stage in self._reports:
            metrics.update(self._reports.pop("init", {}))
            metrics.update(self._reports.pop(stage, {}))

    def peak_monitor_func(self) -> None:
        """Updates `cpu_mem_used_peak` while `peak_monitoring` is True; runs on a thread of its own."""
        is_over = self._is_over
        while is_over is not None and not is_over.wait(SAMPLE_EVERY_S):
            self.cpu_mem_used_peak = max(self.cpu_mem_used_peak, self.cpu_mem_used())

    @contextmanager
    def measuring(self, stage: str) -> Iterator[None]:
        """Starts a stage, and ends it if the context raises: an error leaves no thread behind."""
        self.start(stage)
        try:
            yield
        except BaseException:
            if self.cur_stage == stage:
                self.abandon()
            raise

    def abandon(self) -> None:
        """Ends a stage that failed, without a report; later stages are measured again."""
        self._end_monitoring()
        self.cur_stage = None

    def _end_monitoring(self) -> None:
        self.peak_monitoring = False
        if self._is_over is not None:
            self._is_over.set()
        self._is_over = None
        if self._sampler is not None:
            self._sampler.join(END_LIMIT_S)  # it can only be reading from the kernel, and changes nothing else
        self._sampler = None

    def _report(self, stage: str) -> dict[str, int]:
        assert self._process is not None
        self._end_monitoring()
        peak = max(self.cpu_mem_used_peak, self._process.memory_info().rss)
        gc.collect()
        now = self._process.memory_info().rss
        report = {
            f"{stage}_mem_cpu_alloc_delta": now - self._before["cpu"],
            f"{stage}_mem_cpu_peaked_delta": max(0, peak - now),
        }
        if stage == "init":
            report |= {f"before_init_mem_{kind}": size for kind, size in self._before.items()}
        if self._device is not None and "gpu" in self._before:
            allocated = self._device.allocated_bytes()
            report[f"{stage}_mem_gpu_alloc_delta"] = allocated - self._before["gpu"]
            report[f"{stage}_mem_gpu_peaked_delta"] = max(0, self._device.peak_bytes() - allocated)
        return report
