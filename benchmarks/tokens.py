"""Real tokens per second: packing and a budget of tokens beside padded batches, at random and grouped by length.

    python benchmarks/tokens.py            both models, with losses; about twenty minutes on one core
    python benchmarks/tokens.py --quick    fewer turns and no losses

The text is the docstrings of Python's standard library, whose lengths are those of real text: many short, few long.
Padded batches are of eight samples, the default of both libraries, and are trained by both. All ways take turns in one
process, and their tokens are counted per second of their own thread's CPU time. The losses are per token of held-out
text after one epoch, trained with the settings that differ in nothing but how batches are formed; those that train on
as many tokens a step are to be compared.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import importlib
import re
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Subject, Turns, Watch, print_json, print_table, silence, take_turns, versions
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from trainwright import TrainerCallback

VOCABULARY = 4096
MAX_LENGTH = 512
NUM_HELD_OUT = 300
PAD = 0
UNKNOWN = 1
MASK = 2
BATCH = {"per_device_train_batch_size": 8}
GROUPED = BATCH | {"train_sampling_strategy": "group_by_length"}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers, random": ("transformers", BATCH),
    "transformers, grouped": ("transformers", GROUPED),
    "random": ("trainwright", BATCH),
    "grouped": ("trainwright", GROUPED),
    "token budget": ("trainwright", {"max_tokens_per_batch": 2048}),
    "packing": (
        "trainwright",
        {"packing": "best_fit", "packing_length": 256, "packing_overflow": "split", "per_device_train_batch_size": 8},
    ),
}
# As many tokens a step as a budget and packing have: what they are to be compared with in loss.
ACCUMULATED = {
    "random, 5 accumulated": ("trainwright", BATCH | {"gradient_accumulation_steps": 5}),
    "grouped, 5 accumulated": ("trainwright", GROUPED | {"gradient_accumulation_steps": 5}),
}
OURS = [way for way, (library, _) in WAYS.items() if library == "trainwright"]
NUM_FOR_LOSS = 1500
Items = list[dict[str, Any]]


def docstrings() -> list[str]:
    """All docstrings of the standard library's modules, classes and functions, in the order of its files."""
    found = []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, RecursionError):
            continue
        texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        found += [text for text in texts if text]
    return found


def token_ids(texts: list[str]) -> list[list[int]]:
    """Words and signs as numbers; the rare ones are one number."""
    words = [re.findall(r"\w+|[^\w\s]", text) for text in texts]
    counts = collections.Counter(word for text in words for word in text)
    common = {word: number for number, (word, _) in enumerate(counts.most_common(VOCABULARY - 3), start=3)}
    return [[common.get(word, UNKNOWN) for word in text][:MAX_LENGTH] for text in words if text]


def for_the_decoder(ids: list[list[int]]) -> Items:
    return [{"input_ids": row, "labels": row} for row in ids if len(row) > 1]


def for_the_encoder(ids: list[list[int]]) -> Items:
    """Every seventh token is hidden, the same ones for all ways."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for row in ids:
        hidden = (torch.rand(len(row), generator=generator) < 1 / 7).tolist()
        items.append(
            {
                "input_ids": [MASK if hide else token for token, hide in zip(row, hidden, strict=True)],
                "labels": [token if hide else -100 for token, hide in zip(row, hidden, strict=True)],
            }
        )
    return items


def decoder() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=MAX_LENGTH,
            pad_token_id=PAD,
        )
    )


def encoder() -> Any:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=MAX_LENGTH,
            pad_token_id=PAD,
        )
    )


MODELS: dict[str, tuple[Callable[[], Any], Callable[[list[list[int]]], Items]]] = {
    "decoder": (decoder, for_the_decoder),
    "encoder": (encoder, for_the_encoder),
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"[PAD]": PAD, "[UNK]": UNKNOWN, "[MASK]": MASK}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "[UNK]")), pad_token="[PAD]")


@dataclasses.dataclass
class TokenWatch:
    """A watch that also knows how many real tokens each turn had."""

    watch: Watch
    turns: Turns
    real: int = 0
    padded: int = 0
    per_turn: list[int] = dataclasses.field(default_factory=list)
    _at_start: int = 0

    def count(self, inputs: Mapping[str, torch.Tensor]) -> None:
        ids = inputs["input_ids"]
        self.real += int((ids != PAD).sum())
        self.padded += ids.numel()

    def step_done(self, step: int) -> None:
        if self.turns.starts(step):
            self._at_start = self.real
        elif self.turns.ends(step) and step > self.turns.warm_up:
            self.per_turn.append(self.real - self._at_start)
        self.watch.step_done(step)


class Steps(TrainerCallback):
    def __init__(self, watch: TokenWatch) -> None:
        self.watch = watch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.step_done(state.global_step)


def trainer(way: str, model: Any, items: Items, folder: str, **more: Any) -> Any:
    package, chosen = (WAYS | ACCUMULATED)[way]
    library = importlib.import_module(package)
    settings = chosen | more

    class Counting(library.Trainer):  # type: ignore[misc]
        watch: TokenWatch | None = None

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            if self.watch is not None:
                self.watch.count(inputs)
            return super().training_step(model, inputs, num_items_in_batch)

    args = library.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        log_level="error",
        report_to="none",
        **settings,
    )
    collator = DataCollatorForTokenClassification(tokenizer())
    return Counting(model=model, args=args, train_dataset=items, data_collator=collator)


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def subject(
    make: Callable[[], Any], items: Items, turns: Turns, watches: Any, name: str, folder: str, watch: Watch
) -> None:
    watches[name] = counted = TokenWatch(watch, turns)
    one = trainer(name, seeded(make), items, folder, max_steps=turns.total_steps)
    one.watch = counted
    one.add_callback(Steps(counted))
    one.train()


def speeds(make: Callable[[], Any], items: Items, turns: Turns, folder: str) -> dict[str, dict[str, Any]]:
    """Real tokens per CPU second of each way, and as a ratio to both kinds of padded batches, turn by turn."""
    watches: dict[str, TokenWatch] = {}
    subjects: dict[str, Subject] = {name: partial(subject, make, items, turns, watches, name, folder) for name in WAYS}
    laps = take_turns(subjects, turns)
    rates = {
        name: [tokens / cpu for tokens, cpu in zip(watches[name].per_turn, laps[name].cpu_s, strict=True)]
        for name in WAYS
    }
    # All of a way's turns together: a turn of grouped batches is short or long samples as it comes.
    whole = {name: sum(watches[name].per_turn) / sum(laps[name].cpu_s) for name in WAYS}
    return {
        name: {
            "real_tokens_per_cpu_s": round(whole[name]),
            "share_of_padding": round(1 - watches[name].real / watches[name].padded, 3),
            "real_tokens_per_step": round(sum(watches[name].per_turn) / (turns.num * turns.steps)),
            "to_random": round(whole[name] / whole["transformers, random"], 2),
            "to_grouped": round(whole[name] / whole["transformers, grouped"], 2),
            "to_our_grouped": round(whole[name] / whole["grouped"], 2),
            "median_of_turns": round(statistics.median(rates[name])),
        }
        for name in WAYS
    }


def loss_per_token(make: Callable[[], Any], items: Items, held_out: Items, way: str, folder: str) -> tuple[float, int]:
    """On held-out text after one epoch, and the steps that it had."""
    with silence():
        one = trainer(way, seeded(make), items, folder, num_train_epochs=1)
        one.train()
        metrics = one.evaluate(held_out)
    return round(metrics["eval_loss"], 3), one.state.global_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Fewer turns, no losses.")
    parser.add_argument("--model", choices=[*MODELS], help="Only this one.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = token_ids(docstrings())
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).tolist()
    ids = [ids[i] for i in order]
    # 50 steps, or a multiple: grouped batches come in portions of 50, the longest first.
    turns = Turns(warm_up=2, num=2 if args.quick else 4, steps=24)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in [args.model] if args.model else MODELS:
            make, prepare = MODELS[name]
            items = prepare(ids)
            held_out = items[:NUM_HELD_OUT]
            items = items[NUM_HELD_OUT:]
            results[name] = speeds(make, items, turns, folder)
            for way in () if args.quick else [*OURS, *ACCUMULATED]:
                loss, steps = loss_per_token(make, items[:NUM_FOR_LOSS], held_out, way, folder)
                results[name].setdefault(way, {}).update({"held_out_loss": loss, "steps_of_the_epoch": steps})
    lengths = sorted(map(len, ids))
    text = {
        "samples": len(ids),
        "tokens": sum(lengths),
        "p50": lengths[len(ids) // 2],
        "p90": lengths[len(ids) * 9 // 10],
    }
    print_json({"benchmark": "tokens", "text": text, "results": results, "versions": versions("torch", "transformers")})
    for model, ways in results.items():
        columns = list(ways[OURS[-1]])
        print_table(
            [[model, *columns], *[[way, *(str(values.get(c, "")) for c in columns)] for way, values in ways.items()]]
        )


if __name__ == "__main__":
    main()
