"""Peak memory and time of training on packed rows, by their length: attention by document, and with a mask.

    python benchmarks/packed_rows.py            a row of 8,192 and one of 32,768 tokens; some minutes
    python benchmarks/packed_rows.py --small    a row of 1,024 tokens, to try the script

A Llama of two narrow layers, so that a mask weighs much, and documents of 32 to 2,048 tokens, as many as fill three
rows. Each subject trains on all of them once, in a process of its own. With a mask, the rows were packed beforehand and
have position ids that start again, from which transformers makes the mask; so Trainwright trained packed rows before it
had attention by document. The memory is the peak above what the process held before training, with the proof.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from harness import peak_bytes, print_json, print_table, run_apart, silence, versions  # noqa: E402

LENGTHS = (8192, 32_768)
SUBJECTS = ("by document", "with a mask")
WORDS = 512
NUM_ROWS = 3


def make_documents(row_length: int) -> list[list[int]]:
    """Documents that fill `NUM_ROWS` rows to the last token."""
    import torch

    generator = torch.Generator().manual_seed(0)
    documents: list[list[int]] = []
    for _ in range(NUM_ROWS):
        left = row_length
        while left:
            length = min(int(torch.randint(32, 2049, (), generator=generator)), left)
            left -= length
            documents.append(torch.randint(1, WORDS, (length,), generator=generator).tolist())
    return documents


def make_rows(documents: list[list[int]], row_length: int) -> list[dict[str, Any]]:
    """The same documents, packed by hand in their order."""
    tokens = [token for document in documents for token in document]
    places = [place for document in documents for place in range(len(document))]
    starts = range(0, len(tokens), row_length)
    rows = [(tokens[i : i + row_length], places[i : i + row_length]) for i in starts]
    return [{"input_ids": row, "position_ids": at, "labels": row} for row, at in rows]


def run_alone(name: str, row_length: int) -> dict[str, float]:
    """Trains in this process; returns its peak above what it held before, and the CPU seconds of its steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import trainwright

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "max_position_embeddings": row_length}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads))
    documents = make_documents(row_length)
    packed = {"packing": "best_fit", "packing_length": row_length} if name == "by document" else {}
    items = [{"input_ids": one, "labels": one} for one in documents] if packed else make_rows(documents, row_length)
    times: list[float] = []

    class Times(trainwright.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.process_time())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder, silence():
        args = trainwright.TrainingArguments(
            folder,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            per_device_train_batch_size=1,
            num_train_epochs=1,
            **packed,
        )
        trainer = trainwright.Trainer(model=model, args=args, train_dataset=items, callbacks=[Times()])
        before = peak_bytes()
        trainer.train()
    return {"above": peak_bytes() - before, "steps_s": times[-1] - times[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a row of 1,024 tokens")
    parser.add_argument("--alone", nargs=2, metavar=("NAME", "LENGTH"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        print(json.dumps(run_alone(given.alone[0], int(given.alone[1]))))
        return
    lengths = (1024,) if given.small else LENGTHS
    found = {
        f"{length}, {name}": run_apart(__file__, "--alone", name, str(length))
        for length in lengths
        for name in SUBJECTS
    }
    print_json(
        {
            "benchmark": "packed_rows",
            "versions": versions("torch", "transformers", "trainwright"),
            "found": found,
        }
    )
    rows = [(name, f"{one['above'] / 1e6:,.0f}", f"{one['steps_s']:.2f}") for name, one in found.items()]
    print_table([("row of tokens", "peak above the start, MB", "CPU seconds of all steps"), *rows])


if __name__ == "__main__":
    main()
