"""The hooks of one step: forward, loss, backward, and what is counted on the way."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch

from trainwright import checks, model_facts
from trainwright._types import Batch, output_loss
from trainwright.facade.data import DataHooks
from trainwright.optim import train_eval_mode
from trainwright.state.clock import BACKWARD, FORWARD, HOST_TO_DEVICE
from trainwright.state.token_count import count_tokens

Items = torch.Tensor | int | None
_NO_CONTEXT: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class StepHooks(DataHooks):
    """What happens to a micro-batch."""

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Items = None) -> torch.Tensor:
        """Forward and backward for one micro-batch; returns its loss as it enters the window's sum, detached."""
        if self._pause is not None:
            self._pause.end(model, self.optimizer)
            self._pause = None
        elif not (model.training and self.model.training):  # somebody else left it in evaluation mode
            train_eval_mode.train_mode(model, self.optimizer)
        clock = self._run.clock
        clock.mark(HOST_TO_DEVICE)
        batch, inputs = inputs, self._prepare_inputs(inputs)
        clock.mark(FORWARD)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        del inputs
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            self._engine.empty_cache()
        rule = self._rule or self._loss_rule()
        loss = rule.apply(
            loss,
            batch,
            num_items_in_batch,
            micro_batches=self.current_gradient_accumulation_steps,
            share=self._run.part_of_micro_batch,
        )
        clock.mark(BACKWARD)
        self._engine.backward(loss)
        return loss.detach()

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Items = None
    ) -> Any:
        """The loss of a micro-batch, and with `return_outputs` the model's output beside it.

        An override that computes a loss of its own says by `loss_is_scaled_for_ga` whether it is scaled already.
        """
        labels = None
        if self.label_smoother is not None or self.compute_loss_func is not None:
            labels = inputs.pop("labels", None)
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        if self._past is not None:
            inputs = {**inputs, "mems": self._past}
        outputs = model(**inputs)
        if self._past_index >= 0:  # the state that a recurrent model hands from one step to the next
            self._past = outputs[self._past_index]
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif labels is not None and self.label_smoother is not None:
            shift = model_facts.is_causal_lm(self._engine.unwrap(model))
            loss = self.label_smoother(outputs, labels, shift_labels=shift, num_items_in_batch=num_items_in_batch)
        else:
            loss = output_loss(outputs)
        if not isinstance(loss, torch.Tensor):
            checks.raise_no_loss(model, inputs, outputs)
        rule = self._rule or self._loss_rule()
        loss = rule.undo_averaging(loss, outputs, num_items_in_batch)
        if model.training:
            loss = rule.weigh_auxiliary(loss, outputs, sample_share=self._run.share_of_window)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """The contexts in which the loss is computed; an override adds its own."""
        stack = contextlib.ExitStack()
        autocast = self.autocast_smart_context_manager()
        if autocast is not _NO_CONTEXT:
            stack.enter_context(autocast)
        return stack

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """A further context for the forward pass; mixed precision is in the model's forward already."""
        return _NO_CONTEXT

    def _uses_outputs(self) -> bool:
        """Whether training looks at the model's outputs besides the loss that the model itself computed."""
        is_overridden = any(
            getattr(type(self), name) is not getattr(StepHooks, name) for name in ("compute_loss", "training_step")
        )
        return is_overridden or self.label_smoother is not None or self.compute_loss_func is not None

    def _clip_grad_norm(self, model: Any) -> Any:
        """Scales the gradients down to `max_grad_norm`; returns their norm before, on the device."""
        return self._engine.clip(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The norm of the gradients, measured if clipping has not done so."""
        return self._engine.clip(model, math.inf) if grad_norm is None else grad_norm

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        """Counts the input tokens of a micro-batch, on the device."""
        if self.args.include_num_input_tokens_seen == "no":
            return
        self._run.tokens = self._run.tokens + count_tokens(
            inputs, self.model, self.processing_class, mode=self.args.include_num_input_tokens_seen
        )

    def floating_point_ops(self, inputs: Batch) -> float:
        """Estimated operations of forward and backward: 6 x parameters (without embeddings) x tokens."""
        if self._flos_model is not self.model:  # counting parameters walks over the model: once per model
            self._flos_model = self.model
            self._flos_per_token = 6 * model_facts.num_parameters_without_embeddings(self.model)
            self._main_input = model_facts.main_input_name(self.model)
        # a library's own loader may hand over something else than a dict (GRPO's is a list of completions)
        main_input = inputs.get(self._main_input) if isinstance(inputs, Mapping) else None
        return 0 if main_input is None else self._flos_per_token * main_input.numel()
