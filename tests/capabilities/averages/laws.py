"""The rows of `averages` in the laws of capabilities; `laws/members.py` says what each is."""

HANGS = "computes in the process that trains"
HOSTILE = "laws/test_hostile_entry_laws.py::test_a_wrong_value_in_any_place_is_named_or_does_no_harm"
OURS = ("",)
