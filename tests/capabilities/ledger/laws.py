"""The rows of `ledger` in the laws of capabilities; `laws/members.py` says what each is."""

HANGS = "writes files of its own"
HOSTILE = "capabilities/ledger/test_ledger.py::test_a_ledger_that_no_run_writes_ends_in_a_sentence"
OURS = (
    "rows",
    "table",
    "sample_losses",
)
