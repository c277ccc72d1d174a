"""The rows of `loss_question` in the laws of capabilities; `laws/members.py` says what each is."""

NOT_HERE = "tests/laws/test_loss_laws.py"
HANGS = "computes in the process that trains"
HOSTILE = "keeps no state"
