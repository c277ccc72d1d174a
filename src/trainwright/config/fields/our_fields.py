"""OurFields: the arguments that transformers does not have, of the core and of each capability in the table.

Type checkers read `our_fields.pyi`, which `python -m tests.contract.stub` writes from the same groups.
"""

from typing import Any  # noqa: F401 -- the types of the fields are looked up in this module

from trainwright.capability_table import TABLE, load
from trainwright.config.fields.own_fields import CoreFields
from trainwright.config.setting import join_groups

OurFields = join_groups("OurFields", CoreFields, [load(row.fields) for row in TABLE if row.fields])
OurFields.__module__ = __name__
OurFields.__doc__ = "Not in transformers."
