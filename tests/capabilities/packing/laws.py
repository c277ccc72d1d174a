"""The rows of `packing` in the laws of capabilities; `laws/members.py` says what each is."""

NOT_HERE = "tests/capabilities/packing"
HANGS = "forms batches in the process that trains"
HOSTILE = "keeps no state"
OURS = ("",)
