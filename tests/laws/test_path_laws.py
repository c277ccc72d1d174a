"""What is deleted or written by a path is below a directory of ours, by a name of ours, and through no link.

A name that was read comes as a `RelativeName`, which `OwnFolder` of `support/door.py` uses. Other places are rows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .source_calls import found_in, places_where, unused, without_row

pytestmark = pytest.mark.lint

DELETES = ("rmtree", "unlink", "remove", "rmdir", "removedirs", "truncate")
MOVES = ("rename", "replace", "renames", "move", "link", "symlink", "symlink_to", "hardlink_to")
WRITES = ("write_text", "write_bytes", "copyfile", "copy", "copy2", "copytree", "touch")
MODULES = ("os", "shutil")
FLAGS = ("O_WRONLY", "O_RDWR", "O_CREAT")
PATHS = (
    *("path", "folder", "file", "final", "partial", "staging", "draft", "stale", "beside", "going", "root"),
    *("checkpoint", "outbox", "output_dir", "target", "source", "place"),
)
# Where names come from: a name that such an expression yields, or that is made of one, was read.
READERS = ("read_json", "parse_json", "iterdir", "listdir", "scandir", "glob", "rglob", "readlink")
FIELDS = ("files", "weight_map")  # of a manifest, of an index of weights


def is_path(node: ast.AST) -> bool:
    """Returns whether an expression looks like a path: the methods of lists and texts have the same names."""
    text = ast.unparse(node).lower()
    return any(word in text for word in PATHS)


def written_path(node: ast.AST) -> str | None:
    """Returns the name of a call that deletes, moves or writes by a path, if a node is one."""
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    owner, _, last = name.rpartition(".")
    if (owner in MODULES and last in DELETES + MOVES + WRITES) or last == "rmtree":
        return name
    if name == "os.open":
        return name if any(flag in ast.unparse(node) for flag in FLAGS) or "flags" in ast.unparse(node) else None
    if last == "open" and owner not in ("codecs", "gzip"):
        place = 0 if owner else 1
        modes = [*node.args[place : place + 1], *(one.value for one in node.keywords if one.arg == "mode")]
        writes = any(isinstance(one, ast.Constant) and set(str(one.value)) & set("wax+") for one in modes)
        return "open to write" if writes else None
    if not isinstance(node.func, ast.Attribute):
        return None
    if last in ("unlink", "rmdir", "write_text", "write_bytes", "symlink_to", "hardlink_to", "touch"):
        return last
    if last in ("rename", "replace") and len(node.args) == 1 and is_path(node.func.value):
        return last
    return None


# Where something is deleted or written by a path -> why it may be.
OWN_WRITERS = {
    "_types.replacing": "the writer of small own files: a random name, which then replaces a link and follows none",
    "_types.write_pieces": "writes the random name that `replacing` yields",
    "support.door": "it is the door",
}
STAGED = "in a directory that this process has just made under a random name; what is there is its own"
TEMPORARY = "in a directory for temporary files that this process has made and only its user can write to"
NAMED_BY_USER = "in a directory that the user names for it and that was empty or missing, by names of ours"
LINK_ITSELF = "`unlink` and `rename` act on the link itself, and `rmtree` refuses one"
EXCEPTIONS = OWN_WRITERS | {
    "checkpoint.changes.accept": "drafts of a manifest that a command of the user names; " + LINK_ITSELF,
    "checkpoint.changes.write_manifest": "writes the random name that `replacing` yields",
    "capabilities.mirror.directory_client.DirectoryClient": "calls of its own `OwnFolder`, with parsed names",
    "checkpoint.manifest.Manifest.write": STAGED,
    "capabilities.mirror.store_process.StoreCalls.rmdir: rmdir": "of a client, by a path in the store",
    "capabilities.mirror.store_client._writing": "the temporary file of the Hub's client, by the path that it made",
    "capabilities.mirror.remote.RemoteStore.fetch": "parsed names, " + STAGED,
    "checkpoint.store.CheckpointStore": "names of ours with the number of a step; " + LINK_ITSELF,
    "checkpoint.store._delete": "of a link only the link itself",
    "checkpoint.store._link": "writes the random name that `replacing` yields",
    "checkpoint.store._merge": STAGED,
    "checkpoint.training_state": STAGED,
    "checkpoint.weights._merge": NAMED_BY_USER,
    "checkpoint.weights.export_model": NAMED_BY_USER,
    "checkpoint.weights.rewrite_with_torch": "files that transformers wrote there by path just before",
    "checkpoint.weights.use_umask: unlink": "a method of `OwnFolder`",
    "cli.main.predict": "writes the random name that `replacing` yields",
    "cli.tasks.applied": TEMPORARY,
    "cli.tasks.export.merge": NAMED_BY_USER,
    "cli.tasks.export.staged_folder": "its own directory under a random name, whose files go " + NAMED_BY_USER,
    "cli.tasks.export_card.write_merged_card": "a fixed name in the directory of `staged_folder`",
    "cli.tasks.export_folder._write_model": "a fixed name in the directory of `staged_folder`",
    "cli.tasks.export_proof._Proof": TEMPORARY,
    "cli.tasks.export_proof.prepared_proof": TEMPORARY,
    "cli.tasks.gguf.convert_to_gguf": "a file of one name, in a directory that this command has just written",
    "cli.tasks.recipe_run.removes_unused_directory: rmdir": "directories that the command made, if they are empty",
    "cli.tasks.models.remove_learned": "a fixed name below the run's directory; " + LINK_ITSELF,
    "capabilities.async_evaluation.watcher.Watcher._giving_signs": "its own sign, by a random name; " + LINK_ITSELF,
    "compat.helpers.rotate_checkpoints": "transformers' function with its arguments; " + LINK_ITSELF,
    "capabilities.async_evaluation.evaluators.EvaluationProcess.stop": TEMPORARY,
    "capabilities.incidents.bundle": STAGED,
    "capabilities.incidents.contents.fill.stacks": STAGED,
    "capabilities.incidents.recorder.IncidentRecorder._commit": "staged below a folder that is no link; " + LINK_ITSELF,
    "capabilities.lease.lease": "drafts under random names, leases by `link` and O_EXCL; " + LINK_ITSELF,
    "capabilities.mirror.outbox.Outbox.remove_if_empty: rmdir": "an empty directory by a fixed name, and no link",
    "capabilities.mirror.parts.PartsOrder.give_back: unlink": "a method of `OwnFolder`",
    "hub.outbox.Outbox.remove: rmdir": "an empty directory by a fixed name, and no link",
    "journal.record.OpenFile": "O_NOFOLLOW, and a link is an error that says so",
    "preflight.against._train": TEMPORARY,
    "preflight.against_process.add_predictions": TEMPORARY,
    "preflight.prove": TEMPORARY,
    "capabilities.async_evaluation.capability.evaluation_process": TEMPORARY,
    "capabilities.async_evaluation.process.main.read": TEMPORARY,
    "run.late_parameters.save_groups": STAGED,
    "capabilities.async_evaluation.requests.Requests.close: rmdir": "an empty directory by a fixed name, and no link",
}

# Where a name that was read is joined to a path -> why it may be.
JOINS = {
    "checkpoint.changes.list_anew": "reads only, and `differing_files` has refused names that lead out",
    "checkpoint.manifest.differing_files": "reads only, after `is_outside`",
    "capabilities.mirror.remote.RemoteStore.upload": "reads only, and `_parse_name` has parsed each name",
    "cli.tasks.export.staged_folder": "names from a listing of its own directory, written as " + NAMED_BY_USER,
    "cli.tasks.export_proof._Proof._describe": "names from a listing of the checkpoint or the export, written "
    + TEMPORARY,
    "checkpoint.weights.export_model": "a name from a listing of the checkpoint, written as " + NAMED_BY_USER,
    "checkpoint.weights.weight_files": "reads only, after `_is_file_name`",
    "capabilities.mirror.mirror.Mirror._run_files": "reads only, and the names are those of `OwnFolder.files`",
    "capabilities.mirror.parts.Helper._carry_out": "reads only, and an order has the secret token of the run",
}


def was_read(node: ast.AST, names: set[str]) -> bool:
    """Returns whether an expression has a name that was read, and is not made a `RelativeName`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("parse", "_parse_name", "_name"):
        return False
    if isinstance(node, ast.Name) and node.id in names:
        return True
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in READERS:
        return True
    if isinstance(node, ast.Attribute) and node.attr in FIELDS:
        return True
    return any(was_read(child, names) for child in ast.iter_child_nodes(node))


def targets(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yields what is bound in an assignment, a loop or a comprehension, and the expression that it is bound to."""
    if isinstance(node, ast.For | ast.comprehension):
        yield node.target, node.iter
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
    elif isinstance(node, ast.NamedExpr):
        yield node.target, node.value


def joins_read_name(node: ast.AST) -> str | None:
    """Returns the names that were read and are joined to a path in a function, if a node is one that does so."""
    if not isinstance(node, ast.FunctionDef):
        return None
    names: set[str] = set()
    for _ in range(3):  # names are made of names
        for inner in ast.walk(node):
            for target, value in targets(inner):
                if was_read(value, names):
                    names |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    found = set()
    for inner in ast.walk(node):
        parts: list[ast.expr] = []
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div) and is_path(inner.left):
            parts = [inner.right]
        elif isinstance(inner, ast.Call) and ast.unparse(inner.func) in ("Path", "os.path.join"):
            parts = inner.args[1:]
        elif isinstance(inner, ast.Call) and ast.unparse(inner.func).endswith(".joinpath"):
            parts = inner.args
        found |= {ast.unparse(part) for part in parts if was_read(part, names)}
    return f"joins {', '.join(sorted(found))}" if found else None


def test_what_is_written_or_deleted_by_a_path() -> None:
    assert without_row(places_where(written_path), EXCEPTIONS) == []


def test_names_that_were_read_are_joined_to_no_path() -> None:
    assert without_row(places_where(joins_read_name), JOINS) == []


def test_every_exception_is_used() -> None:
    assert unused(places_where(written_path), EXCEPTIONS) == []
    assert unused(places_where(joins_read_name), JOINS) == []


@pytest.mark.parametrize(
    "code",
    [
        "shutil.rmtree(path)",
        "rmtree(path)",
        "path.unlink()",
        "os.remove(path)",
        "os.replace(one, other)",
        "partial.rename(final)",
        "(folder / name).replace(final)",
        "path.open('w')",
        "path.open(mode='ab')",
        "open(path, 'x')",
        "open(path, mode='r+b')",
        "os.open(path, os.O_CREAT | os.O_RDWR)",
        "path.write_text(text)",
        "path.write_bytes(text)",
        "shutil.copyfile(one, other)",
        "shutil.move(one, other)",
        "os.link(one, other)",
    ],
)
def test_the_law_sees(code: str) -> None:
    assert found_in(code, written_path)


@pytest.mark.parametrize(
    "code",
    [
        "for name in read_json(path)['files']: (folder / name).stat()",
        "for name in manifest.files: read(folder / name)",
        "names = [one.name for one in root.iterdir()]\n    os.path.join(path, names[0])",
        "owner = parse_json(content)['owner']\n    Path(path, owner).stat()",
        "Path(path).joinpath(os.listdir(path)[0])",
    ],
)
def test_the_law_sees_joined_names(code: str) -> None:
    assert found_in(f"def function():\n    {code}\n", joins_read_name)


@pytest.mark.parametrize(
    "code", ["text.replace(a, b)", "open(path)", "path.open('rb')", "os.open(path, os.O_RDONLY)", "names.remove(name)"]
)
def test_the_law_leaves(code: str) -> None:
    assert not found_in(code, written_path)
