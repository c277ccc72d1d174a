"""Checks of the fields about number formats, memory and what is done to the model for a run."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainwright.config import rules
from trainwright.errors import ArgumentError, LegacyNameWarning, MissingPackageError
from trainwright.run import build

from .bench import Bench, Item, Listener, are_equal, llama, logged, samples, sentences, weights
from .table import shows

NUMBERS = itertools.count()
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@shows("bf16")
def the_forward_pass_is_in_bfloat16(bench: Bench) -> None:
    trainer = bench.train(bf16=True)
    assert trainer.model.types["training"] == torch.bfloat16
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert bench.train().model.types["training"] == torch.float32


@shows("fp16")
def the_forward_pass_is_in_float16_and_the_loss_is_scaled(bench: Bench) -> None:
    trainer = bench.train(fp16=True)
    assert trainer.model.types["training"] == torch.float16
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer.accelerator.scaler.get_scale() > 1
    assert bench.train().accelerator.scaler is None


@shows("bf16_full_eval")
def evaluation_is_in_bfloat16(bench: Bench) -> None:
    evaluates_in(bench, "bf16")


@shows("fp16_full_eval")
def evaluation_is_in_float16(bench: Bench) -> None:
    evaluates_in(bench, "fp16")


def evaluates_in(bench: Bench, kind: str) -> None:
    trainer = bench.trainer(**{f"{kind}_full_eval": True})
    before = weights(trainer.model)
    trainer.evaluate()
    assert trainer.model.types["evaluation"] == HALF[kind]
    assert are_equal(weights(trainer.model), before)
    trainer.train()
    assert trainer.model.types["training"] == torch.float32


@shows("tf32")
def matrix_products_of_gpus_are_in_tf32_or_not(bench: Bench) -> None:
    def settings() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    before = settings()
    bench.trainer()
    assert settings() == before
    bench.trainer(tf32=False)
    assert settings() == (False, False)
    with pytest.raises(ArgumentError, match="tf32=True"):
        bench.trainer(tf32=True, use_cpu=False)
    assert settings() == (False, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "supports_tf32", lambda device: True)
        bench.trainer(tf32=True, use_cpu=False)
    assert settings() == (True, True)


def checkpointed_layers(bench: Bench, **settings: Any) -> tuple[Any, list[list[bool]], list[Any]]:
    """A trained Llama; at each step, which of its layers recompute; and the options of their function."""
    seen: list[list[bool]] = []
    options: list[Any] = []

    def look(model: Any) -> None:
        seen.append([layer.gradient_checkpointing for layer in model.model.layers])
        function = getattr(model.model.layers[0], "_gradient_checkpointing_func", None)
        options.append(function and function.keywords)

    parts: dict[str, Any] = {"model": llama(), "train_dataset": sentences(), "callbacks": [Listener(look)]}
    trainer = bench.train(**parts, max_steps=2, **settings)
    assert [layer.gradient_checkpointing for layer in trainer.model.model.layers] == 4 * [False]
    return trainer, seen, options


@shows("activation_checkpointing")
def activations_are_recomputed_in_training_only(bench: Bench) -> None:
    plain, seen, _ = checkpointed_layers(bench)
    assert seen == 2 * [4 * [False]]
    trainer, seen, options = checkpointed_layers(bench, activation_checkpointing=True)
    assert seen == 2 * [4 * [True]]
    assert options[0] == {"use_reentrant": False}
    assert logged(trainer, "loss") == logged(plain, "loss")


@shows("activation_checkpointing_kwargs", marks="framework")  # transformers 5.23
def some_layers_and_options(bench: Bench) -> None:
    how = {"every_n_layers": 2, "determinism_check": "none", "use_reentrant": False}
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": how}
    _, seen, options = checkpointed_layers(bench, **settings)
    assert seen == 2 * [[True, False, True, False]]
    assert options[0] == {"determinism_check": "none", "use_reentrant": False}
    assert "activation_checkpointing" in rules.advise(bench.args(activation_checkpointing_kwargs=how))[0]


@shows("gradient_checkpointing")
def the_older_name_does_the_same(bench: Bench) -> None:
    with pytest.warns(LegacyNameWarning, match="activation_checkpointing"):
        _, seen, _ = checkpointed_layers(bench, gradient_checkpointing=True)
    assert seen == 2 * [4 * [True]]


@shows("gradient_checkpointing_kwargs", marks="framework")  # transformers 5.23
def the_older_name_of_the_options_does_the_same(bench: Bench) -> None:
    settings = {"activation_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 4}}
    with pytest.warns(LegacyNameWarning, match="activation_checkpointing_kwargs"):
        _, seen, _ = checkpointed_layers(bench, **settings)
    assert seen == 2 * [[True, False, False, False]]


def compiled_with(bench: Bench, **settings: Any) -> list[dict[str, Any]]:
    """The options with which a backend that only watches was called, once for each graph."""
    calls: list[dict[str, Any]] = []

    def watch(graph: Any, inputs: Any, **options: Any) -> Any:
        calls.append(options)
        return graph.forward

    name = f"watch{next(NUMBERS)}"
    torch._dynamo.register_backend(watch, name=name)
    bench.train(max_steps=1, train_dataset=undocumented(), torch_compile_backend=name, **settings)
    return calls


def undocumented() -> list[Item]:
    """Samples that leave no trace in the diary, which a compiler could not write."""
    return [{"x": row["x"], "labels": row["labels"]} for row in samples()]


@shows("torch_compile")
def the_model_is_compiled_and_saved_as_it_was(bench: Bench) -> None:
    settings = {"train_dataset": undocumented(), "save_strategy": "steps", "max_steps": 1}
    trainer = bench.train(torch_compile=True, torch_compile_backend="eager", **settings)
    assert isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule)
    assert trainer.model_wrapped._orig_mod is trainer.model
    saved = load_file(f"{trainer.args.output_dir}/checkpoint-1/model.safetensors")
    assert set(saved) == set(trainer.model.state_dict())
    assert bench.args(torch_compile=True).torch_compile_backend == "inductor"
    regional = bench.args(torch_compile="regional", torch_compile_mode="default")
    assert (regional.torch_compile, regional.torch_compile_backend) == ("regional", "inductor")
    with pytest.raises(ValueError, match=r"torch_compile='blocks'.*True, False, 'regional'"):
        bench.args(torch_compile="blocks")
    plain = bench.train(**settings)
    assert plain.model_wrapped is plain.model
    assert are_equal(weights(plain.model), weights(trainer.model))


@shows("torch_compile_backend")
def this_backend_compiles(bench: Bench) -> None:
    assert compiled_with(bench)


@shows("torch_compile_mode")
def the_backend_is_told_the_mode(bench: Bench) -> None:
    assert {options.get("mode") for options in compiled_with(bench, torch_compile_mode="max-autotune")} == {
        "max-autotune"
    }
    assert bench.args(torch_compile_mode="default").torch_compile


def fake_liger(bench: Bench) -> list[dict[str, Any]]:
    """A stand-in for the package, and the options that it was called with."""
    calls: list[dict[str, Any]] = []
    package = ModuleType("liger_kernel")
    module = ModuleType("liger_kernel.transformers")
    vars(module)["_apply_liger_kernel_to_instance"] = lambda model, **options: calls.append(options)
    bench.monkeypatch.setitem(sys.modules, package.__name__, package)
    bench.monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@shows("use_liger_kernel")
def kernels_are_put_in_or_the_package_is_asked_for(bench: Bench) -> None:
    if importlib.util.find_spec("liger_kernel") is None:
        with pytest.raises(MissingPackageError, match="pip install liger-kernel"):
            bench.train(use_liger_kernel=True)
    calls = fake_liger(bench)
    bench.train()
    assert calls == []
    bench.train(use_liger_kernel=True)
    assert calls == [{}]


@shows("liger_kernel_config")
def these_kernels_are_put_in(bench: Bench) -> None:
    calls = fake_liger(bench)
    bench.train(use_liger_kernel=True, liger_kernel_config={"rope": False})
    assert calls == [{"rope": False}]
    assert "use_liger_kernel" in rules.advise(bench.args(liger_kernel_config={"rope": False}))[0]


@shows("use_cache")
def the_model_keeps_its_cache(bench: Bench) -> None:
    for use_cache in (False, True):
        model = llama()
        trainer = bench.trainer(model=model, train_dataset=sentences(), eval_dataset=sentences(), use_cache=use_cache)
        assert model.config.use_cache is use_cache
        assert ("past_key_values" in model(input_ids=torch.tensor([[3, 4]]))) is use_cache
        assert trainer.evaluate()["eval_loss"] > 0


@shows("neftune_noise_alpha")
def embeddings_are_noisy_in_training_only(bench: Bench) -> None:
    ids = torch.tensor([[3, 4, 5]])

    def shifts(alpha: float | None) -> tuple[float, float]:
        """By how much the embedding's output differs from its table: in training mode, in evaluation mode."""
        found = []

        def look(model: Any) -> None:
            embedding = model.get_input_embeddings()
            for mode in (True, False):
                embedding.train(mode)
                found.append((embedding(ids) - embedding.weight[ids]).abs().max().item())
            embedding.train()

        model = llama()
        bench.train(
            model=model, train_dataset=sentences(), max_steps=1, neftune_noise_alpha=alpha, callbacks=[Listener(look)]
        )
        assert not model.get_input_embeddings()._forward_hooks
        return found[0], found[1]

    bound = 5 / (3 * 16) ** 0.5
    (noisy, quiet) = shifts(5.0)
    without = shifts(None)
    assert 0 < noisy <= bound
    assert quiet == 0
    assert without == (0, 0)


@shows("torch_empty_cache_steps")
def memory_is_given_back_every_so_often(bench: Bench) -> None:
    def calls(**settings: Any) -> int:
        emptied: list[int] = []
        trainer = bench.trainer(**settings)
        bench.monkeypatch.setattr(trainer._trainwright.services.engine, "empty_cache", lambda: emptied.append(1))
        trainer.train()
        return len(emptied)

    assert calls() == 0
    assert calls(torch_empty_cache_steps=2) == 3
