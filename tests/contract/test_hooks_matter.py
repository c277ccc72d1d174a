"""What an override returns is what the run uses: each published hook, replaced once."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, Subset
from transformers import default_data_collator

import trainwright

from .._support.small import losses
from . import doubles
from .doubles import same, weights

Override = Callable[..., Any]


def overriding(**methods: Override) -> type[Any]:
    """A subclass of Trainer with these methods; each gets `base`, the class above, to call."""
    made: type[Any] = type("Overriding", (trainwright.Trainer,), dict(methods))
    return made


def run(output_dir: Path, cls: Any = None, **how: Any) -> Any:
    trainer = doubles.trainer(output_dir, cls, **how)
    trainer.train()
    return trainer


base = trainwright.Trainer


# -- data -------------------------------------------------------------------------------------------------------------


def test_get_train_dataloader_may_be_a_plain_one(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    class Own(trainwright.Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.train_dataset, batch_size=8, collate_fn=default_data_collator)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(inputs["x"])
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = run(tmp_path, Own, settings={"max_steps": -1, "num_train_epochs": 2})
    data = torch.stack([item["x"] for item in doubles.samples()])
    assert trainer.state.max_steps == 8
    assert torch.equal(torch.cat(seen), torch.cat([data, data]))


def test_get_train_dataloader_may_be_any_iterable_of_batches(tmp_path: Path) -> None:
    batches = [{"x": torch.ones(2, doubles.FEATURES), "labels": torch.zeros(2)}] * 5
    trainer = run(
        tmp_path,
        overriding(get_train_dataloader=lambda self: batches),
        settings={"max_steps": -1, "num_train_epochs": 1},
    )
    assert trainer.state.global_step == 5


def test_get_train_sampler_decides_the_order(tmp_path: Path) -> None:
    in_order = overriding(_get_train_sampler=lambda self, train_dataset=None: SequentialSampler(self.train_dataset))
    own = run(tmp_path, in_order)
    asked = run(tmp_path, settings={"train_sampling_strategy": "sequential"})
    assert same(weights(own), weights(asked))
    assert not same(weights(own), weights(run(tmp_path)))


def test_get_dataloader_is_the_maker_of_all_three(tmp_path: Path) -> None:
    made: list[tuple[str, int]] = []

    def get(self: Any, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        made.append((description, batch_size))
        return base._get_dataloader(self, Subset(dataset, range(8)), description, batch_size, *args, **kwargs)

    trainer = run(tmp_path, overriding(_get_dataloader=get), settings={"max_steps": -1, "num_train_epochs": 1})
    assert trainer.state.max_steps == 2
    assert trainer.evaluate(doubles.samples(20)) is not None
    assert len(trainer.predict(doubles.samples(20)).predictions) == 8
    assert [size for _, size in made] == [4, 8, 8]


def test_get_eval_dataloader_and_sampler_decide_what_is_evaluated(tmp_path: Path) -> None:
    data = doubles.samples(12)

    def loader(self: Any, eval_dataset: Any = None) -> Any:
        return DataLoader(data[:5], batch_size=2)

    trainer = doubles.trainer(tmp_path, overriding(get_eval_dataloader=loader))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        doubles.trainer(tmp_path, eval_dataset=data[:5]).evaluate()["eval_loss"], rel=1e-6
    )
    backwards = overriding(_get_eval_sampler=lambda self, eval_dataset: range(len(eval_dataset) - 1, -1, -1))
    found = doubles.trainer(tmp_path, backwards).predict(data).label_ids
    assert found.tolist() == pytest.approx([item["labels"] for item in reversed(data)])


def test_get_test_dataloader_decides_what_is_predicted(tmp_path: Path) -> None:
    few = overriding(get_test_dataloader=lambda self, test_dataset: DataLoader(test_dataset[:3], batch_size=2))
    assert len(doubles.trainer(tmp_path, few).predict(doubles.samples(8)).predictions) == 3


def test_remove_unused_columns_decides_what_the_collator_sees(tmp_path: Path) -> None:
    import datasets

    seen: set[str] = set()

    def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.update(items[0])
        return {name: torch.tensor([item[name] for item in items]) for name in ("x", "labels")}

    data = datasets.Dataset.from_list([item | {"x": item["x"].tolist(), "note": 1} for item in doubles.samples(16)])
    run(tmp_path, train_dataset=data, data_collator=collate)
    assert seen == {"x", "labels"}
    run(
        tmp_path,
        overriding(_remove_unused_columns=lambda self, dataset, description=None: dataset),
        train_dataset=data,
        data_collator=collate,
    )
    assert seen == {"x", "labels", "note"}


def test_set_signature_columns_decides_which_columns_stay(tmp_path: Path) -> None:
    seen: set[str] = set()

    def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.update(items[0])
        return {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in ("x", "labels")}

    def with_note(self: Any) -> None:
        self._signature_columns = ["x", "labels", "note"]

    data = [item | {"note": 1, "other": 2} for item in doubles.samples(16)]
    run(tmp_path, overriding(_set_signature_columns_if_needed=with_note), train_dataset=data, data_collator=collate)
    assert seen == {"x", "labels", "note"}


def test_get_collator_with_removed_columns_decides_the_collator(tmp_path: Path) -> None:
    def zeros(items: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(len(items), doubles.FEATURES), "labels": torch.zeros(len(items))}

    trainer = run(
        tmp_path, overriding(_get_collator_with_removed_columns=lambda self, data_collator, description=None: zeros)
    )
    assert same({"w": trainer.model.body[0].weight}, {"w": doubles.model().body[0].weight})  # its input was zero


def test_num_examples_and_initial_values_decide_how_long_training_is(tmp_path: Path) -> None:
    told = run(tmp_path, overriding(num_examples=lambda self, dataloader: 1234), settings={"max_steps": -1})
    assert told.state.max_steps == 24
    log = told.state.log_history[-1]
    assert log["train_samples_per_second"] / log["train_steps_per_second"] == pytest.approx(3 * 1234 / 24, rel=0.2)

    def shorter(self: Any, args: Any, dataloader: Any) -> tuple[Any, ...]:
        return (1, *base.set_initial_training_values(self, args, dataloader)[1:6], 2)

    trainer = run(tmp_path, overriding(set_initial_training_values=shorter), settings={"max_steps": -1})
    assert trainer.state.num_train_epochs == 1
    assert trainer.state.max_steps == 2
    assert set(trainer.lr_scheduler.get_last_lr()) == {0.0}


def test_get_total_train_batch_size_is_asked_by_the_initial_values(tmp_path: Path) -> None:
    asks = overriding(get_total_train_batch_size=lambda self, args: 4321)
    trainer = doubles.trainer(tmp_path, asks)
    assert trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[4] == 4321


def test_get_tp_size_shares_the_batch_out(tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path, overriding(get_tp_size=lambda self: 1, get_cp_size=lambda self: 1))
    assert trainer.get_total_train_batch_size(trainer.args) == 4


# -- one step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_get_batch_samples_decides_the_number_of_items(accumulation: int, tmp_path: Path) -> None:
    def doubled(self: Any, *args: Any) -> tuple[Any, Any]:
        samples, num_items = base.get_batch_samples(self, *args)
        return samples, num_items * 2

    how = {"settings": {"gradient_accumulation_steps": accumulation, "max_grad_norm": 0.0, "optim": "sgd"}}
    plain = run(tmp_path, model=doubles.model(doubles.CountsItems), **how)
    halved = run(tmp_path, overriding(get_batch_samples=doubled), model=doubles.model(doubles.CountsItems), **how)
    assert losses(halved)[0] == losses(plain)[0] / 2
    assert not same(weights(halved), weights(plain))


def test_get_num_items_in_batch_decides_the_number_of_items(tmp_path: Path) -> None:
    def doubled(self: Any, batch_samples: Any, device: Any) -> Any:
        return base._get_num_items_in_batch(self, batch_samples, device) * 2

    make = {"model": doubles.model(doubles.CountsItems)}
    plain = losses(run(tmp_path, **copy.deepcopy(make)))
    assert losses(run(tmp_path, overriding(_get_num_items_in_batch=doubled), **make))[0] == plain[0] / 2


def test_get_batch_samples_decides_the_batches(tmp_path: Path) -> None:
    def zeros(self: Any, *args: Any) -> tuple[Any, Any]:
        samples, num_items = base.get_batch_samples(self, *args)
        return [{name: torch.zeros_like(value) for name, value in one.items()} for one in samples], num_items

    trainer = run(tmp_path, overriding(get_batch_samples=zeros))
    assert same({"w": trainer.model.body[0].weight}, {"w": doubles.model().body[0].weight})


def test_compute_loss_decides_the_loss(tmp_path: Path) -> None:
    def nothing(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = base.compute_loss(self, model, inputs, True, num_items_in_batch)
        return (0 * loss, outputs) if return_outputs else 0 * loss

    trainer = run(tmp_path, overriding(compute_loss=nothing), eval_dataset=doubles.samples(8))
    assert losses(trainer) == [0.0, 0.0, 0.0]
    assert same(weights(trainer), doubles.model().state_dict())
    assert trainer.evaluate()["eval_loss"] == 0.0


def test_compute_loss_of_an_older_subclass_needs_no_number_of_items(tmp_path: Path) -> None:
    def older(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    assert same(weights(run(tmp_path, overriding(compute_loss=older))), weights(run(tmp_path)))


@pytest.mark.parametrize(("scaled", "factor"), [(None, 1.0), (False, 1.0), (True, 4.0)])
def test_loss_is_scaled_for_ga_says_who_divides(scaled: bool | None, factor: float, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 4, "max_steps": 1}
    plain = losses(run(tmp_path, settings=settings))[0]
    cls = type("Scaled", (trainwright.Trainer,), {"loss_is_scaled_for_ga": scaled})
    assert losses(run(tmp_path, cls, settings=settings))[0] == pytest.approx(factor * plain)


def test_model_accepts_loss_kwargs_may_be_set_after_the_constructor(tmp_path: Path) -> None:
    handed: list[Any] = []

    class Hears(doubles.CountsItems):
        def forward(self, x: Any, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            handed.append(num_items_in_batch)
            return super().forward(x, labels, num_items_in_batch)

    class Refuses(trainwright.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    run(tmp_path, Refuses, model=doubles.model(Hears))
    assert handed == [None] * 3
    run(tmp_path, model=doubles.model(Hears))
    assert [int(number) for number in handed[3:]] == [4, 4, 4]


def test_training_step_decides_what_is_logged_and_done(tmp_path: Path) -> None:
    def scaled(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = base.training_step(self, *args, **kwargs)
        return loss * 10

    plain = run(tmp_path)
    tenfold = run(tmp_path, overriding(training_step=scaled))
    assert losses(tenfold) == pytest.approx([10 * loss for loss in losses(plain)])
    assert same(weights(tenfold), weights(plain))


def test_training_step_may_do_everything_itself(tmp_path: Path) -> None:
    def own(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss = model(**self._prepare_inputs(inputs))["loss"]
        self.accelerator.backward(loss)
        return loss.detach()

    assert same(weights(run(tmp_path, overriding(training_step=own))), weights(run(tmp_path)))


@pytest.mark.parametrize("hook", ["_prepare_inputs", "_prepare_input"])
def test_prepare_inputs_decides_what_the_model_gets(hook: str, tmp_path: Path) -> None:
    def zeros(self: Any, value: Any) -> Any:
        value = getattr(base, hook)(self, value)
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value)
        return {name: torch.zeros_like(one) for name, one in value.items()} if hook == "_prepare_inputs" else value

    trainer = run(tmp_path, overriding(**{hook: zeros}), eval_dataset=doubles.samples(8))
    assert same({"w": trainer.model.body[0].weight}, {"w": doubles.model().body[0].weight})
    assert trainer.predict(doubles.samples(4)).label_ids.tolist() == [0.0] * 4


@pytest.mark.parametrize("hook", ["compute_loss_context_manager", "autocast_smart_context_manager"])
def test_a_context_is_entered_around_the_loss(hook: str, tmp_path: Path) -> None:
    types: list[torch.dtype] = []

    class Hears(doubles.Regressor):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            types.append(self.body[0](x).dtype)
            return super().forward(x, labels)

    def half(self: Any, *args: Any) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    trainer = run(tmp_path, overriding(**{hook: half}), model=doubles.model(Hears))
    trainer.predict(doubles.samples(4))
    assert types == [torch.bfloat16] * 4


def test_clip_and_grad_norm_decide_the_gradient_and_the_log(tmp_path: Path) -> None:
    def clears(self: Any, model: Any) -> Any:
        for parameter in model.parameters():
            parameter.grad.zero_()
        return torch.tensor(5.0)

    trainer = run(tmp_path, overriding(_clip_grad_norm=clears))
    assert same(weights(trainer), doubles.model().state_dict())
    assert [entry["grad_norm"] for entry in trainer.state.log_history[:-1]] == [5.0] * 3
    told = run(tmp_path, overriding(_get_grad_norm=lambda self, model, grad_norm=None: 7.0))
    assert [entry["grad_norm"] for entry in told.state.log_history[:-1]] == [7.0] * 3


def test_get_learning_rate_is_what_is_logged(tmp_path: Path) -> None:
    trainer = run(tmp_path, overriding(_get_learning_rate=lambda self: 0.5))
    assert [entry["learning_rate"] for entry in trainer.state.log_history[:-1]] == [0.5] * 3


def test_floating_point_ops_and_tokens_are_summed(tmp_path: Path) -> None:
    def count(self: Any, inputs: Any) -> None:
        self.state.num_input_tokens_seen += 7

    counts = overriding(floating_point_ops=lambda self, inputs: 100, _track_num_input_tokens=count)
    trainer = run(tmp_path, counts, settings={"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all"})
    assert trainer.state.total_flos == 600
    assert trainer.state.num_input_tokens_seen == 42


# -- optimizer and schedule -------------------------------------------------------------------------------------------


def test_create_optimizer_may_make_another(tmp_path: Path) -> None:
    def sgd(self: Any, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        return self.optimizer

    own = run(tmp_path, overriding(create_optimizer=sgd))
    handed = doubles.model()
    optimizer = torch.optim.SGD(handed.parameters(), lr=0.3)
    given = run(tmp_path, model=handed, optimizers=(optimizer, None))
    assert same(weights(own), weights(given))
    assert not same(weights(own), weights(run(tmp_path)))


def test_create_optimizer_may_only_return_it(tmp_path: Path) -> None:
    def returns(self: Any, model: Any = None) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.3)

    trainer = run(tmp_path, overriding(create_optimizer=returns))
    assert not same(weights(trainer), doubles.model().state_dict())
    assert isinstance(getattr(trainer.optimizer, "optimizer", trainer.optimizer), torch.optim.SGD)


def test_create_scheduler_may_make_another(tmp_path: Path) -> None:
    def halves(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 1, gamma=0.5)
        return self.lr_scheduler

    trainer = run(tmp_path, overriding(create_scheduler=halves))
    assert [entry["learning_rate"] for entry in trainer.state.log_history[:-1]] == [0.01, 0.005, 0.0025]


def test_create_optimizer_and_scheduler_may_make_both(tmp_path: Path) -> None:
    """The original never calls it."""

    def both(self: Any, num_training_steps: int) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.1)

    trainer = run(tmp_path, overriding(create_optimizer_and_scheduler=both))
    assert [entry["learning_rate"] for entry in trainer.state.log_history[:-1]] == pytest.approx([0.3, 0.03, 0.003])
    assert not same(weights(trainer), weights(run(tmp_path)))


def test_get_optimizer_cls_and_kwargs_names_the_class(tmp_path: Path) -> None:
    static = staticmethod(lambda args, model=None: (torch.optim.Adagrad, {"lr": 0.2}))
    trainer = run(tmp_path, overriding(get_optimizer_cls_and_kwargs=static))
    assert isinstance(getattr(trainer.optimizer, "optimizer", trainer.optimizer), torch.optim.Adagrad)
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 0.2


def test_get_decay_parameter_names_makes_the_groups(tmp_path: Path) -> None:
    only_head = overriding(get_decay_parameter_names=lambda self, model: ["head.weight"])
    trainer = run(tmp_path, only_head, settings={"weight_decay": 0.5})
    decayed, others = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    assert len(decayed["params"]) == 1
    assert decayed["params"][0] is trainer.model.head.weight
    assert len(others["params"]) == len(list(trainer.model.parameters())) - 1


# -- the run ----------------------------------------------------------------------------------------------------------


def test_inner_training_loop_holds_a_whole_run(tmp_path: Path) -> None:
    order: list[str] = []

    class Wraps(trainwright.Trainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            order.append("before")
            try:
                return super()._inner_training_loop(*args, **kwargs)
            finally:
                order.append("after")

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            order.append("step")
            return super().training_step(*args, **kwargs)

    assert doubles.trainer(tmp_path, Wraps).train().global_step == 3
    assert order == ["before", "step", "step", "step", "after"]


def test_inner_training_loop_may_return_something_else(tmp_path: Path) -> None:
    assert doubles.trainer(tmp_path, overriding(_inner_training_loop=lambda self, **kwargs: "done")).train() == "done"


def test_call_model_init_makes_the_model(tmp_path: Path) -> None:
    made = doubles.model()
    trainer = run(tmp_path, overriding(call_model_init=lambda self, trial=None: made), model_init=lambda: None)
    assert trainer.model is made


def test_wrap_model_decides_what_is_run(tmp_path: Path) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module
            self.num_calls = 0

        def forward(self, **inputs: Any) -> Any:
            self.num_calls += 1
            return self.module(**inputs)

    def wrap(self: Any, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return Wrapper(model) if training else base._wrap_model(self, model, training, dataloader)

    trainer = run(tmp_path, overriding(_wrap_model=wrap))
    assert trainer.model_wrapped.num_calls == 3
    assert trainer.model is trainer.model_wrapped.module


def test_move_model_to_device_is_asked(tmp_path: Path) -> None:
    moved: list[Any] = []
    doubles.trainer(tmp_path, overriding(_move_model_to_device=lambda self, model, device: moved.append(device)))
    assert moved == [torch.device("cpu")]


def test_create_accelerator_is_where_settings_of_it_go(tmp_path: Path) -> None:
    def create(self: Any) -> None:
        base.create_accelerator_and_postprocess(self)
        self.gather_function = "mine"

    assert doubles.trainer(tmp_path, overriding(create_accelerator_and_postprocess=create)).gather_function == "mine"


def test_maybe_log_save_evaluate_is_called_after_every_step_and_decides(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def quiet(self: Any, tr_loss: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((self.state.global_step, self.control.should_log))

    trainer = run(tmp_path, overriding(_maybe_log_save_evaluate=quiet), settings={"logging_steps": 2, "max_steps": 4})
    assert [step for step, _ in seen][:4] == [1, 2, 3, 4]
    assert losses(trainer) == []


def test_maybe_log_save_evaluate_of_others_reads_and_resets_the_loss(tmp_path: Path) -> None:
    """As TRL and others write it: the running sum is a tensor that is read and emptied in place."""
    means: list[float] = []

    def reads(self: Any, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            total = tr_loss.item()
            means.append(total / (self.state.global_step - self._globalstep_last_logged))
            tr_loss -= tr_loss
            self._total_loss_scalar += total
            self._globalstep_last_logged = self.state.global_step
            self.log({"loss": means[-1]})
            self.control.should_log = False

    plain = doubles.trainer(tmp_path)
    own = doubles.trainer(tmp_path, overriding(_maybe_log_save_evaluate=reads))
    expected = plain.train()
    found = own.train()
    assert means == losses(plain) == losses(own)
    assert found.training_loss == pytest.approx(expected.training_loss)


@pytest.mark.parametrize("event", ["log", "store_flos"])
def test_log_is_where_logs_are_added_to(event: str, tmp_path: Path) -> None:
    class Adds(trainwright.Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log(logs | {"mine": 1.0}, start_time)

        def store_flos(self) -> None:
            super().store_flos()
            self.state.total_flos = 11

    trainer = run(tmp_path, Adds)
    if event == "log":
        assert all(entry["mine"] == 1.0 for entry in trainer.state.log_history)
    else:
        assert trainer.state.log_history[-1]["total_flos"] == 11


def test_finalize_training_returns_the_result(tmp_path: Path) -> None:
    def adds(self: Any, *args: Any) -> Any:
        output = base._finalize_training(self, *args)
        return output._replace(metrics=output.metrics | {"mine": 1})

    assert doubles.trainer(tmp_path, overriding(_finalize_training=adds)).train().metrics["mine"] == 1


@pytest.mark.parametrize("is_zero", [True, False])
def test_the_main_process_is_the_one_that_prints_and_writes(is_zero: bool, tmp_path: Path) -> None:
    trainer = run(tmp_path, overriding(is_world_process_zero=lambda self: is_zero))
    trainer.save_metrics("train", {"train_loss": 1.0})
    trainer.save_state()
    assert (tmp_path / "train_results.json").exists() == is_zero
    assert (tmp_path / "trainer_state.json").exists() == is_zero


# -- evaluation -------------------------------------------------------------------------------------------------------

EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}


def test_prediction_step_decides_what_is_predicted(tmp_path: Path) -> None:
    def constant(self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        size = len(inputs["x"])
        return torch.tensor(3.0), torch.full((size,), 4.0), torch.full((size,), 5.0)

    trainer = doubles.trainer(
        tmp_path,
        overriding(prediction_step=constant),
        compute_metrics=lambda found: {"sum": float(found.predictions.sum()), "labels": float(found.label_ids.mean())},
    )
    metrics = trainer.evaluate(doubles.samples(10))
    assert (metrics["eval_loss"], metrics["eval_sum"], metrics["eval_labels"]) == (3.0, 40.0, 5.0)
    assert trainer.predict(doubles.samples(10)).predictions.tolist() == [4.0] * 10


def test_evaluation_loop_decides_the_result_of_evaluate_and_predict(tmp_path: Path) -> None:
    def adds(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.evaluation_loop(self, *args, **kwargs)
        output.metrics[f"{kwargs['metric_key_prefix']}_mine"] = 1.0
        return output

    trainer = doubles.trainer(tmp_path, overriding(evaluation_loop=adds))
    assert trainer.evaluate(doubles.samples(8))["eval_mine"] == 1.0
    assert trainer.predict(doubles.samples(8)).metrics["test_mine"] == 1.0


@pytest.mark.parametrize("hook", ["evaluate", "_evaluate"])
def test_evaluate_decides_which_model_is_best(hook: str, tmp_path: Path) -> None:
    def told(self: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {"eval_mine": -abs(self.state.global_step - 2.0)}

    settings = EVALUATED | {
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "mine",
        "greater_is_better": True,
    }
    trainer = run(
        tmp_path,
        overriding(**{hook: told}),
        settings=settings,
        eval_dataset=doubles.samples(8),
        compute_metrics=lambda found: {},
    )
    assert trainer.state.best_global_step == 2
    assert trainer.state.best_metric == 0.0
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"


def test_determine_best_metric_decides_what_is_saved(tmp_path: Path) -> None:
    settings = EVALUATED | {"save_strategy": "best", "metric_for_best_model": "loss"}

    def third(self: Any, metrics: Any, trial: Any) -> bool:
        assert metrics["eval_loss"] > 0
        return bool(self.state.global_step == 3)

    run(
        tmp_path,
        overriding(_determine_best_metric=third),
        settings=settings | {"max_steps": 5},
        eval_dataset=doubles.samples(8),
    )
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_load_best_model_is_asked_at_the_end(tmp_path: Path) -> None:
    asked: list[int] = []
    settings = EVALUATED | {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    run(
        tmp_path,
        overriding(_load_best_model=lambda self: asked.append(self.state.best_global_step)),
        settings=settings,
        eval_dataset=doubles.samples(8),
    )
    assert len(asked) == 1


# -- checkpoints ------------------------------------------------------------------------------------------------------

SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def files(folder: Path) -> set[str]:
    """Names in a directory, less the run's journal, which no hook writes."""
    return {path.name for path in folder.iterdir()} - {"journal.jsonl"}


def writes(name: str) -> Override:
    """An override that writes a file where it is told to, beside what the hook does itself."""

    def override(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        getattr(base, name)(self, output_dir, *args, **kwargs)
        Path(output_dir or self.args.output_dir, f"{name}.txt").write_text(str(self.state.global_step))

    return override


@pytest.mark.parametrize(
    "hook", ["save_model", "_save", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler"]
)
def test_a_file_that_a_saving_hook_adds_is_in_the_checkpoint(hook: str, tmp_path: Path) -> None:
    trainer = run(tmp_path, overriding(**{hook: writes(hook)}), settings=SAVED)
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        assert (folder / f"{hook}.txt").read_text() == str(step)
        assert f"{hook}.txt" in json.dumps(json.loads((folder / "manifest.json").read_text()))
    assert files(tmp_path) == {"checkpoint-2", "checkpoint-4"}  # nothing is left of the staging directories
    again = doubles.trainer(tmp_path, settings=SAVED | {"max_steps": 6})
    assert again.train(resume_from_checkpoint=True).global_step == 6
    assert trainer.state.global_step == 4


def test_save_may_write_the_model_in_another_way(tmp_path: Path) -> None:
    def own(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)  # type: ignore[arg-type]
        Path(output_dir, "own.txt").write_text("model")  # type: ignore[arg-type]

    trainer = run(tmp_path, overriding(_save=own), settings=SAVED)
    assert "own.txt" in files(tmp_path / "checkpoint-2")
    assert "model.safetensors" not in files(tmp_path / "checkpoint-2")
    trainer.save_model(str(tmp_path / "here"))
    assert files(tmp_path / "here") == {"own.txt"}


def test_save_checkpoint_may_add_a_file_after_it(tmp_path: Path) -> None:
    """As others write it: the path put together from output_dir and step, once the checkpoint is there."""

    def adds(self: Any, model: Any, trial: Any) -> None:
        base._save_checkpoint(self, model, trial)
        Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", "more.json").write_text("{}")

    run(tmp_path, overriding(_save_checkpoint=adds), settings=SAVED)
    assert "more.json" in files(tmp_path / "checkpoint-2")
    again = doubles.trainer(tmp_path, settings=SAVED | {"max_steps": 6})
    assert again.train(resume_from_checkpoint=True).global_step == 6


def test_save_checkpoint_may_save_nothing(tmp_path: Path) -> None:
    run(tmp_path, overriding(_save_checkpoint=lambda self, model, trial: None), settings=SAVED)
    assert files(tmp_path) == set()


def test_get_output_dir_decides_where(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    run(tmp_path / "run", overriding(_get_output_dir=lambda self, trial: str(elsewhere)), settings=SAVED)
    assert files(elsewhere) == {"checkpoint-2", "checkpoint-4"}


@pytest.mark.parametrize("hook", ["_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state"])
def test_a_loading_hook_that_does_nothing_loads_nothing(hook: str, tmp_path: Path) -> None:
    """Each holds its own part of an exact resume."""

    class Noisy(doubles.Regressor):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            return super().forward(torch.nn.functional.dropout(x, 0.3, self.training), labels)

    def resumed(cls: Any) -> Any:
        trainer = doubles.trainer(tmp_path, cls, settings=SAVED, model=doubles.model(Noisy))
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        return trainer

    whole = run(tmp_path, settings=SAVED, model=doubles.model(Noisy))
    assert same(weights(resumed(None)), weights(whole))
    heard: list[Any] = []
    without = overriding(**{hook: lambda self, checkpoint=None, model=None: heard.append(checkpoint)})
    assert not same(weights(resumed(without)), weights(whole))
    assert heard == [str(tmp_path / "checkpoint-2")]


def test_load_callback_state_is_asked_on_resume(tmp_path: Path) -> None:
    run(tmp_path, settings=SAVED)
    asked: list[int] = []

    def hears(self: Any) -> None:
        asked.append(self.state.global_step)

    trainer = doubles.trainer(tmp_path, overriding(_load_callback_state=hears), settings=SAVED)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert asked == [2]


# -- callbacks --------------------------------------------------------------------------------------------------------


def test_control_that_a_callback_returns_takes_the_place_of_the_current_one(tmp_path: Path) -> None:
    class Stops(trainwright.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            new = copy.copy(control)
            new.should_training_stop = state.global_step == 2
            return new

    assert run(tmp_path, callbacks=[Stops()], settings={"max_steps": 7}).state.global_step == 2


@pytest.mark.parametrize("event", ["on_substep_end", "on_step_begin", "on_step_end", "on_epoch_end", "on_log"])
def test_a_flag_is_obeyed_wherever_it_is_set(event: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Half-way through a window there is no step yet; who stops there asked for it, the data are not to blame."""

    def stops(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True

    callback = type("Stops", (trainwright.TrainerCallback,), {event: stops})()
    settings = {"max_steps": -1, "num_train_epochs": 3, "gradient_accumulation_steps": 2}
    steps = run(tmp_path, callbacks=[callback], settings=settings).state.global_step
    assert steps == {"on_substep_end": 0, "on_step_begin": 0, "on_epoch_end": 4}.get(event, 1)
    assert "gave no batch" not in caplog.text


def test_what_a_callback_is_given(tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    class Hears(trainwright.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            given.update(kwargs)

    trainer = run(tmp_path, callbacks=[Hears])
    names = {"model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"}
    assert names <= given.keys()
    assert given["model"] is trainer.model
    assert given["lr_scheduler"] is trainer.lr_scheduler
    assert len(given["train_dataloader"]) == 8


def test_callbacks_come_and_go(tmp_path: Path) -> None:
    class First(trainwright.TrainerCallback): ...

    trainer = doubles.trainer(tmp_path)
    trainer.add_callback(First)
    assert First in [type(one) for one in trainer.callback_handler.callbacks]
    assert isinstance(trainer.pop_callback(First), First)
    assert trainer.pop_callback(First) is None
    trainer.add_callback(First())
    trainer.remove_callback(First)
    assert First not in [type(one) for one in trainer.callback_handler.callbacks]


def test_a_callback_of_transformers_is_a_callback(tmp_path: Path) -> None:
    import transformers

    class Stops(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    assert run(tmp_path, callbacks=[Stops()]).state.global_step == 1
