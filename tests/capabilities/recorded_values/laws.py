"""The rows of `recorded_values` in the laws of capabilities; `laws/members.py` says what each is."""

TESTS = "capabilities/recorded_values/test_hostile_values.py"
NOT_HERE = "tests/capabilities/recorded_values"
HANGS = f"{TESTS}::test_a_pipe_is_not_waited_for"
HOSTILE = f"{TESTS}::test_a_wrong_value_in_any_place_is_an_error_or_a_difference"
OURS = (
    "commands",
    "value_comparison",
)
