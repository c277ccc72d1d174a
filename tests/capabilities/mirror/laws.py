"""The rows of `mirror` in the laws of capabilities; `laws/members.py` says what each is."""

TESTS = "capabilities/mirror/test_remote.py"
HANGS = "laws/test_partners_that_hang.py::test_a_resume_with_a_store_that_hangs"
HOSTILE = f"{TESTS}::test_mark_or_manifest_of_stranger_deletes_only_what_it_lists_in_directory"
OURS = ("",)
