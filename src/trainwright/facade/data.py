"""The hooks for data: dataloaders, samplers, columns, and a batch on its way to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainwright import assemble, model_facts
from trainwright._types import Batch, TailBatch, has_length
from trainwright.config import resolve
from trainwright.data import columns
from trainwright.data.batch_sampler import num_tokens
from trainwright.data.dataloader import build_dataloader, build_whole
from trainwright.data.packing.collator import as_tensors
from trainwright.errors import DataError
from trainwright.facade.parts import Parts

Items = torch.Tensor | int | None


class DataHooks(Parts):
    """From datasets to batches on the device."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The training data in batches."""
        if self.train_dataset is None:
            raise DataError("Training needs a train_dataset; pass one to Trainer.")
        return self._get_dataloader(
            self.train_dataset, "Training", self._train_batch_size, self._get_train_sampler, is_training=True
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Evaluation data in batches: a dataset, the name of one in `eval_dataset`, or `eval_dataset` itself."""
        if eval_dataset is None and self.eval_dataset is None:
            raise DataError("Evaluation needs an eval_dataset; pass one to Trainer or to evaluate().")
        key = eval_dataset if isinstance(eval_dataset, str) else "eval" if eval_dataset is None else None
        if key in self._eval_dataloaders and self.args.dataloader_persistent_workers:
            return self._eval_dataloaders[key]  # type: ignore[no-any-return]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        return self._get_dataloader(
            dataset, "Evaluation", self.args.eval_batch_size, self._get_eval_sampler, dataloader_key=key
        )

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Data to predict on, in batches."""
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, self._get_eval_sampler)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        # Before columns are removed: a column of lengths is none that the model takes.
        if isinstance(dataset, IterableDataset):
            forms = assemble.stream_former if is_training else None
            sampler = forms and forms(self.args, dataset, self._length_input(), batch_size=batch_size)
        else:
            sampler = sampler_fn and sampler_fn(dataset)
        packed = assemble.packed_input(sampler)
        collate = (
            as_tensors if packed is not None and self.data_collator is self._default_collator else self.data_collator
        )
        if columns.is_columnar(dataset) and not columns.has_transform(dataset):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        if packed is not None:
            collate = assemble.row_collator(self.args, packed, collate, self.model, self.processing_class)
        seed = self.args.data_seed if self.args.data_seed is not None else torch.initial_seed()
        num_replicas = self._engine.num_replicas
        plan = resolve.loader(
            self.args,
            batch_size=batch_size,
            seed=seed,
            is_training=is_training,
            rank=self._engine.replica,
            num_processes=num_replicas,
        )
        if is_training and resolve.dispatches(self.args, num_replicas):
            return self._engine.dispatch(build_whole(dataset, plan, sampler=sampler, collate=collate))  # type: ignore[no-any-return]
        dataloader = build_dataloader(dataset, plan, sampler=sampler, collate=collate, exchange=self._engine)
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            self._eval_dataloaders[dataloader_key] = dataloader
        return dataloader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of training samples; a RandomSampler is shuffled by seed and epoch."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return assemble.train_sampler(
            self.args,
            dataset,
            self._length_input(),
            batch_size=self._train_batch_size,
            num_processes=self._engine.num_replicas,
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return assemble.eval_sampler(self.args, eval_dataset, self._length_input())

    def _length_input(self) -> str | None:
        names = getattr(self.processing_class, "model_input_names", None)
        return names[0] if names else None

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = model_facts.signature_columns(self.model, self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A `datasets.Dataset` without the columns that `forward` does not take."""
        if not self.args.remove_unused_columns or model_facts.takes_any_input(self.model):
            return dataset
        self._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        name = type(self.model).__name__
        return columns.remove_unused(
            dataset,
            self._signature_columns,
            model_name=name,
            description=description,
            for_own=columns.is_own(self.data_collator),
        )

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """The collator, given only the entries of each sample that `forward` takes."""
        if not self.args.remove_unused_columns or model_facts.takes_any_input(self.model):
            return data_collator
        self._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        return columns.RemoveColumnsCollator(
            data_collator, self._signature_columns, columns.module_logger, type(self.model).__name__, description
        )

    def num_examples(self, dataloader: Any) -> int:
        """Samples behind a dataloader; estimated from its batches where the dataset has no length."""
        dataset = getattr(dataloader, "dataset", None)
        if has_length(dataset):
            return len(dataset)
        return int(len(dataloader) * self.args.per_device_train_batch_size)

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> int:
        """Input tokens in a dataloader, or in `max_steps` batches like its first; not read where lengths tell."""
        known = num_tokens(train_dl) if max_steps is None else None
        if known is not None:
            return known
        total: int = 0
        for batch in train_dl:
            tokens: int = batch["input_ids"].numel()
            if max_steps is not None:
                return tokens * max_steps
            total += tokens
        return total

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Items]:
        """The micro-batches of one optimizer step (fewer at the end of the data) and their number of label items."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> Items:
        """Label items over all micro-batches, if the model or the loss function asks for them."""
        rule = self._rule or self._loss_rule()
        count = rule.count(batch_samples)
        if count is None:
            return None
        return self._engine.sum(count) if rule.num_processes > 1 else count.to(device)

    def _prepare_input(self, data: Any) -> Any:
        """Tensors on the device; nested containers keep their type."""
        if isinstance(data, torch.Tensor):
            dtype = self._engine.input_dtype
            if dtype is not None and data.is_floating_point():
                data = data.to(dtype)
            return data.to(self._engine.device, non_blocking=self._engine.non_blocking)
        if isinstance(data, Mapping):
            kind = dict if isinstance(data, TailBatch) else type(data)
            return kind({key: self._prepare_input(value) for key, value in data.items()})  # type: ignore[call-arg]
        if isinstance(data, (tuple, list)):
            return type(data)(self._prepare_input(value) for value in data)
        return data

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """A batch as the model gets it."""
        if not isinstance(inputs, Mapping):
            raise DataError(
                f"A batch is a {type(inputs).__name__}; it must be a dict from the model's inputs to tensors. Let the "
                "data_collator return one, or override _prepare_inputs."
            )
        if not inputs:
            raise DataError(
                f"A batch is empty: no entry of the samples is an input of {type(self.model).__name__}.forward "
                f"({', '.join(self._signature_columns or ())}). Rename them, or set remove_unused_columns=False."
            )
        return self._prepare_input(inputs)  # type: ignore[no-any-return]
