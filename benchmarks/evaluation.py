"""Evaluation beside hand-written loops: large logits through metrics, streamed metrics, the loss alone.

    python benchmarks/evaluation.py [--small] [--transformers]

With metrics, each subject runs in a process of its own, in turns, so that its peak memory is its own; the floor
allocates one array and copies each batch into it. The loss alone (an MLP that takes half a millisecond for a batch, a
GPT-2 of two layers) is measured in one process, subjects in turn; the floor is a loop that adds up losses. Prints one
JSON line and a table.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

sys.path[:0] = [str(Path(__file__).parent)]

from harness import print_table  # noqa: E402

SUBJECTS = ("floor", "trainwright", "streamed", "transformers")
LOSS_BATCHES = {"mlp": 400, "gpt2": 40}


class PeakMemory(threading.Thread):
    """The highest resident memory of this process above where it started."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process()
        gc.collect()
        self._before = self._peak = self._process.memory_info().rss
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.002):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def finish(self) -> float:
        self._done.set()
        self.join()
        return (self._peak - self._before) / 1e6


def subject(name: str, *, batches: int, rows: int, width: int) -> dict[str, float]:
    """Runs one subject in this process: once to warm up, once for the record."""
    import torch
    from torch import nn

    torch.set_num_threads(1)

    class Wide(nn.Module):
        """Makes logits of `rows` x `width` by one addition: what is measured is what happens to them."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(width))

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            logits = x + self.bias
            return {"loss": nn.functional.cross_entropy(logits[:, :8], labels), "logits": logits}

    torch.manual_seed(0)
    data = [{"x": torch.randn(1), "labels": i % 8} for i in range(batches * rows)]
    run = _runner(name, Wide(), data, rows=rows, loss_only=False)
    for _ in range(2):
        watch = PeakMemory()
        watch.start()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        peak_mb = watch.finish()
    return {"seconds": seconds, "peak_mb": peak_mb}


def losses(kind: str, names: tuple[str, ...], *, batches: int, turns: int) -> dict[str, dict[str, float]]:
    """Evaluations that give only a loss, the subjects in turn."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Body(nn.Module):
        """A few layers and a small output."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
            )

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            logits = self.layers(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    rows = 32
    data: list[Any] = [{"x": torch.randn(64), "labels": i % 8} for i in range(batches * rows)]
    model: Any = Body()
    if kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        tokens = torch.randint(0, 512, (batches * rows, 64))
        data = [{"input_ids": row, "labels": row} for row in tokens]
    runs = {name: _runner(name, model, data, rows=rows, loss_only=True) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn > 1:  # the first two warm up
                seconds[name].append(time.perf_counter() - start)
    floor = seconds[names[0]]
    return {
        name: {
            "ratio": round(statistics.median(mine / its for mine, its in zip(ones, floor, strict=True)), 3),
            "seconds": round(statistics.median(ones), 4),
        }
        for name, ones in seconds.items()
    }


def _runner(name: str, model: Any, data: list[Any], *, rows: int, loss_only: bool) -> Any:
    import numpy as np

    def score(prediction: Any) -> dict[str, float]:
        predictions = prediction.predictions
        return {"mean": float(np.mean([row[0] for row in predictions[:: max(1, len(predictions) // 64)]]))}

    if name == "floor":
        return _floor(model, data, rows=rows, score=score, loss_only=loss_only)

    class Mean:
        def reset(self) -> None:
            self.total = 0.0
            self.num = 0

        def update(self, predictions: Any, references: Any) -> None:
            self.total += float(predictions[:, 0].sum())
            self.num += len(references)

        def compute(self) -> dict[str, float]:
            return {"mean": self.total / self.num}

    package: Any = importlib.import_module("transformers" if name == "transformers" else "trainwright")
    args = package.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_eval_batch_size=rows,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        log_level="error",
    )
    metrics: Any = None
    if not loss_only:
        metrics = Mean() if name == "streamed" else score
    trainer: Any = package.Trainer(model=model, args=args, eval_dataset=data, compute_metrics=metrics)
    return trainer.evaluate


def _floor(model: Any, data: Any, *, rows: int, score: Any, loss_only: bool) -> Any:
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, default_collate

    def run() -> Any:
        model.eval()
        losses = []
        first = 0
        predictions = None
        labels = np.empty(len(data), dtype=np.int64)
        with torch.no_grad():
            for batch in DataLoader(data, batch_size=rows, collate_fn=default_collate):
                outputs = model(**batch)
                losses.append(outputs["loss"])
                if loss_only:
                    continue
                if predictions is None:
                    predictions = np.empty((len(data), *outputs["logits"].shape[1:]), dtype=np.float32)
                last = first + len(batch["labels"])
                predictions[first:last] = outputs["logits"].numpy()
                labels[first:last] = batch["labels"].numpy()
                first = last
        loss = float(torch.stack(losses).mean())
        if loss_only:
            return loss
        return loss, score(type("Both", (), {"predictions": predictions, "label_ids": labels}))

    return run


def _apart(name: str, **sizes: int) -> dict[str, float]:
    """A subject in a fresh process."""
    options = [f"--{key}={value}" for key, value in sizes.items()]
    done = subprocess.run(
        [sys.executable, __file__, "--subject", name, *options], check=True, capture_output=True, text=True
    )
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _compare(names: tuple[str, ...], *, turns: int, **sizes: int) -> dict[str, dict[str, float]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(turns):
        for name in names:
            found[name].append(_apart(name, **sizes))
    floor = [one["seconds"] for one in found[names[0]]]
    return {
        name: {
            "ratio": round(statistics.median(o["seconds"] / f for o, f in zip(ones, floor, strict=True)), 3),
            "seconds": round(statistics.median(one["seconds"] for one in ones), 4),
            "peak_mb": round(statistics.median(one["peak_mb"] for one in ones), 1),
        }
        for name, ones in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="four batches of 2 MB, one turn")
    parser.add_argument("--only-losses", action="store_true", help="without the large logits")
    parser.add_argument("--transformers", action="store_true", help="with the original beside it")
    parser.add_argument("--subject", help="run one subject in this process and print its figures")
    for name in ("batches", "rows", "width"):
        parser.add_argument(f"--{name}", type=int)
    asked = parser.parse_args()
    if asked.subject:
        print(json.dumps(subject(asked.subject, batches=asked.batches, rows=asked.rows, width=asked.width)))
        return
    counts, width, turns = ((4,), 65_536, 1) if asked.small else ((8, 16, 32), 1_953_125, 3)
    names = SUBJECTS if asked.transformers else SUBJECTS[:-1]
    results: dict[str, Any] = {"batch_mb": round(8 * width * 4 / 1e6, 1)}
    for batches in () if asked.only_losses else counts:
        found = _compare(names, turns=turns, batches=batches, rows=8, width=width)
        for one in found.values():
            one["peak_of_logits"] = round(one["peak_mb"] / (batches * results["batch_mb"]), 2)
        results[f"metrics_{batches}_batches"] = found
    whose = ("floor", "trainwright", "transformers") if asked.transformers else ("floor", "trainwright")
    for kind, batches in LOSS_BATCHES.items():
        turns, batches = (1, 4) if asked.small else (9, batches)
        results[f"loss_of_{kind}"] = losses(kind, whose, batches=batches, turns=turns)
    print(json.dumps(results))
    rows = [["case", "subject", "ratio", "seconds", "peak MB", "of the logits"]]
    for case, found in results.items():
        for name, one in found.items() if isinstance(found, dict) else ():
            rows.append(
                [case, name, *(str(one.get(key, "")) for key in ("ratio", "seconds", "peak_mb", "peak_of_logits"))]
            )
    print_table(rows)


if __name__ == "__main__":
    main()
