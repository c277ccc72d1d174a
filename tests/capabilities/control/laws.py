"""The rows of `control` in the laws of capabilities; `laws/members.py` says what each is."""

HANGS = "capabilities/control/test_control_laws.py::test_directory_or_link_with_a_name_of_ours_stays_and_stops_nothing"
HOSTILE = "journal/test_hostile_journals.py::test_live_control_takes_or_refuses_a_journal_with_a_wrong_command"
OURS = ("",)
