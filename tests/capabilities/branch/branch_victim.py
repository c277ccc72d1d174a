"""A branch that is killed after a step: `branch_victim.py FOLDER CHECKPOINT STEP`."""

import sys
from pathlib import Path

from tests.capabilities.branch.branch_runs import Dies, branch

if __name__ == "__main__":
    settings = {"max_steps": 14, "cooldown": "1-sqrt", "save_async": False}
    branch(Path(sys.argv[1]), Path(sys.argv[2]), callbacks=[Dies(at=int(sys.argv[3]))], **settings)
