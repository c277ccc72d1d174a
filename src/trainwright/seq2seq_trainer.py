"""Seq2SeqTrainer: evaluation and prediction by generation. Batches are prepared in `evaluation/generation.py`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

import torch

from trainwright._types import Batch, output_loss
from trainwright.config import resolve
from trainwright.config.behaviour import get_behaviour
from trainwright.errors import GenerationConfigError, ModelError
from trainwright.evaluation import generation
from trainwright.evaluation.outputs import PredictionOutput
from trainwright.support import model_facts
from trainwright.support.hooks import is_overridden
from trainwright.trainer import Trainer

logger = logging.getLogger(__name__)

Settings: TypeAlias = dict[str, Any]  # keywords of `generate`
DEFAULT_LENGTH = 20  # if neither the call nor the model sets a length; generate() would warn and use about the same
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


class Seq2SeqTrainer(Trainer):
    """A Trainer that can generate in evaluations (`predict_with_generate`), so that metrics see the generated text.

    Predictions are generated token ids; logits are not kept. Rows are padded with the padding token to the length in
    the model's generation config, and with -100 between batches that are longer. Encoder-decoder models are given the
    batch without its labels. Decoder-only models are given the prompt, and their predictions are the tokens after it;
    the evaluation data may look like the training data (prompt labels -100), or consist of prompts with the answers as
    labels.
    If `prediction_step` is overridden, with `reproduce="transformers"`, and under `trainwright.compat.install()`,
    decoder-only models are given the whole input, and their predictions begin with it.
    With `num_return_sequences=n`, label row i has n consecutive predictions: rows n*i to n*i + n - 1.

    Raises:
        ModelError: `predict_with_generate` with a model that cannot generate or without a padding token. Raised when an
            evaluation would generate; a warning before that.
        GenerationConfigError: `generation_config` cannot be found, or is not valid.
    """

    _gen_kwargs: Settings = {}  # noqa: RUF012 -- replaced for the duration of a call, never mutated

    def _loss_rows(self, dataloader: Any) -> int | None:
        return None if get_behaviour(self.args).weighs_eval_batches_by_rows else self.args.eval_batch_size

    def _adopt_model(self, model: Any) -> None:
        """Also gives the model the requested generation config; warns before step 1 if generation cannot work."""
        is_configured = Trainer._should_configure(self, model)
        super()._adopt_model(model)
        plan = resolve.generation(self.args)
        if is_configured and plan.config is not None:
            self.model.generation_config = _completed(self.load_generation_config(plan.config), self.model)
        if plan.predicts:
            try:
                _check_can_generate(self.model)
                Seq2SeqTrainer._pad_token_id(self)
            except ModelError as error:  # a run that never generates can train
                logger.warning(
                    "%s Training can begin; predict(), or evaluate() with compute_metrics, will fail.", error
                )

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """Returns a valid GenerationConfig.

        Args:
            gen_config_arg: a GenerationConfig, which is copied, or the file, directory or model name to read it from.

        Returns:
            The configuration, validated.

        Raises:
            GenerationConfigError: it cannot be read, or generation would refuse it.
        """
        from transformers import GenerationConfig

        config = deepcopy(gen_config_arg)
        if not isinstance(gen_config_arg, GenerationConfig):
            path = Path(gen_config_arg)
            place, name = (path.parent, path.name) if path.is_file() else (gen_config_arg, None)
            try:
                config = GenerationConfig.from_pretrained(place, name)
            except OSError as error:
                raise GenerationConfigError(
                    f"generation_config={str(gen_config_arg)!r} could not be loaded: {error} Give a GenerationConfig, "
                    "a directory with a generation_config.json, such a file, or the name of a model."
                ) from error
        try:
            config.validate(strict=True)  # as strict as when it is saved with the model later
        except ValueError as error:
            raise GenerationConfigError(f"generation_config is not valid: {error} Mend it, or leave it out.") from error
        return config

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluates like `Trainer.evaluate`, with generated predictions if `predict_with_generate=True`.

        Args:
            eval_dataset: data, or name -> data; None: the data of the trainer.
            ignore_keys: entries of the model's output that are not predictions.
            metric_key_prefix: prefix of the names of metrics.
            **gen_kwargs: settings of `generate` for this call (max_length, max_new_tokens, num_beams, ...).

        Returns:
            Name -> metric.
        """
        with Seq2SeqTrainer._override_generation(self, gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predicts like `Trainer.predict`, with generated predictions if `predict_with_generate=True`.

        Args:
            test_dataset: the data.
            ignore_keys: entries of the model's output that are not predictions.
            metric_key_prefix: prefix of the names of metrics.
            **gen_kwargs: settings of `generate` for this call (max_length, max_new_tokens, num_beams, ...).

        Returns:
            Predictions (token ids, padded), labels and metrics.
        """
        with Seq2SeqTrainer._override_generation(self, gen_kwargs):
            return super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    @contextmanager
    def _override_generation(self, asked: Settings) -> Iterator[None]:
        """Lets the settings of a call override the arguments, also in the nested evaluations of several sets."""
        before = self._gen_kwargs
        self._gen_kwargs = resolve.generation(self.args).settings(before | asked)
        try:
            yield
        finally:
            self._gen_kwargs = before

    def prediction_step(
        self,
        model: Any,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Runs one batch of an evaluation.

        Args:
            model: the model as the engine has wrapped it.
            inputs: the batch, name -> tensor.
            prediction_loss_only: generate nothing and return the loss alone.
            ignore_keys: entries of the model's output that are not predictions.
            **gen_kwargs: settings of `generate`; default: the settings passed to `evaluate` or `predict`.

        Returns:
            Loss (scalar, detached; None without labels), generated token ids of shape (batch, length), and labels.

        Raises:
            ModelError: predictions are to be generated, and the model cannot.
        """
        if prediction_loss_only or not resolve.generation(self.args).predicts:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        _check_can_generate(self.model)
        batch = self._prepare_inputs(inputs)
        task = Seq2SeqTrainer._make_task(self, batch)
        if task.is_joined:  # the loop weighs the loss by labels: none of these is shifted away
            inputs["labels"] = torch.nn.functional.pad(inputs["labels"], (1, 0), value=-100)
        settings = Seq2SeqTrainer._settings_for(self, task, gen_kwargs or self._gen_kwargs)
        tokens = Seq2SeqTrainer._generate(self, task, settings)
        loss = None if task.for_loss is None else Seq2SeqTrainer._measure_loss(self, model, task.for_loss)
        labels = None if task.labels is None else Seq2SeqTrainer._padded(self, task.labels, task, settings)
        return loss, Seq2SeqTrainer._padded(self, tokens, task, settings), labels

    def _make_task(self, batch: Batch) -> generation.Task:
        names = self.label_names or []
        if Seq2SeqTrainer._continues_input(self, batch) and not Seq2SeqTrainer._keeps_prompts(self):
            return generation.make_prompted_task(batch, names, pad_token_id=Seq2SeqTrainer._pad_token_id(self))
        return generation.make_task(batch, names)

    def _continues_input(self, batch: Batch) -> bool:
        """Returns whether the model is decoder-only, so that its output begins with its input."""
        config = getattr(model_facts.core_model(self.model), "config", None)
        return config is not None and not getattr(config, "is_encoder_decoder", False) and "input_ids" in batch

    def _keeps_prompts(self) -> bool:
        """Returns whether predictions begin with the prompt and labels are generated from too, as in transformers.

        Code written for that strips the prompt itself: an override of `prediction_step`, or a library that got this
        class from `trainwright.compat.install()`.
        """
        if not get_behaviour(self.args).removes_prompts_from_predictions:
            return True
        return is_overridden(self, "prediction_step") or _stands_in_for_transformers()

    def _settings_for(self, task: generation.Task, asked: Settings) -> Settings:
        """Returns keywords for `generate`: the requested settings, and defaults that it would otherwise guess."""
        settings = {name: value for name, value in asked.items() if value is not None}
        config = getattr(self.model, "generation_config", None)
        if config is None:  # a module with a `generate` of its own
            return settings
        lengths = ("max_length", "max_new_tokens")
        has_length = any(name in settings or getattr(config, name, None) is not None for name in lengths)
        # Without the limit, `_generate` sets a length after the first batch.
        is_limited = bool(task.prompt_width) or get_behaviour(self.args).limits_every_generated_batch
        if not has_length and is_limited:
            settings["max_new_tokens" if Seq2SeqTrainer._continues_input(self, task.inputs) else "max_length"] = (
                DEFAULT_LENGTH
            )
        if task.prompt_width and config.pad_token_id is None:
            settings.setdefault("pad_token_id", Seq2SeqTrainer._pad_token_id(self))
        return settings

    def _generate(self, task: generation.Task, settings: Settings) -> torch.Tensor:
        with self._trainwright.services.engine.generating(self.model) as needed, torch.no_grad():
            rows = self.model.generate(**task.inputs, **{**needed, **settings})
        config = getattr(self.model, "generation_config", None)
        is_limited = get_behaviour(self.args).limits_every_generated_batch
        if not is_limited and config is not None and config.max_length is None:
            config.max_length = DEFAULT_LENGTH
        first = next(value for value in task.inputs.values() if isinstance(value, torch.Tensor))
        return generation.new_tokens(rows, task, batch_size=first.shape[0])

    def _measure_loss(self, model: Any, batch: Batch) -> torch.Tensor:
        if not get_behaviour(self.args).generating_evaluations_use_compute_loss:
            return Seq2SeqTrainer._original_loss(self, model, batch)
        smooths = self.label_smoother is not None and self.compute_loss_func is None
        # In half precision, smoothing rounds differently if it divides by the items instead of averaging over them.
        # The original does not pass the number of items here.
        as_mean = smooths or not get_behaviour(self.args).averages_eval_loss_over_items
        num_items = None if as_mean else self._get_num_items_in_batch([batch], self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, dict(batch), num_items_in_batch=num_items)
        return self._trainwright.run.evaluated_loss(loss)

    def _original_loss(self, model: Any, batch: Batch) -> torch.Tensor:
        """Returns the model's own loss, or the smoothed one, as transformers does when it generates predictions."""
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**batch)
            smoother = self.label_smoother
            loss = output_loss(outputs) if smoother is None else smoother(outputs, batch["labels"])
        return self._trainwright.run.evaluated_loss(loss)

    def _padded(self, rows: torch.Tensor, task: generation.Task, settings: Settings) -> torch.Tensor:
        config = getattr(self.model, "generation_config", None)
        if task.prompt_width:  # the number of new tokens is only known if it was set
            width = settings.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
            is_labels = rows is task.labels
            return rows if width is None or is_labels else self._pad_tensors_to_max_len(rows, width)
        if config is None:
            return rows
        max_length = config.max_length or DEFAULT_LENGTH
        max_new_tokens = config.max_new_tokens
        if rows.shape[-1] < max_length:
            return self._pad_tensors_to_max_len(rows, max_length)
        return rows if max_new_tokens is None else self._pad_tensors_to_max_len(rows, max_new_tokens + 1)

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        return generation.pad_right(tensor, max_length, fill=Seq2SeqTrainer._pad_token_id(self))

    def _pad_token_id(self) -> int:
        """Returns the token used for padding: the tokenizer's, else the model's, else the end-of-text token."""
        tokenizers = (self.processing_class, getattr(self.processing_class, "tokenizer", None))
        configs = (getattr(self.model, name, None) for name in ("config", "generation_config"))
        for source in (*tokenizers, *configs):
            for name in ("pad_token_id", "eos_token_id"):
                if (value := getattr(source, name, None)) is not None:
                    return int(value[0] if isinstance(value, (list, tuple)) else value)
        raise ModelError(
            "predict_with_generate fills generated rows up to one length, and neither processing_class nor the model's "
            "config has a pad_token_id or an eos_token_id. Set model.config.pad_token_id, or pass the tokenizer as "
            "processing_class."
        )


def _stands_in_for_transformers() -> bool:
    """Returns whether `trainwright.compat.install()` has replaced transformers' class with this one."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and vars(transformers).get("Seq2SeqTrainer") is Seq2SeqTrainer


def _completed(config: Any, model: Any) -> Any:
    """Returns the config with the model's special tokens filled in: without them, generation cannot end."""
    own = (getattr(model, "generation_config", None), getattr(model, "config", None))
    for name in SPECIAL_TOKENS:
        if getattr(config, name, None) is None:
            setattr(config, name, next((v for c in own if (v := getattr(c, name, None)) is not None), None))
    return config


def _check_can_generate(model: Any) -> None:
    core = model_facts.core_model(model)
    can = getattr(core, "can_generate", None)
    if callable(getattr(model, "generate", None)) and (can is None or can()):
        return
    raise ModelError(
        f"predict_with_generate=True, but {type(core).__name__} cannot generate. Use a model with a language-model "
        "head (AutoModelForSeq2SeqLM, AutoModelForCausalLM), or set predict_with_generate=False."
    )
