"""The rows of `what_is_trained` in the laws of capabilities; `laws/members.py` says what each is."""

NOT_HERE = "tests/capabilities/what_is_trained"
HANGS = "reads the first batch of the process that trains"
HOSTILE = "keeps no state"
