"""What a finished checkpoint's manifest says of its inputs, brought up to date: files of other content, or in
another place, may decide the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merging.checkpoints.atomic import write_atomic
from merging.checkpoints.manifest import MANIFEST, read_manifest
from merging.data.task import Task
from merging.describing import calibrated_on, kept_heads
from merging.opened import Opened


def renewed(
    checkpoint: Path, *, inputs: Mapping[str, Any], opened: Opened, tasks: Mapping[str, Task]
) -> str | None:
    """Its manifest with what this run has read; None where that is what it says already, or there is none.

    `inputs`: see `inputs_read`. The checkpoint has to be done from the same facts: a head that only scores,
    examples of which the same ones are drawn, a model that was moved."""
    about = read_manifest(checkpoint)
    if about is None:
        return None
    now = {
        "inputs": {role: given for role, given in inputs.items() if role in opened.inputs},
        "data": {role: given for role, given in inputs.items() if role not in opened.inputs},
        "calibration": calibrated_on(tasks),
        "notes": {**about.get("notes", {}), "heads": kept_heads(tasks, opened.heads)},
    }
    now = json.loads(json.dumps(now, default=str))  # as it is when read back
    if all(about.get(key) == value for key, value in now.items()):
        return None
    return json.dumps({**about, **now}, indent=2, ensure_ascii=False) + "\n"


def renew_(checkpoint: Path, text: str, *, scratch: Path) -> None:
    """Replace its manifest. `scratch`: as in `write_atomic`."""
    write_atomic(checkpoint / MANIFEST, text, scratch=scratch)
