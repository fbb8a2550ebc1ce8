"""Facts: what decides the steps of a run. A step that was done from the same facts is not done again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from merging.checkpoints.hashing import FileHashes
from merging.contracts.method import Progress
from merging.data.task import Task
from merging.opened import Opened
from merging.provenance import fingerprint, inputs_read, merge_facts
from merging.reading_list import deciding_inputs, measuring_inputs, plugin_inputs
from merging.report.curve import Curve
from merging.spec import PipelineSpec
from merging.threads import in_threads


class Facts:
    """Of one run: hashes of what it reads, once `hash_inputs` was called, and what they say of each step."""

    def __init__(
        self, spec: PipelineSpec, opened: Opened, tasks: Mapping[str, Task], needs: Collection[str]
    ) -> None:
        """`needs`: of the merge rule."""
        self._spec, self._opened, self._tasks, self._needs = spec, opened, tasks, needs
        self._hashes: dict[str, dict[str, str]] = {}  # of models and plug-ins: role -> file -> SHA-256
        self.read: dict[str, Any] = {}
        """What manifests say of all inputs that decide checkpoints."""
        self.measured_on: dict[str, Any] = {}
        """And of those that decide scores alone."""

    def hash_inputs(self, progress: Progress) -> None:
        known = FileHashes()
        deciding = {**self._opened.inputs, **deciding_inputs(self._spec, self._tasks)}
        measuring = measuring_inputs(self._spec, self._tasks)
        files = [
            (role, name, file)
            for role, given in (deciding | measuring).items()
            for name, file in given.named().items()
        ]
        hashes: dict[str, dict[str, str]] = {role: {} for role in deciding | measuring}
        digests = in_threads(lambda item: known.of(item[2]), files, torch.get_num_threads())
        for done, ((role, name, _), digest) in enumerate(zip(files, digests, strict=True), 1):
            hashes[role][name] = digest
            progress("hash inputs", done, len(files))
        known.save()
        self._hashes = {role: hashes[role] for role in (*self._opened.inputs, *plugin_inputs(self._spec))}
        self.read = inputs_read(deciding, hashes)
        self.measured_on = inputs_read(measuring, hashes)

    def merge(self) -> dict[str, Any]:
        """What decides the merged checkpoint."""
        facts = merge_facts(self._spec, self._hashes, self._fingerprints() if "data" in self._needs else {})
        return {**facts, "heads": self._heads()} if "heads" in self._needs else facts

    def calibrate(self) -> dict[str, Any]:
        """What decides the calibrated one."""
        asked = [one.model_dump(mode="json") for one in self._spec.calibrate]
        return {"merged": self.merge(), "calibrate": asked, "calibration": self._fingerprints()}

    def run(self, until: str | None, curve: Curve | None) -> str:
        """A fingerprint of what decides the report as well. `until`: the last step; `curve`: the search that
        chose settings."""
        tests = {name: task.test.fingerprint for name, task in self._tasks.items() if task.test is not None}
        seen: dict[str, Any] = {
            "steps": {"merged": self.merge()} if until == "merge" else self.calibrate(),
            "tests": tests,
            "heads": self._heads(),
            "spec": self._spec.canonical()["tasks"],
        }
        if curve is not None:
            seen["curve"] = curve.model_dump(mode="json", exclude={"seconds"})
        return fingerprint(seen)

    def _fingerprints(self) -> dict[str, str]:
        return {
            name: task.calibration.fingerprint
            for name, task in self._tasks.items()
            if task.calibration is not None
        }

    def _heads(self) -> dict[str, str]:
        return {name: task.head.fingerprint for name, task in self._tasks.items() if task.head is not None}
