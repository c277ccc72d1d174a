"""The rows of `async_evaluation` in the laws of capabilities; `laws/members.py` says what each is."""

TESTS = "capabilities/async_evaluation/test_async_evaluation_laws.py"
HANGS = "laws/test_partners_that_hang.py::test_an_evaluating_process_that_hangs"
HOSTILE = f"{TESTS}::test_the_state_of_a_strangers_checkpoint_deletes_nothing"
OURS = ("",)
