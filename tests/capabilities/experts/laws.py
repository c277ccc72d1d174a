"""The rows of `experts` in the laws of capabilities; `laws/members.py` says what each is."""

NOT_HERE = "tests/capabilities/experts"
HANGS = "computes in the process that trains"
HOSTILE = "keeps no state"
OURS = ("",)
