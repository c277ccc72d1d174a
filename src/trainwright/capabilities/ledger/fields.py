"""The argument `ledger`."""

from __future__ import annotations

from trainwright.config.setting import FieldGroup, not_compared


class LedgerFields(FieldGroup):
    """Whether a ledger of samples is written."""

    ledger: bool | str = not_compared(
        False,
        "Write visits, tokens and losses of each training sample to ledger.parquet; a text: as id_column too.",
        bare_flag=True,
        since="0.3",
        place=43,
    )
