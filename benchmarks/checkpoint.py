"""What a checkpoint costs a training loop, side by side with transformers and with a hand-written blocking save.

    python benchmarks/checkpoint.py            GPT-2 of 124M parameters with AdamW: 1.5 GB a checkpoint
    python benchmarks/checkpoint.py --small    a tiny one, to try the script

Subjects take turns in one process (`harness.py`). Every second turn has one save; its neighbour has none. So

    blocked     seconds from the end of the step that saves to the begin of the next one, in quiet steps
    lost        the whole turn with a save, until it is on the disk, less the quiet turn before it, in seconds, and as
                a ratio to the hand-written save that flushes its file (transformers flushes nothing)
    peak        most memory of a process that trains and saves, less that of one that only trains (`--no-memory`
                leaves these processes out)

One JSON line for all, then a table.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Lap, Subject, Turns, print_json, print_table, silence, take_turns, versions

NAMES = ("hand", "trainwright", "transformers")
NUM_ENTRIES = 100_000


class Work:
    """What every subject does: the same model on the same batches, a save in the middle of every second turn."""

    def __init__(self, turns: Turns, *, is_small: bool, saves: bool = True) -> None:
        self.turns = turns
        self.is_small = is_small
        self.saves = saves
        self.sequence = 16 if is_small else 64

    def model(self) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        size = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000} if self.is_small else {}
        return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **size))

    def items(self) -> list[dict[str, Any]]:
        rows = torch.randint(0, 1000, (16, self.sequence), generator=torch.Generator().manual_seed(1)).tolist()
        return [{"input_ids": row, "labels": row} for row in rows] * (self.turns.total_steps // 16 + 1)

    def saves_at(self, step: int) -> bool:
        """In the second timed step of every second turn."""
        past = step - self.turns.warm_up
        turn, within = divmod(past - 1, self.turns.steps + 1)
        return self.saves and past > 0 and turn % 2 == 1 and within == 1

    def ends(self, step: int) -> bool:
        return self.turns.ends(step)


class Blocked(dict[str, list[float]]):
    """Seconds between the end of a step that saves and the begin of the next one, by subject."""


def by_hand(work: Work, folder: str, blocked: list[float], watch: Any) -> None:
    model = work.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step, item in enumerate(work.items()[: work.turns.total_steps], start=1):
        batch = {name: torch.tensor([row]) for name, row in item.items()}
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if work.saves_at(step):
            start = time.perf_counter()
            partial_file = Path(folder) / "state.partial"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial_file)
            with partial_file.open("rb") as file:
                os.fsync(file.fileno())
            partial_file.replace(Path(folder) / "state.pt")
            blocked.append(time.perf_counter() - start)
        watch.step_done(step)


def by_trainer(library: Any, work: Work, folder: str, blocked: list[float], watch: Any) -> None:
    class Saves(library.TrainerCallback):
        """Asks for a save where one is due, and stops the time until the next step begins."""

        started: float | None = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            if work.ends(step) and hasattr(trainer, "_services"):
                trainer._trainwright.services.writer.wait()  # the turn is over when its checkpoint is on the disk
            watch.step_done(step)
            if work.saves_at(step):
                control.should_save = True
                self.started = time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.started is not None:
                blocked.append(time.perf_counter() - self.started)
                self.started = None

    args = library.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        save_total_limit=1,
        per_device_train_batch_size=1,
        max_steps=work.turns.total_steps,
        learning_rate=1e-4,
        logging_strategy="no",
        log_level="error",
    )
    trainer = library.Trainer(model=work.model(), args=args, train_dataset=work.items(), callbacks=[Saves()])
    trainer.train()


def subject(name: str, work: Work, folder: Path, blocked: list[float]) -> Subject:
    place = folder / name
    place.mkdir()
    if name == "hand":
        return partial(by_hand, work, str(place), blocked)
    import importlib

    return partial(by_trainer, importlib.import_module(name), work, str(place), blocked)


def differences(lap: Lap) -> list[float]:
    """A turn with a save less the quiet one before it."""
    return [saving - quiet for quiet, saving in zip(lap.wall_s[::2], lap.wall_s[1::2], strict=True)]


def time_of_state(num_entries: int, folder: Path) -> dict[str, float]:
    """Milliseconds to save a record with a long history: the first time, and after ten more logs."""
    import transformers

    from trainwright.state.trainer_state import TrainerState

    numbers = itertools.count()

    def timed(state: Any) -> float:
        path = folder / f"state-{next(numbers)}.json"  # as each checkpoint has a directory of its own
        start = time.perf_counter()
        state.save_to_json(str(path))
        return round((time.perf_counter() - start) * 1e3, 1)

    history = [
        {"loss": 1 / (i + 1), "grad_norm": 0.5, "learning_rate": 1e-4, "epoch": i / 1e5, "step": i}
        for i in range(num_entries)
    ]
    ours = TrainerState(log_history=list(history))
    theirs = transformers.TrainerState(log_history=list(history))
    first = timed(ours)
    later = []
    for _ in range(9):
        ours.log_history += [{"loss": 0.1, "step": 1}] * 10
        later.append(timed(ours))
    return {"first_ms": first, "later_ms": statistics.median(later), "transformers_ms": timed(theirs)}


def time_of_digest(work: Work, folder: Path) -> dict[str, float]:
    """Seconds to write a checkpoint's bytes onto the disk, and to make their checksums, with nothing beside it."""
    from trainwright.checkpoint.manifest import describe_files

    (place := folder / "digest").mkdir()
    weights = work.model().state_dict()
    values = {
        f"{kind}.{name}": value.clone() for kind in ("weights", "first", "second") for name, value in weights.items()
    }
    written = []
    checked = []
    for _ in range(3):
        start = time.perf_counter()
        torch.save(values, place / "state.pt")
        with (place / "state.pt").open("rb") as file:
            os.fsync(file.fileno())
        middle = time.perf_counter()
        describe_files(place)
        written.append(middle - start)
        checked.append(time.perf_counter() - middle)
    found = statistics.median(checked), statistics.median(written)
    return {"digest_s": round(found[0], 3), "write_s": round(found[1], 3), "share": round(found[0] / found[1], 3)}


def peak_of(name: str, *, saves: bool, is_small: bool) -> int:
    """Most memory of a process of its own."""
    command = [sys.executable, __file__, "--alone", name, *(["--small"] if is_small else [])]
    done = subprocess.run([*command, *(["--without-saves"] if not saves else [])], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return int(done.stdout.splitlines()[-1])


def run_alone(name: str, *, is_small: bool, saves: bool) -> None:
    class NoWatch:
        def step_done(self, step: int) -> None: ...

    turns = Turns(warm_up=2, num=4, steps=4)
    with tempfile.TemporaryDirectory() as folder, silence():
        subject(name, Work(turns, is_small=is_small, saves=saves), Path(folder), [])(NoWatch())
    print(harness.peak_bytes())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    turns = Turns(warm_up=4, num=2 * args.saves, steps=args.steps)
    work = Work(turns, is_small=args.small)
    blocked = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        laps = take_turns({n: subject(n, work, Path(folder), blocked[n]) for n in NAMES}, turns)
        sizes = {n: sum(p.stat().st_size for p in (Path(folder) / n).rglob("*") if p.is_file()) for n in NAMES}
        state = time_of_state(NUM_ENTRIES if not args.small else 1000, Path(folder))
        digest = time_of_digest(work, Path(folder))
    quiet = {name: statistics.median(lap.wall_s[::2]) / turns.steps for name, lap in laps.items()}
    lost = {name: statistics.median(differences(lap)) for name, lap in laps.items()}
    subjects = {
        name: {
            "quiet_step_s": round(quiet[name], 4),
            "blocked_steps": round(statistics.median(blocked[name]) / quiet[name], 2),
            "blocked_s": round(statistics.median(blocked[name]), 3),
            "lost_s": round(lost[name], 3),
            "lost_ratio": round(lost[name] / lost["hand"], 3),
            "bytes": sizes[name],
        }
        for name in NAMES
    }
    return {"subjects": subjects, "state": state, "digest": digest}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--saves", type=int, default=5, help="saves of each subject; default 5")
    parser.add_argument("--steps", type=int, default=12, help="steps in a turn, enough for the background; default 12")
    parser.add_argument("--threads", type=int, default=max(os.cpu_count() or 1, 1), help="of torch; default: all")
    parser.add_argument("--folder", help="where to write; default: the system's temporary directory")
    parser.add_argument("--no-memory", action="store_true", help="leave the peak of memory out")
    parser.add_argument("--alone", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--without-saves", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    if args.alone:
        run_alone(args.alone, is_small=args.small, saves=not args.without_saves)
        return 0
    found = measure(args)
    for name in NAMES if not args.no_memory else ():
        peaks = [peak_of(name, saves=saves, is_small=args.small) for saves in (True, False)]
        found["subjects"][name]["peak_over_training_bytes"] = peaks[0] - peaks[1]
    print_json(
        {
            "benchmark": "checkpoint",
            "model": "tiny" if args.small else "gpt2-124m",
            "saves": args.saves,
            "threads": args.threads,
            **found,
            **versions("torch", "transformers", "safetensors", "trainwright"),
        }
    )
    keys = list(found["subjects"]["hand"])
    print_table(
        [["subject", *keys], *([name, *(str(row[key]) for key in keys)] for name, row in found["subjects"].items())]
    )
    state = found["state"]
    digest = found["digest"]
    print(
        f"\nstate of {NUM_ENTRIES:,} logs saved again after ten more: {state['later_ms']} ms "
        f"(transformers {state['transformers_ms']} ms)"
    )
    print(
        f"checksums: {digest['digest_s']} s beside {digest['write_s']} s to write the same bytes "
        f"(share {digest['share']})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
