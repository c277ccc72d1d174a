"""The ledger: visits, tokens and losses of each sample, from the step's own logits, for every kind of row."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from pyarrow import parquet
from torch import nn
from torch.nn import functional

import trainwright
from trainwright.capabilities.ledger.formulas import find_kept_losses
from trainwright.capabilities.ledger.sample_losses import segments
from trainwright.capabilities.ledger.table import LEDGER_NAME, Ledger, as_table, identity_columns, read_table
from trainwright.cli.ledger import answer
from trainwright.data.identity import SampleId, as_hex, fingerprint
from trainwright.errors import DataError

from ..._support.two_processes import run, tell
from ...contract import doubles

SIZE = 22
EPOCHS = 2


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def with_about(text: str | None) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        table = parquet.read_table(path)
        parquet.write_table(table.replace_schema_metadata(None if text is None else {"trainwright": text}), path)

    return change


def with_column(name: str, values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        table = parquet.read_table(path)
        place = table.column_names.index(name)
        table = table.remove_column(place)
        parquet.write_table(table if values is None else table.append_column(name, [[values] * len(table)]), path)

    return change


DAMAGED_LEDGERS = {
    "a pipe": as_pipe,
    "a directory": as_directory,
    "cut off": cut_off,
    "no metadata": with_about(None),
    "metadata of another type": with_about("[5]"),
    "metadata nested too deeply": with_about("[" * 100_000),
    "a huge number of samples": with_about('{"num_samples": 1e400, "sources": null}'),
    "samples that are text": with_about('{"num_samples": "x", "sources": null}'),
    "sources that are a number": with_about('{"num_samples": 4, "sources": 5}'),
    "no visits": with_column("visits", None),
    "visits that are text": with_column("visits", "x"),
    "a negative sample": with_column("sample", -1),
    "a huge sample": with_column("sample", 2**62),
    "a sample that is no number": with_column("sample", float("nan")),
    "probes that are a list": with_about('{"num_samples": 6, "sources": null, "probes": [1]}'),
    "a source that is a number": with_column("source", 3),
    "a row that is text": with_column("row", "x"),
    "a fingerprint that is none": with_column("fingerprint", "x"),
}


@pytest.mark.parametrize("change", DAMAGED_LEDGERS.values(), ids=DAMAGED_LEDGERS.keys())
def test_a_ledger_that_no_run_writes_ends_in_a_sentence(change: Callable[[Path], None], tmp_path: Path) -> None:
    ledger = Ledger()
    ones = np.ones(4, np.int64)
    ledger.add(np.arange(4), step=ones, visits=ones, tokens=ones, loss_sum=ones)
    path = tmp_path / LEDGER_NAME
    rows = identity_columns([SampleId("train", row) for row in range(4)], range(4))
    parquet.write_table(as_table(ledger.noted(), rows, {"num_samples": 6, "sources": {"train": 6}, "probes": {}}), path)
    never = [{"name": f"train[{row}]", "sample": row} for row in (4, 5)]
    assert answer(tmp_path, "never", number=9, data=None) == never
    change(path)
    for question in ("top", "never", "repeated", "text", "by-source"):
        with pytest.raises(DataError, match=f"{LEDGER_NAME}"):
            answer(tmp_path, question, number=9, data=None)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(doubles.FEATURES, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"logits": logits} | ({} if labels is None else {"loss": functional.cross_entropy(logits, labels)})


class YesNo(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"loss": functional.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


class Unknown(Classifier):
    """A loss that no formula of ours gives."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        outputs = super().forward(x, labels)
        return {**outputs, "loss": outputs["loss"] * 1.5}


class Says(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        losses = functional.cross_entropy(self.body(x), labels, reduction="none") * 1.5
        return trainwright.LossOutput(losses.mean(), num_items=len(losses), sample_losses=losses)


def classes() -> list[dict[str, Any]]:
    return [{"x": row["x"], "labels": number % 3} for number, row in enumerate(doubles.samples(SIZE))]


def yes_and_no() -> list[dict[str, Any]]:
    return [{"x": row["x"], "labels": torch.eye(3)[row["labels"]]} for row in classes()]


def gpt2() -> Any:
    torch.manual_seed(0)
    config = T.GPT2Config(
        vocab_size=32,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    return T.GPT2LMHeadModel(config)


def texts(lengths: list[int] | None = None) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 32, (n,), generator=generator).tolist() for n in lengths or [8] * SIZE]
    return [{"input_ids": row, "labels": [-100, -100, *row[2:]] if len(row) > 4 else row} for row in rows]


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    parts = {"input_ids": 0, "labels": -100}
    return {
        name: nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=fill)
        for name, fill in parts.items()
    }


def trained(folder: Path, model: Any, rows: Any, resume: Any = None, **more: Any) -> Any:
    settings = {"max_steps": -1, "num_train_epochs": EPOCHS, "ledger": True}
    parts = {name: more.pop(name) for name in ("callbacks", "data_collator", "eval_dataset") if name in more}
    one = doubles.trainer(folder, settings=settings | more, model=model, train_dataset=rows, **parts)
    one.train(resume_from_checkpoint=resume)
    return one


def rows_in(folder: Path) -> dict[str, Any]:
    table, about = read_table(folder / LEDGER_NAME)
    return {**{name: np.asarray(table[name].to_pylist()) for name in table.column_names}, "about": about}


def logged(one: Any) -> list[float]:
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    {"logging_steps": 3},
    {"train_sampling_strategy": "sequential"},
    {"label_smoothing_factor": 0.1},
]
CASES: dict[str, tuple[Callable[[], Any], Callable[[], list[dict[str, Any]]], int]] = {
    "classes": (lambda: doubles.model(Classifier), classes, 1),
    "yes and no": (lambda: doubles.model(YesNo), yes_and_no, 1),
    "regression": (doubles.model, lambda: doubles.samples(SIZE), 1),
    "a model that counts": (lambda: doubles.model(doubles.CountsItems), lambda: doubles.samples(SIZE), 1),
    "texts": (gpt2, texts, 6),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_of_samples_add_up_to_the_loss_of_each_step(name: str, tmp_path: Path) -> None:
    build, data, tokens = CASES[name]
    one = trained(tmp_path, build(), data()[:20], num_train_epochs=1)
    found = rows_in(tmp_path)
    assert found["sample"].tolist() == found["row"].tolist() == list(range(20))
    assert found["visits"].tolist() == [1] * 20
    assert found["tokens"].tolist() == [tokens] * 20
    assert found["about"].items() >= {"step": 5, "num_samples": 20, "sources": {"train": 20}, "is_mean": False}.items()
    assert found["fingerprint"].tolist() == [as_hex(fingerprint(row)) for row in data()[:20]]
    of_step = [found["mean_loss"][found["last_step"] == step].mean() for step in range(1, 6)]
    assert of_step == pytest.approx(logged(one), abs=1e-6)
    np.testing.assert_allclose(found["last_loss"], found["loss_sum"] / found["tokens"])


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: ", ".join(one) or "default")
def test_visits_are_counted_over_epochs_whatever_forms_the_batches(settings: dict[str, Any], tmp_path: Path) -> None:
    one = trained(tmp_path, doubles.model(Classifier), classes()[:20], **settings)
    found = rows_in(tmp_path)
    assert found["visits"].tolist() == [EPOCHS] * 20
    assert not found["about"]["is_mean"]
    steps = settings.get("logging_steps", 1)
    if 10 % steps == 0:
        assert found["loss_sum"].sum() / found["tokens"].sum() == pytest.approx(np.mean(logged(one)), abs=1e-6)


def test_rows_that_are_packed_are_split_by_sample(tmp_path: Path) -> None:
    lengths = [3, 9, 16, 2, 5, 5, 12, 7, 4, 16, 6, 1]
    rows = texts(lengths)
    model = gpt2()
    alone = []
    for row in rows:
        labels = torch.tensor(row["labels"])[None]
        logits = model(torch.tensor(row["input_ids"])[None]).logits[:, :-1].detach()
        losses = functional.cross_entropy(logits[0], labels[0, 1:], reduction="none")[labels[0, 1:] != -100]
        alone.append((len(losses), float(losses.mean()) if len(losses) else float("nan")))
    settings = {"packing": "best_fit", "packing_length": 16, "learning_rate": 0.0, "num_train_epochs": 1}
    trained(tmp_path, model, rows, per_device_train_batch_size=2, **settings)
    found = rows_in(tmp_path)
    assert found["visits"].tolist() == [1] * len(rows)
    assert found["tokens"].tolist() == [num for num, _ in alone]
    np.testing.assert_allclose(found["mean_loss"], [mean for _, mean in alone], atol=1e-5)


@pytest.mark.parametrize("packing", [{}, {"packing": "best_fit", "packing_length": 16}], ids=["padded", "packed"])
def test_a_loss_kernel_without_logits_gives_the_losses_of_its_tokens(packing: dict[str, Any], tmp_path: Path) -> None:
    rows = texts([3, 9, 16, 2, 5, 5, 12, 7])
    more: dict[str, Any] = packing or {"data_collator": padded}
    found = []
    for kernel in ("chunked", None):
        folder = tmp_path / str(kernel)
        trained(folder, gpt2(), rows, loss_kernel=kernel, num_train_epochs=1, **more)
        found.append(rows_in(folder))
    ours, plain = found
    assert not ours["about"]["is_mean"]
    for name in ("visits", "tokens"):
        assert ours[name].tolist() == plain[name].tolist()
    np.testing.assert_allclose(ours["mean_loss"], plain["mean_loss"], rtol=1e-5)


def test_losses_of_tokens_are_looked_up_where_the_backward_pass_keeps_them() -> None:
    logits = torch.randn(6, 5, requires_grad=True)
    labels = torch.tensor([0, -100, 3, 4, -100, 1])
    losses = functional.cross_entropy(logits, labels, reduction="none")
    mean = functional.cross_entropy(logits, labels)
    for loss, depth in (
        (mean, 0),
        (mean * 3 / 2, 2),
        (functional.cross_entropy(logits, labels, reduction="sum") / 4, 1),
    ):
        found = find_kept_losses(loss, depth)
        assert found is not None
        assert torch.equal(found[0], losses)
        assert torch.equal(found[1], labels)
        assert not found[0].requires_grad
    assert find_kept_losses(mean * 2, 0) is None
    assert find_kept_losses(functional.mse_loss(logits, logits * 2), 0) is None
    assert find_kept_losses(mean.detach(), 1) is None


def test_segments_of_packed_rows() -> None:
    rows = [[(4, 0, 3), (1, 0, 1)], [(2, 8, 12)]]
    assert list(segments(rows, 5, shifts=True)) == [(4, 2, 1), (1, 1, 1), (-1, 2, 0), (2, 3, 0), (-1, 2, 0)]  # type: ignore[arg-type]
    assert list(segments(rows, 4, shifts=False)) == [(4, 3, 1), (1, 1, 1), (2, 4, 0)]  # type: ignore[arg-type]


def test_loss_that_is_not_known_gives_each_sample_mean_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = trained(tmp_path / "mean", doubles.model(Unknown), classes()[:20], num_train_epochs=1)
    assert sum("mean loss of its micro-batch" in record.message for record in caplog.records) == 1
    found = rows_in(tmp_path / "mean")
    assert found["about"]["is_mean"]
    assert found["mean_loss"] == pytest.approx([logged(one)[step - 1] for step in found["last_step"]], abs=1e-6)
    caplog.clear()
    said = trained(tmp_path / "said", doubles.model(Says), classes()[:20], num_train_epochs=1)
    assert not [record for record in caplog.records if "mean loss" in record.message]
    found = rows_in(tmp_path / "said")
    assert logged(said) == pytest.approx(
        [found["mean_loss"][found["last_step"] == step].mean() for step in range(1, 6)], abs=1e-6
    )
    assert len(set(found["mean_loss"])) == 20


class Stops(trainwright.TrainerCallback):
    def __init__(self, at: int) -> None:
        self._at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("size", [2, 4])
def test_a_resumed_run_has_the_ledger_of_an_uninterrupted_one(size: int, tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 4, "per_device_train_batch_size": 2}
    trained(tmp_path / "whole", doubles.model(Classifier), classes(), **saves)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", doubles.model(Classifier), classes(), callbacks=[Stops(10)], **saves)
    assert not (tmp_path / "cut" / LEDGER_NAME).exists()
    checkpoint = tmp_path / "cut" / "checkpoint-9"
    assert LEDGER_NAME in (checkpoint / "manifest.json").read_text()
    resized = saves | {"per_device_train_batch_size": size}
    trained(tmp_path / "cut", doubles.model(Classifier), classes(), resume=str(checkpoint), **resized)
    one, other = (rows_in(tmp_path / name) for name in ("whole", "cut"))
    names = [name for name in one if name != "about"] if size == 2 else ["sample", "visits", "tokens"]
    assert all(np.array_equal(one[name], other[name]) for name in names)


def test_a_step_refused_by_a_guard_is_not_a_visit(tmp_path: Path) -> None:
    rows = classes()[:12]
    rows[5]["x"] = torch.full((doubles.FEATURES,), torch.nan)
    settings = {"train_sampling_strategy": "sequential", "num_train_epochs": 1, "logging_steps": 3, "incidents": False}
    trained(tmp_path, doubles.model(Classifier), rows, **settings)
    found = rows_in(tmp_path)
    assert found["sample"].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert np.isfinite(found["loss_sum"]).all()


def test_logs_have_the_loss_and_the_tokens_of_each_source(tmp_path: Path) -> None:
    rows = texts()[:12]
    for number, row in enumerate(rows):  # of different numbers of labels
        row["labels"] = [-100] * (number % 6) + row["input_ids"][number % 6 :]
    parts = {"code": rows[:8], "chat": rows[8:]}
    one = trained(tmp_path, gpt2(), parts, num_train_epochs=1, save_strategy="steps", save_steps=2)
    found = rows_in(tmp_path)
    assert list(zip(found["source"], found["row"], strict=True)) == [
        *(("code", row) for row in range(8)),
        *(("chat", row) for row in range(4)),
    ]
    assert found["about"]["sources"] == {"code": 8, "chat": 4}
    for step, entry in enumerate(one.state.log_history[:3], start=1):
        of_step = found["last_step"] == step
        names = set(found["source"][of_step])
        assert {name.removeprefix("loss/") for name in entry if name.startswith("loss/")} == names
        whole = sum(entry[f"tokens/{name}"] * entry[f"loss/{name}"] for name in names)
        num = sum(entry[f"tokens/{name}"] for name in names)
        assert whole / num == pytest.approx(entry["loss"], abs=1e-6)
        assert num == found["tokens"][of_step].sum()
        assert sum(entry[f"samples/{name}"] for name in names) == of_step.sum() == 4
    evaluates = {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": parts}
    plain = trained(tmp_path / "plain", gpt2(), parts, num_train_epochs=1, ledger=False, logging_steps=3, **evaluates)
    assert plain.state.log_history[0]["samples/chat"] == 4
    evaluated = {name for entry in plain.state.log_history for name in entry if name.endswith("_loss")}
    assert evaluated == {"eval_code_loss", "eval_chat_loss", "train_loss"}
    assert {*plain.evaluate()} >= {"eval_code_loss", "eval_chat_loss"}
    assert not (tmp_path / "plain" / LEDGER_NAME).exists()


def test_samples_are_named_by_a_column(tmp_path: Path) -> None:
    rows = [{**row, "name": f"doc-{number}"} for number, row in enumerate(classes()[:8])]
    trained(tmp_path, doubles.model(Classifier), rows, ledger="name")
    assert rows_in(tmp_path)["id"].tolist() == [f"doc-{number}" for number in range(8)]


def test_processes_add_to_each_other(tmp_path: Path) -> None:
    one = Ledger()
    two = Ledger()
    both = Ledger()
    visit = {"visits": np.array([1, 1]), "tokens": np.array([2, 3]), "loss_sum": np.array([4.0, 3.0])}
    one.add(np.array([0, 5]), step=np.array([1, 1]), **visit)
    two.add(np.array([5, 2]), step=np.array([2, 2]), **visit)
    for part in (two, one):
        both.merge(part.taken())
    assert both.visits[:6].tolist() == [1, 0, 1, 0, 0, 2]
    assert both.mean_loss[5] == (3.0 + 4.0) / (3 + 2)
    assert (both.last_step[5], both.last_loss[5]) == (2, 2.0)  # of the later step, whichever process comes first
    assert not one.visits.any()


def test_a_file_that_is_not_a_ledger_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    path = tmp_path / LEDGER_NAME
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not the ledger"):
        read_table(path)
    parquet.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(DataError, match="not the ledger"):
        read_table(path)


def of_two_ranks(folder: str) -> None:
    settings = {"per_device_train_batch_size": 3, "save_strategy": "steps", "save_steps": 2}
    one = trained(Path(folder), doubles.model(Classifier), classes(), **settings)
    tell(losses=logged(one))


@pytest.mark.process
def test_two_processes_write_one_ledger(tmp_path: Path) -> None:
    script = "import sys\nfrom tests.capabilities.ledger.test_ledger import of_two_ranks\nof_two_ranks(sys.argv[1])"
    done = run(script, str(tmp_path / "out"), folder=tmp_path)
    found = rows_in(tmp_path / "out")
    saved = rows_in(tmp_path / "out" / "checkpoint-2")
    assert found["visits"].tolist() == [EPOCHS] * SIZE  # the tail of 4 is shared 2 and 2, of 22 in steps of 6
    of_step = {step: found["last_loss"][found["last_step"] == step].mean() for step in range(5, 9)}
    assert list(of_step.values()) == pytest.approx(done.told[0]["losses"][4:], abs=1e-6)
    assert saved["visits"].tolist() == [1] * 12


class Kills(trainwright.TrainerCallback):
    def __init__(self, at: int, after: Path) -> None:
        self._at = at
        self._after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._at:
            while not self._after.exists():  # it is written on a thread
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


UNION = {"code": 13, "chat": 30, "web": 8}


def of_a_union(folder: str, workers: str, size: str, dies_at: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(doubles.FEATURES, generator=generator), "labels": i % 3} for i in range(51)]
    drawn = iter(rows)
    sources = {name: [next(drawn) for _ in range(num)] for name, num in UNION.items()}
    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "per_device_train_batch_size": int(size),
        "dataloader_num_workers": int(workers),
        "num_train_epochs": 1,
    }
    resumes = any(Path(folder).glob("checkpoint-*"))
    kills = Kills(int(dies_at), Path(folder) / "checkpoint-2")
    model = doubles.model(Classifier)
    one = trained(Path(folder), model, sources, resume=resumes, callbacks=[kills], **settings)
    tell(step=one.state.global_step)


@pytest.mark.process
@pytest.mark.parametrize(  # the case with two of each shows what the others do
    ("workers", "ranks"), [(2, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 1), (2, 1), (0, 2)))]
)
def test_union_that_is_killed_and_resumed_with_other_batches_trains_row_once(
    workers: int, ranks: int, tmp_path: Path
) -> None:
    script = "import sys\nfrom tests.capabilities.ledger.test_ledger import of_a_union\nof_a_union(*sys.argv[1:])"
    out = tmp_path / "out"
    with pytest.raises(AssertionError):  # a process ended otherwise than by itself
        run(script, str(out), str(workers), str(8 // ranks), "4", folder=tmp_path, processes=ranks)
    saved = rows_in(out / "checkpoint-2")
    assert saved["visits"].tolist() == [1] * 16, "it was killed under way"
    assert not (out / LEDGER_NAME).exists()
    done = run(script, str(out), str(workers), str(6 // ranks), "-1", folder=tmp_path, processes=ranks)
    assert done.told[0]["step"] == 2 + 6  # of 51 rows 16 are done, and the others come in sixes
    found = rows_in(out)
    assert found["visits"].tolist() == [1] * 51
    pairs = [(name, row) for name, num in UNION.items() for row in range(num)]
    assert list(zip(found["source"], found["row"], strict=True)) == pairs


@pytest.mark.process
def test_workers_fetch_ahead_of_the_samples_that_are_noted(tmp_path: Path) -> None:
    one = trained(tmp_path, doubles.model(Classifier), classes()[:20], num_train_epochs=1, dataloader_num_workers=2)
    found = rows_in(tmp_path)
    of_step = [found["mean_loss"][found["last_step"] == step].mean() for step in range(1, 6)]
    assert of_step == pytest.approx(logged(one), abs=1e-6)
