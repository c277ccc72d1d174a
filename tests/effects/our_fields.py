"""Checks of the fields that transformers does not have."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers import TrainerState as OriginalState

from trainwright import TrainerCallback
from trainwright.capabilities.async_evaluation import capability
from trainwright.capabilities.averages.saved import read_average
from trainwright.capabilities.control.inbox import Inbox
from trainwright.capabilities.ledger.table import read_table
from trainwright.capabilities.recorded_values.value_comparison import read_values, values_file
from trainwright.checkpoint.store import CheckpointStore
from trainwright.distributed.device import device_variables
from trainwright.distributed.watchdog import Watchdog
from trainwright.errors import DataError
from trainwright.journal.record import read
from trainwright.preflight import speed

from ..capabilities.async_evaluation.async_evaluations import Held
from ..capabilities.control.receipts import send_and_wait
from .bench import Bench, llama, samples, sentences
from .table import shows


def rates(bench: Bench, **settings: Any) -> dict[str, float]:
    """The learning rate of each parameter in a run with a constant one of 0.1."""
    trainer = bench.train(lr_scheduler_type="constant", **settings)
    return {name: trainer.get_optimizer_group(p)["lr"] for name, p in trainer.model.named_parameters()}


@shows("profile")
def the_chosen_steps_are_traced(bench: Bench) -> None:
    assert not (Path(bench.train().args.output_dir) / "profile").exists()
    for asked, name in (("2-3", "steps-2-3-rank0"), ("3", "steps-3-5-rank0")):
        trainer = bench.train(profile=asked, optim="sgd")
        (path,) = (Path(trainer.args.output_dir) / "profile").iterdir()
        assert path.name == f"{name}.json.gz"
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        steps = [event for event in events if str(event.get("name", "")).startswith("Optimizer.step#")]
        assert len(steps) == {"2-3": 2, "3": 3}[asked]
    assert not bench.changes_weights({"profile": "2-3"})


@shows("record_values")
def the_values_of_the_chosen_steps_are_recorded(bench: Bench) -> None:
    assert not values_file(bench.train().args.output_dir, 0).exists()
    for asked, steps in (("2-3", {2, 3}), ("1", {1})):
        assert read_values(Path(bench.train(record_values=asked).args.output_dir))[0].steps == steps
    assert not bench.changes_weights({"record_values": "2-3"})


@shows("layerwise_lr_decay")
def lower_layers_learn_more_slowly(bench: Bench) -> None:
    found = rates(bench, layerwise_lr_decay=0.5)
    assert (found["head.weight"], found["body.1.weight"], found["body.0.weight"]) == pytest.approx((0.1, 0.05, 0.025))
    assert set(rates(bench).values()) == {0.1}
    assert bench.changes_weights({"layerwise_lr_decay": 0.5})


@shows("lr_groups")
def parameters_learn_at_rates_of_their_own(bench: Bench) -> None:
    found = rates(bench, lr_groups={"head": 0.02, r"body\.0": "0.5x"})
    assert (found["head.weight"], found["body.0.bias"], found["body.1.weight"]) == pytest.approx((0.02, 0.05, 0.1))
    assert rates(bench, lr_groups='{"head": 0.02, "body.0": "0.5x"}') == found
    assert bench.changes_weights({"lr_groups": {"head": 0.02}})


@shows("dataloader_timeout")
def batches_are_waited_for_so_long(bench: Bench) -> None:
    loaders = [
        bench.trainer(dataloader_num_workers=1, **given).get_train_dataloader()
        for given in ({"dataloader_timeout": 2.5}, {})
    ]
    assert [loader.timeout for loader in loaders] == [2.5, 0.0]


@shows("hang_timeout")
def a_standstill_is_noticed(bench: Bench) -> None:
    class Waits(list[Any]):
        wait_s = 60.0

        def __getitem__(self, index: Any) -> Any:
            is_noticed.wait(self.wait_s)
            return super().__getitem__(index)

    class Briefly(Waits):
        wait_s = 0.5

    def notice(watch: Watchdog, message: str) -> None:
        noticed.append(message)
        is_noticed.set()

    noticed: list[str] = []
    is_noticed = threading.Event()
    bench.monkeypatch.setattr(Watchdog, "_give_up", notice)
    bench.train(train_dataset=Waits(samples(2)), max_steps=1, hang_timeout=0.3)
    assert "has finished no step" in noticed[0]
    assert "hang_timeout=0.3" in noticed[0]
    noticed.clear()
    is_noticed.clear()
    bench.train(train_dataset=Briefly(samples(2)), max_steps=1)
    assert noticed == []


class MeanOfLabels(nn.Module):
    """Its loss is a mean over the labels of a batch that count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@shows("loss_weighting")
def a_micro_batch_with_fewer_labels_counts_less(bench: Bench) -> None:
    items = [{"x": torch.tensor([i / 8, 1.0]), "labels": i % 3 if i not in (4, 5, 6) else -100} for i in range(8)]

    def trained(**settings: Any) -> torch.Tensor:
        torch.manual_seed(0)
        one_step = {"max_steps": 1, "train_sampling_strategy": "sequential", "max_grad_norm": 0}
        model = MeanOfLabels()
        bench.train(
            model=model,
            train_dataset=items,
            optimizers=(torch.optim.SGD(model.parameters(), 0.5), None),
            **one_step | settings,
        )
        return model.layer.weight.detach()

    whole = trained(per_device_train_batch_size=8)
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    torch.testing.assert_close(trained(**halves, loss_weighting="items"), whole)
    assert not torch.allclose(trained(**halves), whole)
    with pytest.raises(ValueError, match=r"loss_weighting='tokens'.*'batches', 'items'"):
        bench.args(loss_weighting="tokens")


@shows("reproduce")
def an_evaluation_draws_random_numbers_again(bench: Bench) -> None:  # tests/parity/test_reproduce.py has each row
    states = []
    for how in (None, "transformers"):
        trainer = bench.trainer(reproduce=how)
        torch.manual_seed(0)
        trainer.evaluate()
        states.append(torch.get_rng_state())
    torch.manual_seed(0)
    assert torch.equal(states[0], torch.get_rng_state())
    assert not torch.equal(states[1], torch.get_rng_state())


def has_logits(bench: Bench, **settings: Any) -> set[bool]:
    """Whether the output of a model has logits in training."""
    made: set[bool] = set()
    model = llama()

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if module.training:  # the comparison before step 1 has them
            made.add(output["logits"] is not None)

    model.register_forward_hook(look)
    bench.train(model=model, train_dataset=sentences(), max_steps=1, **settings)
    return made


@shows("eval_sampling_strategy")
def an_evaluation_begins_with_the_longest(bench: Bench) -> None:
    lengths = [3, 9, 2, 7, 12, 1, 5, 8, 4, 10, 6, 11]
    rows = [{**row, "input_ids": [0] * length} for row, length in zip(samples(), lengths, strict=True)]
    for strategy, expected in (("sequential", lengths), ("by_length", sorted(lengths, reverse=True))):
        trainer = bench.trainer(eval_dataset=rows, eval_sampling_strategy=strategy)
        order = [index for batch in trainer.get_eval_dataloader().batch_sampler for index in batch]
        assert [lengths[index] for index in order] == expected


@shows("speed")
def the_chosen_levers_are_used(bench: Bench) -> None:
    choice = speed.Choice(settings={"loss_kernel": "chunked"})
    bench.monkeypatch.setattr(speed, "choose", lambda trainer: choice)
    assert has_logits(bench, speed="auto") == {False}
    assert has_logits(bench, speed={"loss_kernel": "chunked"}) == {False}
    assert has_logits(bench, speed='{"attn_implementation": "eager"}') == {True}
    with pytest.raises(ValueError, match="speed='fast' is not 'auto', None, or settings among attn_implementation"):
        bench.args(speed="fast")


@shows("live_control")
def a_run_takes_commands(bench: Bench) -> None:
    class Sends(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1 and inbox(args).is_open:
                send_and_wait(inbox(args), {"words": ["stop"], "by": "me"})

    def inbox(args: Any) -> Inbox:
        return Inbox(args.output_dir)

    assert bench.train(callbacks=[Sends()]).state.global_step == 6
    assert bench.train(callbacks=[Sends()], live_control=True).state.global_step == 2


def evaluating_here(bench: Bench, delay: int) -> Held:
    """From here on, what evaluates beside training is this, and no process."""
    held = Held(delay)
    bench.monkeypatch.setattr(capability, "evaluation_process", held.instead_of)
    return held


@shows("eval_async")
def a_result_comes_after_a_later_step(bench: Bench) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1}

    def order(**more: Any) -> list[tuple[str, int]]:
        history = bench.train(**settings, **more).state.log_history
        return [("eval" if "eval_loss" in one else "train", one["step"]) for one in history][:5]

    assert order() == [("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4)]
    held = evaluating_here(bench, delay=1)
    assert order(eval_async=True, callbacks=[held]) == [
        ("train", 1),
        ("train", 2),
        ("eval", 2),
        ("train", 3),
        ("train", 4),
    ]
    held = evaluating_here(bench, delay=2)
    late = order(eval_async=True, callbacks=[held])
    assert late.index(("eval", 2)) == late.index(("train", 3)) + 1
    assert not bench.changes_weights({"eval_async": "watch"})
    with pytest.raises(ValueError, match="eval_async='soon' is not one of True"):
        bench.args(eval_async="soon")


@shows("eval_device")
def the_process_evaluates_on_it(bench: Bench) -> None:
    seen: list[tuple[str, bool]] = []

    def started(freeze: Any, requests: Any, *, device: str, **how: Any) -> Any:
        held = Held().instead_of(freeze, requests, device=device)
        args = torch.load(held.path, weights_only=False)["trainer"]["attributes"]["args"]
        seen.append((device, args.use_cpu))
        held.lost = {1, 2, 3, 4, 5, 6}  # there is no such device
        return held

    bench.monkeypatch.setattr(capability, "evaluation_process", started)
    for device in ("cpu", "cuda:1"):
        bench.train(eval_async=True, eval_device=device, eval_strategy="epoch")
    assert seen == [("cpu", True), ("cuda:1", False)]
    assert device_variables("cpu") == {"CUDA_VISIBLE_DEVICES": ""}
    assert device_variables("cuda:1") == {"CUDA_VISIBLE_DEVICES": "1"}
    bench.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert device_variables("cuda:1") == {"CUDA_VISIBLE_DEVICES": "5"}
    with pytest.raises(ValueError, match="eval_device='gpu!' is not a device"):
        bench.args(eval_device="gpu!")


@shows("eval_queue")
def a_third_evaluation_waits_or_is_left_out(bench: Bench) -> None:
    evaluated = {}
    for queue in ("wait", "skip"):
        held = evaluating_here(bench, delay=4)
        settings = {"eval_async": True, "eval_queue": queue, "eval_strategy": "steps", "eval_steps": 1}
        history = bench.train(callbacks=[held], **settings).state.log_history
        evaluated[queue] = [one["step"] for one in history if "eval_loss" in one]
    assert evaluated["wait"] == [1, 2, 3, 4, 5, 6]
    assert evaluated["skip"] == [1, 2, 5, 6]


@shows("average")
def the_average_is_evaluated_and_saved(bench: Bench) -> None:
    settings = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    trainer = bench.train(average="ema", eval_dataset=samples(), **settings)
    assert "eval_average_loss" in trainer.state.log_history[-2]
    saved = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    assert {name for name, _ in trainer.model.named_parameters()} == set(read_average(saved))
    assert not bench.changes_weights({"average": '{"kind": "lawa", "last": 2}'})
    with pytest.raises(ValueError, match="average='mean': kind 'mean' is not one of ema, swa, lawa"):
        bench.args(average="mean")


@shows("branch_from")
def a_run_begins_at_a_checkpoint_of_another(bench: Bench) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2}
    trunk = bench.train(**saves)
    origin = Path(trunk.args.output_dir) / "checkpoint-2"
    branch = bench.train(branch_from=str(origin), **saves)
    assert sum(map(len, branch.model.trained)) < sum(map(len, trunk.model.trained))
    assert torch.equal(branch.model.head.weight, trunk.model.head.weight)
    assert not (Path(branch.args.output_dir) / "checkpoint-2").exists()
    with pytest.raises(ValueError, match="is of the run in output_dir"):
        bench.args(branch_from=str(origin), output_dir=trunk.args.output_dir)


@shows("cooldown")
def the_rate_falls_to_0_from_the_checkpoint_on(bench: Bench) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "lr_scheduler_type": "constant"}
    origin = Path(bench.train(**settings).args.output_dir) / "checkpoint-2"

    def logged(**more: Any) -> list[float]:
        history = bench.train(branch_from=str(origin), **settings, **more).state.log_history
        return [entry["learning_rate"] for entry in history if "learning_rate" in entry and entry["step"] > 2]

    assert logged() == [0.1] * 4
    assert logged(cooldown="linear") == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert logged(cooldown="1-sqrt")[2] == pytest.approx(0.1 * (1 - 0.5**0.5))
    with pytest.raises(ValueError, match="begins at the rate of a checkpoint"):
        bench.train(cooldown="linear")


@shows("loss_kernel")
def the_logits_are_never_made(bench: Bench) -> None:
    assert has_logits(bench) == {True}
    assert has_logits(bench, loss_kernel="chunked") == {False}
    with pytest.raises(ValueError, match=r"loss_kernel='fast'.*'auto', 'chunked'"):
        bench.args(loss_kernel="fast")


@shows("max_tokens_per_batch")
def batches_are_as_large_as_the_budget_allows(bench: Bench) -> None:
    lengths = [1 + i * 5 % 12 for i in range(12)]
    rows = [{**row, "input_ids": [0] * length} for row, length in zip(samples(), lengths, strict=True)]
    batches = bench.train(train_dataset=rows, max_tokens_per_batch=24, per_device_train_batch_size=8).model.trained
    assert sorted(i for batch in batches for i in batch) == list(range(12))
    assert len({len(batch) for batch in batches}) > 2
    assert all(len(batch) * max(lengths[i] for i in batch) <= 24 for batch in batches)
    with pytest.raises(DataError, match=r"Sample 7 of the training data has 12 tokens, more than max_tokens_per_batch"):
        bench.train(train_dataset=rows, max_tokens_per_batch=11, per_device_train_batch_size=8)


def rows_of(bench: Bench, lengths: list[int], **settings: Any) -> list[list[int]]:
    """The position ids of all rows that a causal model is trained on."""
    model = llama()
    items = [{"input_ids": [3] * length, "labels": [3] * length} for length in lengths]
    trainer = bench.trainer(model=model, train_dataset=items, per_device_train_batch_size=1, **settings)
    return [batch["position_ids"].tolist()[0] for batch in trainer.get_train_dataloader()]


@shows("packing")
def whole_samples_share_a_row(bench: Bench) -> None:
    rows = rows_of(bench, [5, 3, 6, 2], packing="best_fit", packing_length=8)
    assert sorted(rows) == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 1]]
    with pytest.raises(ValueError, match=r"packing='first_fit'.*'best_fit'"):
        bench.args(packing="first_fit", packing_length=8)


@shows("packing_length")
def rows_are_filled_up_to_this_length(bench: Bench) -> None:
    assert len(rows_of(bench, [5, 3, 6, 2], packing="best_fit", packing_length=16)) == 1
    assert len(rows_of(bench, [5, 3, 6, 2], packing="best_fit", packing_length=6)) == 3


@shows("packing_overflow")
def what_is_longer_than_a_row_is_refused_or_split(bench: Bench) -> None:
    with pytest.raises(DataError, match=r"Sample 1 of the training data has 9 tokens, more than packing_length=8"):
        rows_of(bench, [5, 9], packing="best_fit", packing_length=8)
    rows = rows_of(bench, [5, 9], packing="best_fit", packing_length=8, packing_overflow="split")
    assert sorted(map(len, rows)) == [6, 8]


@shows("pad_to_multiple_of")
def batches_are_padded_to_fewer_lengths(bench: Bench) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0})), pad_token="[PAD]")
    texts = [{"input_ids": [1] * length, "labels": 0} for length in (3, 5, 9, 11)]

    def lengths(**settings: Any) -> set[int]:
        trainer = bench.trainer(
            processing_class=tokenizer, train_dataset=texts, remove_unused_columns=False, **settings
        )
        return {batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader()}

    assert lengths(pad_to_multiple_of=8) <= {8, 16}
    assert lengths() <= {5, 9, 11}


@shows("save_async")
def a_save_is_behind_training_s_back_or_not(bench: Bench) -> None:
    def committed_by(**settings: Any) -> set[str]:
        names: set[str] = set()
        commit = CheckpointStore.commit

        def observed(*args: Any) -> Any:
            names.add(threading.current_thread().name)
            return commit(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointStore, "commit", observed)
            bench.train(save_strategy="steps", save_steps=3, **settings)
        return names

    class Watches(TrainerCallback):
        def on_save(self, *args: Any, **kwargs: Any) -> None: ...

    assert committed_by() == {"checkpoint-writer"}
    assert committed_by(save_async=False) == {"MainThread"}
    assert committed_by(callbacks=[Watches()]) == {"MainThread"}
    assert committed_by(callbacks=[Watches()], save_async=True) == {"checkpoint-writer"}


@shows("save_failure")
def a_checkpoint_that_cannot_be_written_ends_the_run_or_not(bench: Bench) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "commit", full)
        with pytest.raises(OSError, match="No space left"):
            bench.train(save_strategy="steps", save_steps=3)
        trainer = bench.train(save_strategy="steps", save_steps=3, save_failure="continue")
    assert trainer.state.global_step == 6
    with pytest.raises(ValueError, match=r"save_failure='ignore'.*'stop', 'continue'"):
        bench.args(save_failure="ignore")


@shows("log_history_limit")
def a_checkpoint_holds_the_newest_logs_and_the_journal_all(bench: Bench) -> None:
    saves = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 1}
    trainer = bench.train(**saves, log_history_limit=2)
    folder = Path(trainer.args.output_dir)
    for step in (3, 6):
        state = OriginalState.load_from_json(str(folder / f"checkpoint-{step}" / "trainer_state.json"))
        assert [entry["step"] for entry in state.log_history] == [step - 1, step]
    assert [entry["step"] for entry in read(folder).of("log")][:6] == [1, 2, 3, 4, 5, 6]
    assert len(bench.train(**saves).state.log_history) == 7
    assert not bench.changes_weights({"log_history_limit": 2})


@shows("ledger")
def visits_and_losses_of_each_sample_are_written(bench: Bench) -> None:
    def ledger(**settings: Any) -> Path:
        return Path(bench.train(**settings).args.output_dir) / "ledger.parquet"

    table, _ = read_table(ledger(ledger=True))
    assert table["visits"].to_pylist() == [1] * 12
    assert not ledger().exists()
    assert not bench.changes_weights({"ledger": True})


@shows("id_column")
def rows_are_named_by_their_ids(bench: Bench) -> None:
    rows = [{**row, "id": f"doc-{number}"} for number, row in enumerate(samples())]
    trainer = bench.train(train_dataset=rows, ledger=True, id_column="id")
    table, _ = read_table(Path(trainer.args.output_dir) / "ledger.parquet")
    assert set(table["id"].to_pylist()) <= {row["id"] for row in rows}
    trainer.quarantine(["doc-3"])
    assert '"sample": "doc-3"' in (Path(trainer.args.output_dir) / "quarantine.jsonl").read_text()


@shows("journal")
def the_record_of_a_run_that_neither_saves_nor_tracks_is_written_if_it_is_asked_for(bench: Bench) -> None:
    def has_journal(**settings: Any) -> bool:
        return (Path(bench.train(**settings).args.output_dir) / "journal.jsonl").exists()

    assert not has_journal(save_strategy="no")
    assert has_journal(save_strategy="no", journal=True)
    assert has_journal(save_strategy="no", report_to="tensorboard")
    assert has_journal(save_strategy="steps")
    assert not has_journal(save_strategy="steps", journal=False)
    assert not bench.changes_weights({"journal": True})
