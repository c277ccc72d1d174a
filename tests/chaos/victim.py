"""A training run to be killed: OUTPUT_DIR WEIGHTS SAVE_STEPS [PLACE COUNT [behind]].

Resumes where there is a checkpoint. With a PLACE the process ends there, as by SIGKILL, when it comes by for the
COUNT-th time; "anywhere" counts all places of a save. "crash at PLACE" is a segmentation fault there, "hold at PLACE" a
thread that keeps the interpreter to itself for seconds. With "behind" checkpoints are written in the background; with
"all" too, and the run packs a stream in workers, accumulates, evaluates, rotates and loads the best model. With
"everything" it has workers, a ledger, an average, two evaluation sets, evaluations beside training, live control and a
mirror too, and writes what it recorded beside its weights. With a URL in its place checkpoints are copied there, and
the calls of the store are places too ("put" alone counts only these). Nobody outside of this script knows of it: places
are overridden hooks and patched calls of the system.

Run as a script it is a nursery: it imports everything once, and forks a run for each line of JSON on its input, whose
process id it answers. To an empty line it answers with the exit status of that run (negative: killed by that signal).
Each run leads a process group of its own, with its workers, and ends with all stacks in its log if it hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import accelerate  # noqa: F401 -- what a run loads when it begins, so that its children have it
import safetensors.torch
import torch
import transformers.data.data_collator
import transformers.optimization
from torch import nn
from torch.utils.data import IterableDataset

from trainwright import Trainer, TrainingArguments
from trainwright._types import is_url
from trainwright.capabilities.mirror import remote
from trainwright.checkpoint import weights
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore

NUM_SAMPLES = 40
FEATURES = 6
NUM_STEPS = 20
HANGS_S = 150
HELD_S = 4  # longer than the turns of our threads


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def end() -> None:
    """Ends the process as SIGKILL does."""
    os._exit(137)


def crash() -> None:
    """A segmentation fault in another thread, as in a library's."""
    thread = threading.Thread(target=ctypes.string_at, args=(0,))
    thread.start()
    thread.join()


def hold_the_lock() -> None:
    """Another thread keeps the interpreter to itself for seconds."""
    thread = threading.Thread(target=ctypes.PyDLL(None).sleep, args=(HELD_S,))
    thread.start()
    thread.join()


STRIKES: dict[str, Callable[[], None]] = {"": end, "crash": crash, "hold": hold_the_lock}


class Countdown:
    def __init__(self, place: str, count: int) -> None:
        strike, _, self.place = place.rpartition(" at ")
        self.strike = STRIKES[strike]
        self.count = count

    def at(self, place: str) -> None:
        is_meant = self.place in place if self.place == "put" else self.place == "anywhere"
        if place == self.place or (is_meant and "training_step" not in place):
            self.count -= 1
            if self.count == 0:
                self.strike()


def mortal(countdown: Countdown, name: str) -> Callable[..., Any]:
    """A hook that may be the last thing that happens, before or after it did its work."""

    def hook(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        countdown.at(f"before {name}")
        result = getattr(Trainer, name)(self, *args, **kwargs)
        countdown.at(f"after {name}")
        return result

    return hook


HOOKS = ("_save_checkpoint", "_save", "_save_optimizer_and_scheduler", "_save_rng_state", "training_step")


def doomed(countdown: Countdown) -> type[Trainer]:
    return type("Doomed", (Trainer,), {name: mortal(countdown, name) for name in HOOKS})


def patch_the_system(countdown: Countdown) -> None:
    def around(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            countdown.at(f"before {label}")
            result = original(*args, **kwargs)
            countdown.at(f"after {label}")
            return result

        setattr(owner, name, call)

    around(Path, "rename", "rename")
    around(os, "fsync", "fsync")
    around(shutil, "rmtree", "rmtree")
    around(os, "unlink", "unlink")
    around(Manifest, "write", "manifest")
    around(torch, "save", "torch.save")
    around(weights, "save_weights", "weights")


class DoomedClient:
    """A client of a store whose process may end before or after each call that changes something."""

    def __init__(self, client: Any, countdown: Countdown) -> None:
        self._client = client
        self._countdown = countdown

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name not in ("pipe_file", "open", "send_file", "rm_file", "rm"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._countdown.at(f"before put: {name}")
            result = found(*args, **kwargs)
            self._countdown.at(f"after put: {name}")
            return result

        return call


def patch_the_store(countdown: Countdown) -> None:
    def doomed(connect: Callable[[str], tuple[Any, str]]) -> Callable[[str], tuple[Any, str]]:
        def doomed_client(url: str) -> tuple[Any, str]:
            client, root = connect(url)
            return DoomedClient(client, countdown), root

        return doomed_client

    remote._open = doomed(remote._open)
    remote._open_apart = doomed(remote._open_apart)


def save_over(folder: str, word: str, place: str, count: str) -> None:
    """Saves the last step once more, with other content."""
    patch_the_system(Countdown(place, int(count)))
    store = CheckpointStore(folder)
    staging = store.stage(NUM_STEPS)
    (staging / "trainer_state.json").write_text(json.dumps({"word": word}))
    store.commit(staging, Manifest(step=NUM_STEPS, run_id=word))


class Stream(IterableDataset[dict[str, Any]]):
    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.samples)


ALL_FEATURES: dict[str, Any] = {
    "num_train_epochs": 3,
    "max_steps": NUM_STEPS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 2,
    "packing": "best_fit",
    "packing_length": 16,
    "save_async": True,
    "eval_strategy": "steps",
    "load_best_model_at_end": True,
}


EVERYTHING: dict[str, Any] = {
    "max_steps": NUM_STEPS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 2,
    "save_async": True,
    "eval_strategy": "steps",
    "eval_async": True,
    "average": {"kind": "ema", "decay": 0.9},
    "metric_for_best_model": "first_loss",
    "load_best_model_at_end": True,
    "ledger": True,
    "live_control": True,
}
CLOCKS = ("_runtime", "_per_second")


def records_of(trainer: Trainer) -> dict[str, Any]:
    """What a run recorded, without what clocks say, in the order of steps."""
    import pyarrow.parquet

    entries = [entry for entry in trainer.state.log_history if "train_loss" not in entry]
    timeless = [{key: entry[key] for key in sorted(entry) if not key.endswith(CLOCKS)} for entry in entries]
    folder = Path(trainer.args.output_dir)
    ledger = pyarrow.parquet.read_table(folder / "ledger.parquet").to_pylist()
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    evaluated = [(entry["step"], key) for entry in journal for key in entry.get("logs", entry) if key.endswith("_loss")]
    return {
        "log": sorted(timeless, key=lambda entry: (entry["step"], *entry)),
        "best": [trainer.state.best_global_step, trainer.state.best_metric],
        "ledger": sorted(ledger, key=lambda row: row["sample"]),
        "evaluated": sorted(set(evaluated)),
    }


def features_of(how: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """Model, datasets and settings of a run."""
    if is_url(how):
        model, datasets, settings = features_of("behind")
        return model, datasets, settings | {"checkpoint_mirror": how, "mirror_total_limit": 2}
    if how == "everything":
        model, datasets, settings = features_of("behind")
        rows = datasets["train_dataset"]
        return (
            model,
            datasets | {"eval_dataset": {"first": rows[:9], "last": rows[-7:]}},
            EVERYTHING | {"checkpoint_mirror": f"file://{os.getcwd()}/copies"},
        )
    if how != "all":
        generator = torch.Generator().manual_seed(1)
        samples = [{"x": torch.randn(FEATURES, generator=generator), "labels": i % 3} for i in range(NUM_SAMPLES)]
        return Model(), {"train_dataset": samples}, {"save_async": how == "behind"}
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    draw = random.Random(1)
    lengths = [*(draw.randint(3, 12) for _ in range(2 * NUM_SAMPLES)), *[8] * 6]
    rows = [[draw.randrange(1, 32) for _ in range(length)] for length in lengths]
    texts = [{"input_ids": row, "labels": row} for row in rows]
    return LlamaForCausalLM(config), {"train_dataset": Stream(texts[:-6]), "eval_dataset": texts[-6:]}, ALL_FEATURES


def main(
    output_dir: str, final_weights: str, save_steps: str, place: str = "", count: str = "0", behind: str = ""
) -> None:
    torch.set_num_threads(1)
    countdown = Countdown(place, int(count))
    patch_the_system(countdown)
    patch_the_store(countdown)
    torch.manual_seed(0)
    model, datasets, settings = features_of(behind)
    common: dict[str, Any] = {
        "output_dir": output_dir,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": int(save_steps),
        "eval_steps": int(save_steps),
        "save_total_limit": 2,
        "seed": 3,
    }
    trainer = doomed(countdown)(model=model, args=TrainingArguments(**common | settings), **datasets)
    trainer.train(resume_from_checkpoint="auto")
    print("places passed:", int(count) - countdown.count)
    if behind == "everything":
        Path(f"{final_weights}.records").write_text(json.dumps(records_of(trainer), default=str))
    safetensors.torch.save_file(trainer.model.state_dict(), final_weights)


def nursery() -> None:
    process = 0
    for line in sys.stdin:
        if not line.strip():
            _, status = os.waitpid(process, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            live(json.loads(line))
        with contextlib.suppress(OSError):  # it may have done so, or be gone
            os.setpgid(process, process)
        print(process, flush=True)


def live(arguments: list[str]) -> NoReturn:
    """A child's life: its words go into a file beside its weights."""
    with open(f"{arguments[1]}.log", "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.dump_traceback_later(HANGS_S, exit=True, file=log)
        try:
            if arguments[-1] == "everything":  # its processes are known by their directory, and its files are there
                os.chdir(Path(arguments[1]).parent)
                os.environ["TMPDIR"] = tempfile.tempdir = os.path.abspath("tmp")
            save_over(*arguments[1:]) if arguments[0] == "save over" else main(*arguments)
        except SystemExit as end:
            os._exit(int(end.code or 0))
        except KeyboardInterrupt:
            os._exit(128 + signal.SIGINT)
        except BaseException:
            traceback.print_exc()
            log.flush()
            os._exit(1)
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["all"]:
        import transformers.models.llama.modeling_llama  # noqa: F401
    nursery()
