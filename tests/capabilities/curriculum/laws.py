"""The rows of `curriculum` in the laws of capabilities; `laws/members.py` says what each is."""

HANGS = "calls a function of the user, as the loop does"
HOSTILE = "laws/test_hostile_entry_laws.py::test_a_wrong_value_in_any_place_is_named_or_does_no_harm"
OURS = ("",)
