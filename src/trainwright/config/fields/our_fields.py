"""OurFields: the arguments that transformers does not have. Each group is declared next to what reads it.

The groups of the core are named here, and those of a capability in its row of the table; they are light, since they are
imported with TrainingArguments. Type checkers read `our_fields.pyi`, which `python -m tests.contract.stub` writes.
"""

from typing import Any  # noqa: F401 -- the types of the fields are looked up in this module

from trainwright.capability_table import TABLE, load
from trainwright.config.setting import join_groups

CORE = (
    "trainwright.config.fields.own_fields:BehaviourFields",
    "trainwright.optim.fields:RateFields",
    "trainwright.run.fields:LossFields",
    "trainwright.run.fields:HangFields",
    "trainwright.data.fields:BatchFields",
    "trainwright.data.fields:OrderFields",
    "trainwright.data.fields:RowNameFields",
    "trainwright.evaluation.fields:EvaluationOrderFields",
    "trainwright.checkpoint.fields:WritingFields",
    "trainwright.checkpoint.fields:OccasionFields",
    "trainwright.checkpoint.fields:RetentionFields",
    "trainwright.callbacks.fields:EndFields",
    "trainwright.callbacks.fields:ProfileFields",
    "trainwright.journal.fields:JournalFields",
)

OurFields = join_groups(
    "OurFields", [load(place) for place in (*CORE, *(row.fields for row in TABLE if row.fields))], module=__name__
)
OurFields.__doc__ = "Not in transformers."
