"""The rows of `mixture` in the laws of capabilities; `laws/members.py` says what each is."""

NOT_HERE = "tests/capabilities/mixture"
HANGS = "orders samples in the process that trains"
HOSTILE = "capabilities/mixture/test_mixture_order.py::test_shares_that_no_run_writes_are_refused"
OURS = ("",)
