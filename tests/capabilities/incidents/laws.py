"""The rows of `incidents` in the laws of capabilities; `laws/members.py` says what each is."""

HANGS = "writes files of its own"
HOSTILE = "capabilities/incidents/test_hostile_bundles.py::test_each_damage_to_each_file_is_refused"
OURS = (
    "bundle",
    "recorder.IncidentRecorder.request",
)
