"""Evaluation: its loss does not depend on the batch size, predictions are all there in order, training is untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertForTokenClassification, DataCollatorForTokenClassification

from trainwright import Trainer

from .._support.small import data, differing, make_trainer, models, module, train, weights

IGNORED = -100
NUM = 11  # a prime: no batch size but 1 and all divides it


def token_classifier() -> nn.Module:
    config = BertConfig(
        vocab_size=models.VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
        num_labels=models.CLASSES,
    )
    return BertForTokenClassification(config)


def tagged(size: int) -> list[dict[str, Any]]:
    """Ragged, most labels ignored, one row without a single label."""
    items = data.ragged_texts(size)
    for i, item in enumerate(items):
        length = 2 + i * 3 % 7
        item["input_ids"] = (item["input_ids"] * 3)[:length]
        item["attention_mask"] = [1] * length
        item["labels"] = [IGNORED if (i == 3 or (i + j) % (1 + i % 4)) else j % 3 for j in range(length)]
    return items


def prompted(size: int) -> list[dict[str, Any]]:
    """Ragged in its labels, not in its ids: 0 to 7 of 9 labels ignored, and one row wholly."""
    items = data.sequences(size)
    for i, item in enumerate(items):
        hidden = 9 if i == 4 else i % 8
        item["labels"] = [IGNORED] * hidden + item["input_ids"][hidden:]
    return items


def regressor() -> nn.Module:
    model = models.bert()
    config = model.config
    config.num_labels = 1
    config.problem_type = "regression"
    return type(model)(config)


def measured(size: int) -> list[dict[str, Any]]:
    return [{**item, "labels": float(i)} for i, item in enumerate(data.texts(size))]


def tags(model: nn.Module) -> dict[str, Any]:
    return {"data_collator": DataCollatorForTokenClassification(data.tokenizer())}


def nothing(model: nn.Module) -> dict[str, Any]:
    return {}


Parts = Callable[[nn.Module], dict[str, Any]]
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[Any]], Parts, dict[str, Any]]] = {
    "classifier": (models.bert, data.texts, nothing, {}),
    "tokens": (token_classifier, tagged, tags, {}),
    "causal": (models.llama, prompted, nothing, {}),
    "gpt2": (models.gpt2, prompted, nothing, {}),
    "seq2seq": (models.t5, data.pairs, nothing, {}),
    "regression": (regressor, measured, nothing, {}),
    "module": (models.ReturnsDict, data.vectors, nothing, {}),
    "tuple": (models.ReturnsTuple, data.vectors, nothing, {}),
    "smoothed": (models.llama, prompted, nothing, {"label_smoothing_factor": 0.1}),
    "smoothed-classifier": (models.bert, data.texts, nothing, {"label_smoothing_factor": 0.1}),
}


def evaluator(kind: str, output_dir: Path, **more: Any) -> Any:
    build, items, parts, settings = KINDS[kind]
    model = models.seeded(build)
    return make_trainer(
        output_dir, model=model, train_dataset=None, eval_dataset=items(NUM), **parts(model), **settings | more
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_same_for_every_batch_size(kind: str, tmp_path: Path) -> None:
    losses = [
        evaluator(kind, tmp_path, per_device_eval_batch_size=size).evaluate()["eval_loss"]
        for size in (1, 2, 3, 5, 8, NUM)
    ]
    assert max(losses) - min(losses) <= 1e-6 * abs(losses[0])
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("smoothed")])
def test_the_loss_is_that_of_the_model_over_all_at_once(kind: str, tmp_path: Path) -> None:
    trainer = evaluator(kind, tmp_path, per_device_eval_batch_size=2)
    batch = next(iter(evaluator(kind, tmp_path, per_device_eval_batch_size=NUM).get_eval_dataloader()))
    trainer.model.eval()
    with torch.no_grad():
        output = trainer.model(**batch)
    loss = output[0] if isinstance(output, tuple) else output["loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("size", [1, 4, NUM, 100])
@pytest.mark.parametrize("kind", ["classifier", "tokens", "regression", "module", "tuple"])
def test_predictions_are_one_for_each_sample_in_order(kind: str, size: int, tmp_path: Path) -> None:
    trainer = evaluator(kind, tmp_path, per_device_eval_batch_size=size)
    found = trainer.predict(trainer.eval_dataset)
    alone = evaluator(kind, tmp_path, per_device_eval_batch_size=1)
    assert len(found.predictions) == len(found.label_ids) == NUM
    for i, item in enumerate(trainer.eval_dataset):
        one = alone.predict([item])
        row = found.predictions[i][: one.predictions.shape[1]] if kind == "tokens" else found.predictions[i]
        used = slice(len(item["labels"])) if kind == "tokens" else slice(None)
        np.testing.assert_allclose(row[used], one.predictions[0][used], rtol=1e-4, atol=1e-5)
        assert np.array_equal(np.ravel(found.label_ids[i])[: np.size(item["labels"])], np.ravel(item["labels"]))


def test_ragged_results_are_padded_with_the_ignored_label(tmp_path: Path) -> None:
    trainer = evaluator("tokens", tmp_path, per_device_eval_batch_size=2)
    found = trainer.predict(trainer.eval_dataset)
    longest = max(len(item["input_ids"]) for item in trainer.eval_dataset)
    assert found.predictions.shape == (NUM, longest, models.CLASSES)
    for i in range(0, NUM - 1, 2):
        width = max(len(item["input_ids"]) for item in trainer.eval_dataset[i : i + 2])
        assert (found.predictions[i : i + 2, width:] == IGNORED).all()
        assert (found.label_ids[i : i + 2, width:] == IGNORED).all()
        assert (found.predictions[i : i + 2, :width] != IGNORED).all()


def test_drop_last_drops_nothing_of_a_prediction(tmp_path: Path) -> None:
    """It is a setting of training; a score for each sample is what a prediction promises."""
    trainer = evaluator("classifier", tmp_path, per_device_eval_batch_size=4, dataloader_drop_last=True)
    assert len(trainer.predict(trainer.eval_dataset).predictions) == NUM


# -- shapes of outputs -----------------------------------------------------------------------------------------------


class Several(models.ReturnsDict):
    """Scores, a nested pair, a number for each sample."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        out = super().forward(x, labels)
        out = {name: value for name, value in out.items() if value is not None}
        return {**out, "pair": (x * 2, {"deep": x[:, :2]}), "number": x.sum(-1)}


@pytest.mark.parametrize("size", [2, 5, NUM])
def test_nested_outputs_keep_their_shape(size: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=Several(), per_device_eval_batch_size=size)
    items = data.vectors(NUM)
    x = torch.stack([item["x"] for item in items]).numpy()
    logits, (double, deep), number = trainer.predict(items).predictions
    assert logits.shape == (NUM, models.CLASSES)
    assert np.array_equal(double, x * 2)
    assert np.array_equal(deep["deep"], x[:, :2])
    np.testing.assert_allclose(number, x.sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [["pair"], ["pair", "number"]])
def test_ignored_entries_are_not_predictions(keys: list[str], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=Several())
    found = trainer.predict(data.vectors(NUM), ignore_keys=keys).predictions
    assert isinstance(found, np.ndarray) == (len(keys) == 2)


@pytest.mark.parametrize("kind", [models.ReturnsDict, models.ReturnsTuple, models.bert])
def test_predictions_without_labels_are_those_with_labels(kind: Any, tmp_path: Path) -> None:
    items = data.texts(NUM) if kind is models.bert else data.vectors(NUM)
    trainer = make_trainer(tmp_path, model=models.seeded(kind))
    with_labels = trainer.predict(items)
    without = trainer.predict([{name: value for name, value in item.items() if name != "labels"} for item in items])
    assert isinstance(without.predictions, np.ndarray)
    assert np.array_equal(without.predictions, with_labels.predictions)
    assert without.label_ids is None
    assert "test_loss" not in without.metrics


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16])
def test_results_of_any_type(dtype: torch.dtype, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        per_device_eval_batch_size=4,
        preprocess_logits_for_metrics=lambda logits, labels: (logits > 0).to(dtype),
    )
    found = trainer.predict(data.vectors(NUM)).predictions
    plain = make_trainer(tmp_path).predict(data.vectors(NUM)).predictions
    assert np.array_equal(found.astype(bool), plain > 0)


# -- what metrics are given ------------------------------------------------------------------------------------------


class Keeps:
    """A `compute_metrics` that remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.last: list[bool] = []

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, Any]:
        self.given.append(prediction)
        self.last.append(compute_result)
        return {"calls": len(self.given)}


def test_metrics_get_all_at_once(tmp_path: Path) -> None:
    keeps = Keeps()
    metrics = evaluator("module", tmp_path, compute_metrics=keeps, per_device_eval_batch_size=4).evaluate()
    (prediction,) = keeps.given
    predictions, labels = prediction
    assert (len(predictions), len(labels)) == (NUM, NUM)
    assert prediction.inputs is None
    assert prediction.losses is None
    assert metrics["eval_calls"] == 1
    assert {"eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"} < metrics.keys()


def test_without_concatenation_metrics_get_the_batches(tmp_path: Path) -> None:
    keeps = Keeps()
    evaluator(
        "tokens", tmp_path, compute_metrics=keeps, per_device_eval_batch_size=4, eval_do_concat_batches=False
    ).evaluate()
    (prediction,) = keeps.given
    assert [len(batch) for batch in prediction.predictions] == [4, 4, 3]
    assert [batch.shape for batch in prediction.label_ids] == [batch.shape[:2] for batch in prediction.predictions]
    assert len({batch.shape[1] for batch in prediction.label_ids}) > 1, "nothing was padded to another batch"


def test_metrics_get_inputs_and_losses_where_asked_for(tmp_path: Path) -> None:
    keeps = Keeps()
    trainer = evaluator(
        "classifier",
        tmp_path,
        compute_metrics=keeps,
        per_device_eval_batch_size=4,
        include_for_metrics=["inputs", "loss"],
    )
    loss = trainer.evaluate()["eval_loss"]
    (prediction,) = keeps.given
    assert prediction.inputs.tolist() == [item["input_ids"] for item in trainer.eval_dataset]
    assert prediction.losses.shape == (NUM,)
    assert prediction.losses.mean() == pytest.approx(loss, rel=1e-6)
    assert len({*prediction.losses[:4].tolist()}) == 1, "each sample has the loss of its batch"


def test_metrics_batch_by_batch(tmp_path: Path) -> None:
    keeps = Keeps()
    trainer = evaluator(
        "module",
        tmp_path,
        compute_metrics=keeps,
        per_device_eval_batch_size=4,
        batch_eval_metrics=True,
        include_for_metrics=["loss"],
    )
    metrics = trainer.evaluate()
    assert [len(prediction.predictions) for prediction in keeps.given] == [4, 4, 3]
    assert keeps.last == [False, False, True]
    assert metrics["eval_calls"] == 3
    assert all(prediction.losses is not None for prediction in keeps.given)
    joined = torch.cat([prediction.predictions for prediction in keeps.given])
    whole = evaluator("module", tmp_path).predict(trainer.eval_dataset).predictions
    np.testing.assert_allclose(joined.numpy(), whole, rtol=1e-6)


def test_logits_are_preprocessed_before_they_are_kept(tmp_path: Path) -> None:
    widths: list[tuple[int, ...]] = []

    def best(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        widths.append((*logits.shape, *labels.shape))
        return logits.argmax(-1)

    trainer = evaluator("module", tmp_path, preprocess_logits_for_metrics=best, per_device_eval_batch_size=4)
    found = trainer.predict(trainer.eval_dataset)
    assert widths == [(4, 3, 4), (4, 3, 4), (3, 3, 3)]
    plain = evaluator("module", tmp_path).predict(trainer.eval_dataset)
    assert np.array_equal(found.predictions, plain.predictions.argmax(-1))


def test_numbers_of_numpy_and_torch_become_plain(tmp_path: Path) -> None:
    metrics = evaluator(
        "module",
        tmp_path,
        compute_metrics=lambda p: {"a": np.float32(0.5), "b": torch.tensor(2), "c": {"d": np.int64(3)}, "eval_e": 1},
    ).evaluate()
    assert (metrics["eval_a"], metrics["eval_b"], metrics["eval_c"], metrics["eval_e"]) == (0.5, 2, {"d": 3}, 1)
    assert [type(metrics[name]) for name in ("eval_a", "eval_b")] == [float, int]


# -- several sets ----------------------------------------------------------------------------------------------------


def test_each_of_several_sets_has_metrics_of_its_own(tmp_path: Path) -> None:
    sets = {"near": data.vectors(5), "far": data.vectors(NUM)[5:]}
    trainer = make_trainer(tmp_path, eval_dataset=sets)
    metrics = trainer.evaluate()
    for name, dataset in sets.items():
        alone = make_trainer(tmp_path).evaluate(dataset)
        assert metrics[f"eval_{name}_loss"] == alone["eval_loss"]
        assert trainer.evaluate(dataset)["eval_loss"] == alone["eval_loss"]
    assert {key.split("_")[1] for key in metrics if key != "epoch"} == {"near", "far"}
    assert trainer.evaluate({"only": sets["near"]}, metric_key_prefix="x")["x_only_loss"] == metrics["eval_near_loss"]


def test_one_of_several_sets_decides(tmp_path: Path) -> None:
    sets = {"near": data.vectors(6), "far": data.vectors(20)[6:]}
    trainer = make_trainer(
        tmp_path,
        eval_dataset=sets,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="far_loss",
        greater_is_better=False,
        learning_rate=0.3,
    )
    trainer.train()
    losses = {e["step"]: e["eval_far_loss"] for e in trainer.state.log_history if "eval_far_loss" in e}
    assert trainer.state.best_metric == min(losses.values())
    assert losses[trainer.state.best_global_step] == min(losses.values())
    assert trainer.evaluate(sets["far"])["eval_loss"] == pytest.approx(min(losses.values()), rel=1e-6)


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.process)])
def test_the_set_that_was_asked_for_is_evaluated(persistent: bool, tmp_path: Path) -> None:
    """Also where dataloaders, with their workers, are kept from one evaluation to the next."""
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True} if persistent else {}
    trainer = make_trainer(tmp_path, eval_dataset=data.vectors(6), **workers)
    own = trainer.evaluate()["eval_loss"]
    other = trainer.evaluate(data.vectors(20)[6:])["eval_loss"]
    assert own != other
    assert other == make_trainer(tmp_path).evaluate(data.vectors(20)[6:])["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == own


# -- streams ---------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(data.vectors(NUM))


def test_a_stream_is_evaluated_like_a_list(tmp_path: Path) -> None:
    listed, streamed = (make_trainer(tmp_path, per_device_eval_batch_size=4) for _ in range(2))
    one = listed.predict(data.vectors(NUM))
    other = streamed.predict(Stream())
    assert np.array_equal(one.predictions, other.predictions)
    assert np.array_equal(one.label_ids, other.label_ids)
    assert one.metrics["test_loss"] == other.metrics["test_loss"]


# -- training is not touched -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_training_with_an_evaluation_at_each_step_equals_training_without(workers: int, tmp_path: Path) -> None:
    one = train(make_trainer(tmp_path, dataloader_num_workers=workers))
    judged = make_trainer(
        tmp_path,
        eval_dataset=data.vectors(9),
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        compute_metrics=lambda p: {"drawn": float(torch.rand(()))},
        dataloader_num_workers=workers,
    )
    other = train(judged)
    assert one.losses() == other.losses()
    assert differing(one.weights, other.weights) == {}


def test_evaluating_leaves_gradients_modes_and_randomness(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_dataset=data.vectors(9))
    trainer.train()
    before = weights(trainer.model)
    state = torch.get_rng_state()
    trainer.evaluate()
    trainer.predict(data.vectors(5))
    assert differing(weights(trainer.model), before) == {}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_another_precision_for_an_evaluation_is_undone_bit_for_bit(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, model=models.bert(), train_dataset=None, eval_dataset=data.texts(NUM), **{name: True}
    )
    before = weights(trainer.model)
    optimizer = trainer.create_optimizer()
    dtypes: set[torch.dtype] = set()
    trainer.model.register_forward_pre_hook(lambda m, *_: dtypes.update(p.dtype for p in m.parameters()))
    rough = trainer.evaluate()["eval_loss"]
    assert dtypes == {torch.bfloat16 if name.startswith("bf16") else torch.float16}
    assert differing(weights(trainer.model), before) == {}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in trainer.model.parameters()}
    fine = make_trainer(tmp_path, model=trainer.model, train_dataset=None, eval_dataset=data.texts(NUM)).evaluate()
    assert rough == pytest.approx(fine["eval_loss"], rel=1e-2)
    assert rough != fine["eval_loss"]


def test_another_precision_is_undone_after_an_error(tmp_path: Path) -> None:
    class Fails(Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of luck")

    trainer = make_trainer(tmp_path, cls=Fails, eval_dataset=data.vectors(3), bf16_full_eval=True)
    before = weights(trainer.model)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.evaluate()
    assert differing(weights(trainer.model), before) == {}


# -- overrides -------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_left_out_where_asked(tmp_path: Path) -> None:
    items = data.vectors(NUM)
    items[5] = {**items[5], "x": torch.full_like(items[5]["x"], float("nan"))}
    loss = make_trainer(tmp_path, per_device_eval_batch_size=1).evaluate(items)["eval_loss"]
    finite = [item for i, item in enumerate(items) if i != 5]
    assert loss == pytest.approx(make_trainer(tmp_path).evaluate(finite)["eval_loss"], rel=1e-6)
    honest = make_trainer(tmp_path, per_device_eval_batch_size=1, logging_nan_inf_filter=False)
    assert np.isnan(honest.evaluate(items)["eval_loss"])


def test_only_ignored_labels_do_not_crash(tmp_path: Path) -> None:
    items = [{**item, "labels": [IGNORED] * len(item["input_ids"])} for item in data.sequences(4)]
    trainer = make_trainer(tmp_path, model=models.llama(), train_dataset=None, eval_dataset=items)
    assert np.isnan(trainer.evaluate()["eval_loss"])


def test_metrics_without_labels_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unlabelled = [{"x": item["x"]} for item in data.vectors(4)]
    keeps = Keeps()
    assert len(make_trainer(tmp_path, compute_metrics=keeps).predict(unlabelled).predictions) == 4
    assert "compute_metrics" not in caplog.text
    make_trainer(tmp_path, compute_metrics=keeps, log_level="warning").evaluate(unlabelled)
    assert "compute_metrics" in caplog.text
    assert keeps.given == []


def test_an_override_of_prediction_step_is_what_counts(tmp_path: Path) -> None:
    class Own(Trainer):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            return torch.tensor(2.0), inputs["x"][:, :1], inputs["labels"]

    trainer = make_trainer(tmp_path, cls=Own, model=module(), per_device_eval_batch_size=4)
    found = trainer.predict(data.vectors(NUM))
    assert found.metrics["test_loss"] == 2.0
    assert found.predictions.shape == (NUM, 1)
