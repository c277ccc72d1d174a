"""The hooks for the optimizer and its schedule."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainwright import model_facts
from trainwright.facade.parts import Parts
from trainwright.optim import factory, optimizer_class, parameter_groups, schedules


class OptimizerHooks(Parts):
    """Makes the optimizer and the schedule, and answers questions about them."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Makes both; override this, or one of the two below."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer, unless there is one already."""
        model = self.model if model is None else model
        if self.optimizer is None:
            cls, kwargs = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            decays = self.get_decay_parameter_names(model)
            self.optimizer = factory.build_optimizer(cls, kwargs, model, args=self.args, decay_names=decays)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The learning-rate schedule, unless there is one already."""
        if self.lr_scheduler is None:
            self.lr_scheduler = schedules.make_schedule(
                self.args.lr_scheduler_type,
                self.optimizer if optimizer is None else optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                options=self.args.lr_scheduler_kwargs,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Class and arguments of the optimizer that `args.optim` names."""
        return optimizer_class.optimizer_class_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Parameters that weight decay applies to: all but biases and those of normalisation layers."""
        return parameter_groups.decay_parameter_names(model)

    def _make_optimizer(self, model: nn.Module, num_training_steps: int) -> Any:
        if type(self).create_optimizer_and_scheduler is not OptimizerHooks.create_optimizer_and_scheduler:
            self.create_optimizer_and_scheduler(num_training_steps=num_training_steps)
            return self.optimizer
        return self.create_optimizer()

    def _get_learning_rate(self) -> float:
        """Learning rate of the first parameter group."""
        return schedules.current_rate(self.lr_scheduler, self.optimizer)

    def get_learning_rates(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [group["lr"] for group in self._need_optimizer().param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The parameter group of a parameter; without one, the parameters of all groups."""
        param_groups = self._need_optimizer().param_groups
        if param is None:
            return [group["params"] for group in param_groups]
        return next((group for group in param_groups if any(p is param for p in group["params"])), None)

    def get_num_trainable_parameters(self) -> int:
        return sum(model_facts.num_elements(p) for p in self.model.parameters() if p.requires_grad)

    def _need_optimizer(self) -> Any:
        if self.optimizer is None:
            raise ValueError("There is no optimizer yet: it is made by train(), or by create_optimizer().")
        return self.optimizer
