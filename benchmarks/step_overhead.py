"""What a trainer adds to a training step: beside a loop written by hand that does the same work, in one run.

python benchmarks/step_overhead.py                 all models, about two minutes
python benchmarks/step_overhead.py --variations    also other logging, data and workers
python benchmarks/step_overhead.py --quick         fewer turns, under a minute

One JSON line for each model and accumulation, then a table. README.md says how to read them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from harness import Subject, Turns, Watch, measure, print_json, print_table, versions  # noqa: E402

BATCH = 8
FEATURES = 32
CLASSES = 4
VOCAB = 128
LENGTH = 32


@dataclass(frozen=True)
class Case:
    """A model, its data, the steps of a turn by accumulation, and the ratio that Trainwright may not exceed."""

    name: str
    build: Callable[[], nn.Module]
    items: Callable[[int], list[dict[str, Any]]]
    steps: dict[int, int]
    limit: float


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def vectors(size: int) -> list[dict[str, Any]]:
    drawn = [{"x": torch.randn(FEATURES), "labels": i % CLASSES} for i in range(256)]
    return [drawn[i % 256] for i in range(size)]


def sequences(size: int) -> list[dict[str, Any]]:
    drawn = [{"input_ids": (ids := torch.randint(1, VOCAB, (LENGTH,))), "labels": ids} for _ in range(256)]
    return [drawn[i % 256] for i in range(size)]


class OwnData(torch.utils.data.Dataset[dict[str, Any]]):
    """What most users write: a class of their own."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def own_collator(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    labels = torch.tensor([item["labels"] for item in items])
    return {"x": torch.stack([item["x"] for item in items]), "labels": labels}


CASES = [
    Case("mlp", Mlp, vectors, {1: 40, 8: 10}, limit=1.15),
    Case("gpt2", gpt2, sequences, {1: 10, 8: 2}, limit=1.03),
    Case("llama", llama, sequences, {1: 10, 8: 2}, limit=1.03),
]
# What else changes a step, tried with the MLP: name, settings of the work.
VARIATIONS: dict[str, dict[str, Any]] = {
    "mlp, log at each step": {"logging_steps": 1},
    "mlp, log at each 100th": {"logging_steps": 100},
    "mlp, from datasets": {"data": "datasets"},
    "mlp, own dataset and collator": {"data": "own"},
    "mlp, 2 workers": {"num_workers": 2},
}
WARM_UP = 20
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Work:
    """What each subject has to do."""

    case: Case
    accumulation: int
    logging_steps: int
    num_steps: int
    data: str = "list"
    num_workers: int = 0

    def model_and_items(self) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        # One epoch is never left, so no subject has an end of one within a turn.
        model, items = self.case.build(), self.case.items(BATCH * self.accumulation * (self.num_steps + 1))
        if self.data == "datasets":
            import datasets

            columns = {name: [torch.as_tensor(item[name]).tolist() for item in items] for name in items[0]}
            return model, datasets.Dataset.from_dict(columns)
        return model, OwnData(items) if self.data == "own" else items

    def collator(self) -> Callable[[list[Any]], Any]:
        from transformers import default_data_collator

        return own_collator if self.data == "own" else default_data_collator


def by_hand(work: Work, watch: Watch) -> None:
    """The ordinary loop: what a careful person writes without a trainer."""
    model, items = work.model_and_items()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / work.num_steps))
    loader = DataLoader(items, batch_size=BATCH, shuffle=True, collate_fn=work.collator(), num_workers=work.num_workers)
    batches = iter(loader)
    device = torch.device("cpu")
    running = torch.zeros(())
    history = []
    for step in range(1, work.num_steps + 1):
        for _ in range(work.accumulation):
            batch = {name: value.to(device) for name, value in next(batches).items()}
            loss = model(**batch)["loss"] / work.accumulation
            loss.backward()
            running += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        learning_rate = schedule.get_last_lr()[0]
        schedule.step()
        optimizer.zero_grad()
        if step % work.logging_steps == 0:
            logs = {
                "loss": running.item() / work.logging_steps,
                "grad_norm": grad_norm.item(),
                "learning_rate": learning_rate,
                "step": step,
            }
            running.zero_()
            history.append(logs)
            print(logs)
        watch.step_done(step)


def by_trainer(library: Any, work: Work, watch: Watch, **settings: Any) -> None:
    """A trainer of `library`, which has Trainer, TrainingArguments and TrainerCallback, with more `settings`."""

    class TellsSteps(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.step_done(state.global_step)

    model, items = work.model_and_items()
    with tempfile.TemporaryDirectory() as output_dir:
        args = library.TrainingArguments(
            output_dir=output_dir,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=work.accumulation,
            max_steps=work.num_steps,
            learning_rate=LEARNING_RATE,
            logging_steps=min(work.logging_steps, work.num_steps),  # a run that never logs is refused
            dataloader_num_workers=work.num_workers,
            log_level="warning",  # below it a log is not printed, and the loop by hand prints too
            **settings,
        )
        own = {"data_collator": work.collator()} if work.data == "own" else {}
        library.Trainer(model=model, args=args, train_dataset=items, callbacks=[TellsSteps()], **own).train()


def by_lightning(work: Work, watch: Watch) -> None:
    """Lightning's trainer, where it is installed: the same model, data, clipping, schedule and logs."""
    import warnings

    import lightning

    model, items = work.model_and_items()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, fused=True)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / work.num_steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % work.accumulation == 0:
                watch.step_done(self.global_step)

    loader = DataLoader(items, batch_size=BATCH, shuffle=True, collate_fn=work.collator(), num_workers=work.num_workers)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.Trainer(
            accelerator="cpu", devices=1, max_steps=work.num_steps, accumulate_grad_batches=work.accumulation,
            gradient_clip_val=1.0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            log_every_n_steps=work.logging_steps, default_root_dir=folder, num_sanity_val_steps=0,
        ).fit(Module(), loader)  # fmt: skip


def subjects(case: Case, accumulation: int, settings: dict[str, Any], num_steps: int) -> dict[str, Subject]:
    import transformers

    work = Work(case, accumulation, num_steps=num_steps, **settings)
    found: dict[str, Subject] = {"hand": partial(by_hand, work)}
    try:
        import trainwright

        found["trainwright"] = partial(by_trainer, trainwright, work)
        _ = trainwright.Trainer
    except (ImportError, AttributeError) as error:
        print(f"without trainwright: {error}", file=sys.stderr)
        found.pop("trainwright", None)
    found["transformers"] = partial(by_trainer, transformers, work)
    if find_spec("lightning") is not None:
        found["lightning"] = partial(by_lightning, work)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ten turns")
    parser.add_argument("--turns", type=int, default=40, help="how often each subject has its turn; default 40")
    parser.add_argument("--models", nargs="+", default=[case.name for case in CASES], help="default: all")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 8], choices=[1, 8])
    parser.add_argument("--logging-steps", type=int, default=10)
    parser.add_argument("--variations", action="store_true", help="also other logging, data and workers, with the MLP")
    parser.add_argument("--check", action="store_true", help="end with 1 if trainwright exceeds a limit")
    return parser.parse_args()


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    rows = [["model", "accumulation", "subject", "ratio", "min", "max", "cpu", "us/step", "calls/step", "limit"]]
    exceeded = False
    usual = {"logging_steps": args.logging_steps}
    tasks = [(case.name, case, accumulation, usual) for case in CASES if case.name in args.models
             for accumulation in args.accumulation]  # fmt: skip
    if args.variations:
        tasks += [(name, CASES[0], 1, usual | settings) for name, settings in VARIATIONS.items()]
    for name, case, accumulation, settings in tasks:
        turns = Turns(warm_up=WARM_UP, num=10 if args.quick else args.turns, steps=case.steps[accumulation])
        results = measure(partial(subjects, case, accumulation, settings), base="hand", turns=turns)
        print_json(
            {
                "benchmark": "step_overhead",
                "model": name,
                "accumulation": accumulation,
                "turns": turns.num,
                "steps_per_turn": turns.steps,
                "limit": case.limit,
                "subjects": results,
                **versions("torch", "transformers", "accelerate", "trainwright"),
            }
        )
        for subject, result in results.items():
            is_ours = subject == "trainwright"
            exceeded |= is_ours and result["ratio"] > case.limit
            cells = [f"{result[key]:.2f}" for key in ("ratio", "min", "max", "ratio_cpu")]
            cells += [f"{result['us_per_step']:.0f}", f"{result['python_calls_per_step']:.0f}"]
            rows.append([name, str(accumulation), subject, *cells, f"{case.limit:.2f}" if is_ours else ""])
    print()
    print_table(rows)
    return int(args.check and exceeded)


if __name__ == "__main__":
    sys.exit(main())
