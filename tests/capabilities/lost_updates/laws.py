"""The rows of `lost_updates` in the laws of capabilities; `laws/members.py` says what each is."""

NOT_HERE = "tests/capabilities/lost_updates"
HANGS = "counts in the process that trains"
HOSTILE = "capabilities/lost_updates/test_lost_updates.py::test_a_strangers_state_begins_at_zero"
