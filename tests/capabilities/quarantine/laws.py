"""The rows of `quarantine` in the laws of capabilities; `laws/members.py` says what each is."""

HANGS = "reads a file of the run's directory before step 1"
HOSTILE = "capabilities/quarantine/test_quarantine.py::test_a_line_that_no_run_writes_is_named"
OURS = ("",)
