"""The rows of `loss_scale` in the laws of capabilities; `laws/members.py` says what each is."""

NOT_HERE = "tests/accelerator/test_runs.py"
HANGS = "computes in the process that trains"
HOSTILE = "keeps no state"
