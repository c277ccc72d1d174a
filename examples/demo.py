"""What `make demo` shows: a model learns, a killed run ends with the same weights, and a broken row is named.

MiniLM learns from 1,920 film reviews. Model and reviews are installed packages, so nothing is downloaded:

    python examples/demo.py --output_dir runs/demo
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

STOPPED = "Stopped by Ctrl-C. The next `make demo` begins again."


def stop_imports(number: int, frame: object) -> None:
    """Ends the process at Ctrl-C: an import that an exception interrupts may swallow it, or show a traceback."""
    print(STOPPED, file=sys.stderr, flush=True)
    os._exit(128 + number)


if __name__ == "__main__":
    # The imports below take seconds.
    signal.signal(signal.SIGINT, stop_imports)

import transformers
from _common import held_out, minilm
from text_classification import accuracy_and_f1, encode, film_reviews

from trainwright import Trainer, TrainerCallback, TrainingArguments, get_last_checkpoint, set_seed
from trainwright.journal.record import read
from trainwright.report.run_page import write_report

LABELS = ["negative", "positive"]
SENTENCES = (
    "A moving and funny film with a wonderful cast.",
    "Dull, far too long, and without a single idea of its own.",
    "A warm and clever story that stays with you for days.",
)
NUM_SCORES = 96
BROKEN_ROW = 37


class ShowLoss(TrainerCallback):
    """Prints a short line for each log. A callback of transformers works unchanged, and so does this one there."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            print(f"   step {state.global_step:3} of {state.max_steps}   loss {logs['loss']:.3f}")


def make_trainer(options: argparse.Namespace, output_dir: Path) -> Trainer:
    """The run of parts 1 and 2. The same options make the same run, in whatever process."""
    # The classification head is new, and drawn at random.
    set_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        options.model, id2label=dict(enumerate(LABELS)), label2id={label: i for i, label in enumerate(LABELS)}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    train_rows, eval_rows = held_out(film_reviews(), num_train=options.rows, num_eval=options.rows // 8)
    return Trainer(
        model=model,
        args=make_arguments(output_dir, learning_rate=options.learning_rate, warmup_steps=0.1),
        train_dataset=encode(train_rows, LABELS, tokenizer, max_length=32),
        eval_dataset=encode(eval_rows, LABELS, tokenizer, max_length=32),
        processing_class=tokenizer,
        compute_metrics=accuracy_and_f1,
        callbacks=[ShowLoss()],
    )


def make_arguments(output_dir: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        str(output_dir),
        num_train_epochs=1,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        # Shares of all steps: the run is killed at its half, between two saves.
        logging_steps=1 / 6,
        save_steps=1 / 3,
        # This script prints its own lines.
        log_level="error",
        report_to="none",
        **settings,
    )


def learn(options: argparse.Namespace, output_dir: Path) -> Trainer:
    print(f"1. Train: {options.rows:,} film reviews, {options.rows // 8} others to evaluate on")
    trainer = make_trainer(options, output_dir)
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    trainer.save_model()
    after = trainer.evaluate()["eval_accuracy"]
    print(f"   accuracy {before:.2f} before, {after:.2f} after\n")
    return trainer


def kill_and_resume(options: argparse.Namespace, output_dir: Path, undisturbed: Path) -> None:
    print("2. The same run in a process that gets kill -9, and its resume")
    command = [sys.executable, __file__, "--part=train", f"--output_dir={output_dir}", f"--model={options.model}"]
    command += [f"--rows={options.rows}", f"--learning_rate={options.learning_rate}"]
    # In a session of its own, Ctrl-C reaches this process alone, which then ends that one.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            losses = (line for line in process.stdout if "loss" in line)
            for number, line in enumerate(losses, start=1):
                print(line, end="")
                if number >= 3 and get_last_checkpoint(str(output_dir)):
                    break
        finally:
            # SIGKILL: nothing in the process can react to it.
            process.kill()
    checkpoint = get_last_checkpoint(str(output_dir))
    print(f"   killed (exit code {process.returncode}); resumed from {checkpoint}:")

    trainer = make_trainer(options, output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    hashes = [hash_weights(folder) for folder in (undisturbed, output_dir)]
    print(f"   sha256 of the weights, never killed and killed:\n   {hashes[0]}\n   {hashes[1]}")
    if hashes[0] != hashes[1]:
        raise SystemExit("The weights differ. Please report it, with the output of: trainwright env")
    print("   They are equal to the bit.\n")


def hash_weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def find_broken_row(options: argparse.Namespace, output_dir: Path) -> None:
    print(f"3. A regression on {NUM_SCORES} reviews; the score of row {BROKEN_ROW} is NaN")
    set_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    rows: list[Any] = encode(film_reviews()[:NUM_SCORES], LABELS, tokenizer, max_length=32)
    for row in rows:
        row["labels"] = float(row["labels"])
    rows[BROKEN_ROW]["labels"] = math.nan
    trainer = Trainer(model, make_arguments(output_dir), train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    for incident in read(output_dir).of("incident"):
        if "made it" in incident["text"]:
            print(textwrap.fill(incident["text"], 80, initial_indent="   ", subsequent_indent="   "))
    finite = all(weights.isfinite().all() for weights in model.parameters())
    print(f"   The run continued to its end; all weights are finite: {finite}\n")


def predict(trainer: Trainer) -> None:
    print("4. Use the model")
    classify = transformers.pipeline("text-classification", model=trainer.model, tokenizer=trainer.processing_class)
    for sentence, answer in zip(SENTENCES, classify(list(SENTENCES)), strict=True):
        print(f"   {answer['label']} {answer['score']:.2f}   {sentence}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo"), help="where the runs are written")
    parser.add_argument("--model", default=minilm(), help="an encoder's directory or name (default: MiniLM)")
    parser.add_argument("--rows", type=int, default=1920, help="number of reviews to train on")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--part", choices=["all", "train"], default="all", help="train: only the run that is killed")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    # Each line is shown at once, also in a pipe.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if options.part == "train":
        make_trainer(options, options.output_dir).train()
        return
    try:
        (options.output_dir / "undisturbed").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(
            f"--output_dir {options.output_dir} cannot be made: {error.strerror}. Choose another."
        ) from None
    # From here on, what is under way ends first: a process of the demo, a file that is written.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        show(options)
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def show(options: argparse.Namespace) -> None:
    """Shows the five parts, one after the other."""
    folders = [options.output_dir / name for name in ("undisturbed", "killed", "broken_row")]
    for folder in folders:
        # An earlier `make demo` may have left them.
        shutil.rmtree(folder, ignore_errors=True)
    trainer = learn(options, folders[0])
    kill_and_resume(options, folders[1], undisturbed=folders[0])
    find_broken_row(options, folders[2])
    predict(trainer)
    print(f"\n5. The run as a page: {write_report(folders[0])}")


if __name__ == "__main__":
    main()
