"""The rows of `slow_ranks` in the laws of capabilities; `laws/members.py` says what each is."""

NOT_HERE = "tests/capabilities/slow_ranks"
HANGS = "measures with the messages of a log"
HOSTILE = "keeps no state"
OURS = ("journal",)
