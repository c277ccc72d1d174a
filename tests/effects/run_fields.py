"""Checks of the fields about the run as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import HfArgumentParser, TrainingArguments

from .bench import Bench, StopAt, Toy, are_equal, checkpoints, seeded, weights
from .table import companion, shows


def parsed(*words: str) -> Any:
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(list(words))[0]


@shows("output_dir")
def checkpoints_and_models_go_there(bench: Bench) -> None:
    there = bench.folder / "there"
    trainer = bench.train(output_dir=str(there), save_strategy="steps", save_steps=6)
    trainer.save_model()
    assert checkpoints(there) == [6]
    assert (there / "model.safetensors").is_file()
    bench.trainer(output_dir=None).save_model()
    assert Path("trainer_output/model.safetensors").is_file()


@shows("do_train")
def scripts_ask_for_training(bench: Bench) -> None:
    assert parsed("--do_train").do_train
    assert TrainingArguments().set_training().do_train
    assert not parsed().do_train


@shows("do_eval")
def scripts_ask_for_evaluation_and_so_does_a_strategy(bench: Bench) -> None:
    assert parsed("--do_eval").do_eval
    assert parsed("--eval_strategy", "epoch").do_eval
    assert not parsed("--eval_strategy", "no").do_eval


@shows("do_predict")
def scripts_ask_for_prediction(bench: Bench) -> None:
    assert parsed("--do_predict").do_predict
    assert TrainingArguments().set_testing().do_predict
    assert not parsed().do_predict


@shows("resume_from_checkpoint")
def training_goes_on_from_there(bench: Bench) -> None:
    whole = bench.train()
    first = bench.train(callbacks=[StopAt(4)])
    checkpoint = os.path.join(first.args.output_dir, "checkpoint-4")
    resumed = bench.train(resume_from_checkpoint=checkpoint)
    assert len(resumed.model.trained) == len(whole.model.trained) - 4
    assert are_equal(weights(resumed.model), weights(whole.model))


@shows("seed")
def weights_and_order_follow_the_seed(bench: Bench) -> None:
    def begun(seed: int) -> Any:
        trainer = bench.trainer(seed=seed, model_init=lambda: Toy())
        made = weights(trainer.model)
        trainer.train()
        return made, trainer.model.order

    (made, order) = begun(7)
    (same_made, same_order) = begun(7)
    (other_made, other_order) = begun(8)
    assert are_equal(made, same_made)
    assert order == same_order
    assert not are_equal(made, other_made)
    assert order != other_order


@shows("data_seed")
def the_order_alone_follows_the_data_seed(bench: Bench) -> None:
    def begun(data_seed: int | None) -> Any:
        trainer = bench.trainer(data_seed=data_seed, model_init=lambda: Toy())
        made = weights(trainer.model)
        trainer.train()
        return made, trainer.model.order

    (made, order) = begun(None)
    (same_made, same_order) = begun(8)
    assert are_equal(made, same_made)
    assert order != same_order
    assert sorted(order) == sorted(same_order)


@shows("full_determinism")
def torch_is_told_to_be_deterministic(bench: Bench) -> None:
    bench.trainer()
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    bench.trainer(full_determinism=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert "CUBLAS_WORKSPACE_CONFIG" in os.environ


@shows("use_cpu")
def an_accelerator_is_left_alone(bench: Bench) -> None:
    bench.with_gpu()
    assert bench.args(use_cpu=False).device == torch.device("cuda", 0)
    with_cpu = bench.args(use_cpu=True)
    assert with_cpu.device == torch.device("cpu")
    assert with_cpu.n_gpu == 0
    model = bench.train(use_cpu=True).model
    assert {p.device.type for p in model.parameters()} == {"cpu"}


class Explodes(Toy):
    def forward(self, x: torch.Tensor, index: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        return super().forward(x * (torch.inf if self.training else 1), index, labels)


@shows("debug")
def the_first_layer_with_inf_stops_the_run(bench: Bench) -> None:
    bench.train(model=seeded(Explodes), max_skipped_steps=0)
    trainer = bench.trainer(model=seeded(Explodes), debug="underflow_overflow")
    with pytest.raises(ValueError, match="inf/nan"):
        trainer.train()
    assert len(trainer.model.trained) <= 1
    assert not any(module._forward_hooks for module in trainer.model.modules())


@shows("skip_memory_metrics")
def memory_is_reported(bench: Bench) -> None:
    def stages(**settings: Any) -> set[str]:
        trainer = bench.train(**settings)
        results = [trainer.evaluate(), trainer.predict(trainer.eval_dataset).metrics, *trainer.state.log_history]
        return {name for result in results for name in result if "_mem_" in name}

    assert stages() == set()
    found = stages(skip_memory_metrics=False)
    assert {f"{stage}_mem_cpu_alloc_delta" for stage in ("init", "train", "eval", "test")} <= found
    assert {f"{stage}_mem_cpu_peaked_delta" for stage in ("init", "train", "eval", "test")} <= found


@companion("local_rank", "old launchers pass it on the command line; the rank is read from the environment")
def launchers_may_pass_it(bench: Bench) -> None:
    for words in (("--local_rank", "1"), ("--local-rank=1",)):
        assert parsed(*words).local_rank == 1
    bench.as_process(rank=3, local_rank=1)
    assert parsed("--local_rank", "0").local_process_index == 1
