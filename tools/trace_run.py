"""Shows which files and functions of Trainwright one step, one save and one resume run: `trace_run.py [WHAT ...]`.

A small model on a list dataset with the default arguments, on the CPU. The walks of CONTRIBUTING.md are taken from it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from torch import nn

import trainwright

SOURCE = Path(trainwright.__file__).parent
WARM_UP = 5
STEP = "step"
SAVE = "save"
RESUME = "resume"


class Trace:
    """Functions of Trainwright that were called while it was on, by file and in the order of their first calls."""

    def __init__(self) -> None:
        self.functions: dict[str, dict[str, int]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the calls within the context."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        """Starts recording."""
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Stops recording."""
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(str(SOURCE)):
            return
        calls = self.functions.setdefault(str(Path(path).relative_to(SOURCE)), {})
        calls[frame.f_code.co_qualname] = calls.get(frame.f_code.co_qualname, 0) + 1

    def print(self, title: str) -> None:
        """Prints the numbers, and each file with its functions."""
        num_functions = sum(map(len, self.functions.values()))
        print(f"{title}: {len(self.functions)} files, {num_functions} functions")
        for file, functions in self.functions.items():
            print(f"  {file}: {', '.join(functions)}")


class TraceSteps(trainwright.TrainerCallback):
    """Records a step from the end of the step before to its own end.

    Args:
        trace: what to record in.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts or stops recording."""
        if state.global_step == WARM_UP:
            self._trace.start()
        elif state.global_step == WARM_UP + 1:
            self._trace.stop()


class Line(nn.Module):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the loss and the outputs."""
        logits = self.layer(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def make_trainer(folder: str, callbacks: list[Any], *, steps: int) -> trainwright.Trainer:
    """Returns a trainer with the default arguments."""
    torch.manual_seed(0)
    rows = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(64)]
    args = trainwright.TrainingArguments(folder, max_steps=steps, report_to="none", disable_tqdm=True, use_cpu=True)
    return trainwright.Trainer(Line(), args, train_dataset=rows, callbacks=callbacks)


def trace_step(folder: str) -> Trace:
    """Returns the trace of one step."""
    trace = Trace()
    make_trainer(folder, [TraceSteps(trace)], steps=WARM_UP + 3).train()
    return trace


def trace_save(folder: str) -> Trace:
    """Returns the trace of one save."""
    trace = Trace()

    class Traced(trainwright.Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            with trace.recording():
                super()._save_checkpoint(model, trial)

    trainer = make_trainer(folder, [], steps=WARM_UP)
    trainer.__class__ = Traced
    trainer.train()
    return trace


def trace_resume(folder: str) -> Trace:
    """Returns the trace of a resume, from `train()` to its first step."""
    make_trainer(folder, [], steps=WARM_UP).train()
    trace = Trace()

    class Stop(trainwright.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trace.stop()

    trainer = make_trainer(folder, [Stop()], steps=WARM_UP + 1)
    with trace.recording():
        trainer.train(resume_from_checkpoint=True)
    return trace


def main() -> None:
    """Traces what the command line names; by default everything."""
    traced = {STEP: trace_step, SAVE: trace_save, RESUME: trace_resume}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", choices=[[], *traced], help="default: everything")
    for name in parser.parse_args().what or traced:
        with tempfile.TemporaryDirectory() as folder:
            trace = traced[name](folder)
        trace.print(name)


if __name__ == "__main__":
    main()
