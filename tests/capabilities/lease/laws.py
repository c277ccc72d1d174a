"""The rows of `lease` in the laws of capabilities; `laws/members.py` says what each is."""

HANGS = "capabilities/lease/test_lease.py::test_a_lease_that_is_not_a_regular_file_is_ignored"
HOSTILE = "capabilities/lease/test_lease.py::test_a_file_that_is_not_a_lease_counts_by_its_time"
