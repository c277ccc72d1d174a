"""The `set_...` methods of the arguments, with transformers' names and defaults: a group of fields in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.config.aliases import ratio_to_steps
from trainwright.config.coerce import as_enum
from trainwright.config.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from trainwright.config.fields import ASKED_FOR
from trainwright.errors import ArgumentError, warn_older_name

if TYPE_CHECKING:
    from typing import Self


class Setters:
    """Mixed into TrainingArguments."""

    def _set(self, **values: Any) -> Self:
        for name, value in values.items():
            setattr(self, name, value)
        asked = vars(self).get(ASKED_FOR)
        if asked is not None:
            vars(self)[ASKED_FOR] = asked | values.keys()
        return self

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> Self:
        """Train, with these basics. A positive `max_steps` overrides `num_epochs`."""
        if gradient_checkpointing is not None:
            warn_older_name("gradient_checkpointing", "activation_checkpointing")
            activation_checkpointing = gradient_checkpointing
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=activation_checkpointing,
            gradient_checkpointing=activation_checkpointing,
        )

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
        jit_mode: bool = False,
    ) -> Self:
        """Sets when and how to evaluate. `delay`: epochs or steps before the first evaluation.

        Raises:
            ArgumentError: `steps` of 0, or `jit_mode`, which evaluations no longer have.
        """
        _refuse_jit(jit_mode)
        when = IntervalStrategy(strategy)
        _require_steps(when, steps)
        return self._set(
            eval_strategy=when,
            do_eval=when != IntervalStrategy.NO,
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=0 if delay is None else delay,
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False, jit_mode: bool = False) -> Self:
        """Predict on the test set. `jit_mode`: False; predictions no longer have it."""
        _refuse_jit(jit_mode)
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self,
        strategy: str | SaveStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Sets when to save, and how many checkpoints to keep."""
        when = SaveStrategy(strategy)
        _require_steps(when, steps)
        return self._set(
            save_strategy=when, save_steps=steps, save_total_limit=total_limit, save_on_each_node=on_each_node
        )

    def set_logging(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Sets when, where and how loudly to log."""
        when = IntervalStrategy(strategy)
        _require_steps(when, steps)
        names = [report_to] if isinstance(report_to, str) else list(report_to or [])
        return self._set(
            logging_strategy=when,
            logging_steps=steps,
            report_to=[] if names == ["none"] else names,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Upload to the repository `model_id` of the Hub."""
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=HubStrategy(strategy),
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """The optimizer and its parameters. `args`: more of them, as 'key=value,key=value'."""
        return self._set(
            optim=as_enum("optim", name),
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
        warmup_ratio: float = 0.0,
    ) -> Self:
        """The schedule of the learning rate. `warmup_steps` below 1: a share of all steps.

        `warmup_ratio` is the older name of such a share; `warmup_steps` wins over it.
        """
        if warmup_ratio:
            warn_older_name("warmup_ratio", "warmup_steps")
            warmup_steps = warmup_steps or ratio_to_steps(warmup_ratio)
        return self._set(
            lr_scheduler_type=as_enum("lr_scheduler_type", name),
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            warmup_steps=warmup_steps,
        )

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Sets how batches are made and loaded."""
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )


def _require_steps(when: IntervalStrategy | SaveStrategy, steps: float) -> None:
    if when == IntervalStrategy.STEPS and steps == 0:
        raise ArgumentError("strategy='steps' with steps=0 never comes due. Give a positive number, or strategy='no'.")


def _refuse_jit(wanted: bool) -> None:
    if wanted:
        raise ArgumentError("jit_mode=True: evaluation does not trace with TorchScript. Instead: torch_compile=True.")
