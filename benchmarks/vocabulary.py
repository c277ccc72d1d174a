"""Peak memory and loss of a language model of 150,000 words, with its logits and with `loss_kernel="chunked"`.

    python benchmarks/vocabulary.py            a minute
    python benchmarks/vocabulary.py --small    1,000 words, to try the script

A Llama of two layers trains four steps of 4 x 512 tokens, each subject in a process of its own; beside its peak is what
the process held when the model was made. One JSON line, then a table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from harness import peak_bytes, print_json, print_table, run_apart, silence, versions  # noqa: E402

SUBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("transformers", {}),
    "trainwright": ("trainwright", {}),
    'trainwright, loss_kernel="chunked"': ("trainwright", {"loss_kernel": "chunked"}),
}
WORDS = 150_000
ROWS = 4
LENGTH = 512
NUM_STEPS = 4


def run_alone(name: str, *, is_small: bool) -> dict[str, float]:
    """Trains in this process; its memory before the first step, its peak, and the mean loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    package, settings = SUBJECTS[name]
    library: Any = importlib.import_module(package)
    words = 1000 if is_small else WORDS
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=words, **sizes))
    rows = torch.randint(0, words, (ROWS * NUM_STEPS, LENGTH)).tolist()
    items = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder, silence():
        args = library.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            per_device_train_batch_size=ROWS,
            max_steps=NUM_STEPS,
            logging_steps=1,
            **settings,
        )
        trainer = library.Trainer(model=model, args=args, train_dataset=items)
        before = peak_bytes()
        loss = trainer.train().training_loss
    return {"before": before, "peak": peak_bytes(), "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="1,000 words")
    parser.add_argument("--alone", choices=SUBJECTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        print(json.dumps(run_alone(given.alone, is_small=given.small)))
        return
    found: dict[str, dict[str, float]] = {}
    for name in SUBJECTS:
        more = ["--small"] if given.small else []
        found[name] = run_apart(__file__, "--alone", name, *more)
    print_json(
        {
            "benchmark": "vocabulary",
            "versions": versions("torch", "transformers"),
            "words": 1000 if given.small else WORDS,
            "found": found,
        }
    )
    rows = [
        (name, f"{one['before'] / 1e9:.2f}", f"{one['peak'] / 1e9:.2f}", f"{one['loss']:.6f}")
        for name, one in found.items()
    ]
    print_table([("subject", "GB before step 1", "GB at the peak", "mean loss"), *rows])


if __name__ == "__main__":
    main()
