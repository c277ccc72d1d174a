"""Fields of checkpoints, of the best model and of uploads."""

# ruff: noqa: RUF009 -- setting() makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass

from trainwright.config.aliases import Organization, Renamed
from trainwright.config.enums import HubStrategy, SaveStrategy
from trainwright.config.fields.setting import BY_RULES, FIXED, PER_START, TUNABLE, FieldGroup, Range, setting


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class SavingFields(FieldGroup, group="Saving"):
    save_only_model: bool = setting(
        False, "Save the model alone: smaller, but training cannot resume from it.", **TUNABLE
    )
    save_strategy: SaveStrategy | str = setting(
        "steps", "When to save: no, steps, epoch, best.", **TUNABLE, enum=SaveStrategy, summarized=True
    )
    save_steps: float = setting(
        500,
        "Steps between checkpoints; below 1: share of all steps.",
        **TUNABLE,
        limits=BY_RULES,
        syntax=("steps",),
        summarized=True,
    )
    save_on_each_node: bool = setting(False, "Save on each node, for nodes without a shared disk.", **TUNABLE)
    save_total_limit: int | None = setting(
        None,
        "Checkpoints to keep, the best and the newest always (None: all).",
        **TUNABLE,
        limits=Range(1, whole=True, optional=True, only_warns=True, hint="All checkpoints are kept, as with None."),
    )
    enable_jit_checkpoint: bool = setting(False, "On SIGTERM, save a checkpoint before ending.", **TUNABLE)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class HubFields(FieldGroup, group="Hub"):
    push_to_hub: bool = setting(False, "Upload the model to the Hub.", **FIXED)
    hub_token: str | None = setting(
        None,
        "Access token (None: that of the login); never written out.",
        on_resume=PER_START,
        searchable=False,
        secret=True,
        formerly={"push_to_hub_token": Renamed()},
    )
    hub_private_repo: bool | None = setting(None, "Make the repository private (None: the owner's default).", **FIXED)
    hub_model_id: str | None = setting(
        None,
        "Repository: 'name' or 'owner/name' (None: name of output_dir).",
        **FIXED,
        formerly={"push_to_hub_model_id": Renamed(), "push_to_hub_organization": Organization()},
    )
    hub_strategy: HubStrategy | str = setting(
        "every_save", "end, every_save, checkpoint, all_checkpoints.", **FIXED, enum=HubStrategy
    )
    hub_always_push: bool = setting(False, "Upload even while the previous upload is not finished.", **FIXED)
    hub_revision: str | None = setting(None, "Branch to upload to (None: the main one).", **FIXED)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class BestModelFields(FieldGroup, group="Best model"):
    load_best_model_at_end: bool = setting(False, "After training, load the best checkpoint.", **TUNABLE)
    metric_for_best_model: str | None = setting(
        None,
        "Metric that decides which is best (None: loss).",
        on_resume="judges from here on; the best so far was found by the old one",
        searchable=True,
    )
    greater_is_better: bool | None = setting(
        None,
        "Direction of that metric (None: False if it ends in 'loss').",
        on_resume="judges from here on; the best so far was found the other way round",
        searchable=True,
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class ResumeFields(FieldGroup, group="Saving"):
    ignore_data_skip: bool = setting(False, "On resume, start the epoch's data again.", **TUNABLE)
    restore_callback_states_from_checkpoint: bool = setting(
        False, "On resume, restore the state that callbacks saved, over what was passed.", **TUNABLE
    )
