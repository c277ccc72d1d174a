"""The rows of `token_budget` in the laws of capabilities; `laws/members.py` says what each is."""

NOT_HERE = "tests/capabilities/token_budget"
HANGS = "forms batches in the process that trains"
HOSTILE = "keeps no state"
