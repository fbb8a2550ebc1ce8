"""Run: the steps of one run in its folder, each skipped where it is already done from the same facts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from merging.checkpoints.amending import amend_
from merging.checkpoints.changed_results import PLUGINS, changed_files, changed_heads, changed_results
from merging.checkpoints.disk_sink import SafetensorsSink
from merging.checkpoints.folder import config as read_config
from merging.checkpoints.hashing import FileHashes, hashes
from merging.checkpoints.kept_manifests import keep_manifest
from merging.checkpoints.lora_sink import LoraSink
from merging.checkpoints.manifest import FORMAT, MANIFEST, listing, read_manifest
from merging.checkpoints.run_folder import RunFolder, write_atomic
from merging.checkpoints.strays import refuse_strays, strays
from merging.checkpoints.unfit_places import refuse_unfit_places, refuse_unfit_target
from merging.contracts.calibrator import Calibrator, adapting
from merging.contracts.merger import MergeNotes, Merger
from merging.contracts.method import Progress
from merging.data.heads import save_head
from merging.data.kept_heads import CONFIG_FILE, HEAD_FILE, save_kept_head
from merging.data.task import CalibrationData, Task
from merging.describing import describe
from merging.devices import choose_device
from merging.drifting import tell_harm_
from merging.errors import CheckpointError, DataError, NumericalError, run_begun
from merging.evaluation.drift import EXAMPLES
from merging.facts import Facts
from merging.finite_inputs import not_finite, refusal
from merging.held_out import held_out_of
from merging.layerwise import Placed
from merging.limits import USUAL, Limits
from merging.making import make_calibrators, make_merger, open_result, run_merger
from merging.opened import Opened
from merging.provenance import code_of, fingerprint, versions
from merging.ranks import ALONE, Ranks
from merging.reloading import reload_check
from merging.renewing import renew_, renewed
from merging.report.card_of_run import tell_scores_
from merging.report.curve import Curve
from merging.report.report import Report, StageReport
from merging.report.stages import Stage
from merging.reporting import make_report
from merging.scoring import measure
from merging.solved_blocks import SolvedBlocks
from merging.spec import Component, PipelineSpec
from merging.together import Leader


class Run:
    """State of one run: what was opened, what was made, and what it cost."""

    def __init__(
        self,
        spec: PipelineSpec,
        opened: Opened,
        tasks: Mapping[str, Task],
        folder: RunFolder,
        *,
        device: str,
        progress: Progress,
        curve: Curve | None = None,
        ranks: Ranks = ALONE,
        limits: Limits = USUAL,
        remarks: Sequence[str] = (),
    ) -> None:
        """`curve`: the search that chose some of the spec's settings. `ranks`: this is the first of them.
        `limits`: what keeps it within its memory. `remarks`: what was found beforehand, for the report."""
        self.curve, self.leader = curve, Leader(ranks)
        self.spec, self.opened, self.tasks, self.folder = spec, opened, dict(tasks), folder
        self.device, self.progress = choose_device(device), progress
        self.stages: list[StageReport] = []
        self.remarks = (*remarks, *folder.remarks)
        self.merger = make_merger(spec, opened, self.device, folder.work, limits)
        self.facts = Facts(spec, opened, self.tasks, self.merger.needs)
        self.calibrators = make_calibrators(spec, self.device, folder.work, limits)

    def all(self, until: Literal["merge", "calibrate"] | None) -> Report:
        refuse_unfit_places(self.folder.path, self._places())
        with self._stage("hash inputs"):
            self.facts.hash_inputs(self.progress)
            self._refuse_changed(until)
        facts = self.facts.run(until, self.curve)
        if (report := self._finished(facts)) is not None:
            return report
        merged = self._merge()
        with run_begun():
            self._begin()
            return self._after_merging(merged, facts, until)

    def _begin(self) -> None:
        """Remove the records of the last run, which soon is not what lies here; not before a checkpoint or a
        score is made, so that a run which is refused leaves them."""
        for record in ("report-of", MANIFEST):
            (self.folder.state / record).unlink(missing_ok=True)

    def _places(self) -> list[str]:
        """Names of files that this run writes beside checkpoints, as far as they are known beforehand."""
        heads = [f"heads/{name}.safetensors" for name, task in self.tasks.items() if task.head is not None]
        kept = [
            f"heads/{name}/{file}"
            for name, tensors in self.opened.heads.items()
            if tensors
            for file in (HEAD_FILE, CONFIG_FILE)
        ]
        made = [name for name in self.folder.owned if name.startswith("heads/")]
        return list(dict.fromkeys(["report.json", *heads, *kept, *made]))

    def _after_merging(self, merged: Path, facts: str, until: Literal["merge", "calibrate"] | None) -> Report:
        results = {"merged": merged}
        if self.calibrators and until != "merge":
            results["calibrated"] = self._calibrate(merged)
        self._save_heads()
        with self._stage("evaluate"):
            measured = measure(
                self.opened.models,
                {name: open_result(path, self.opened) for name, path in results.items()},
                self.tasks,
                held=held_out_of(self.spec, self.tasks, base_folder=self.opened.side_files, count=EXAMPLES),
                adapt=adapting(self.calibrators) if "calibrated" in results else None,
                device=self.device,
                work=self.folder.work,
                progress=self.progress,
            )
        report = make_report(
            self.spec,
            self.opened,
            self.tasks,
            results,
            measured,
            curve=self.curve,
            stages=self.stages,
            device=self.device,
            remarks=self.remarks,
        )
        if "calibrated" in results:
            tell_harm_(results["calibrated"], report.drift, scratch=self.folder.state)
        for checkpoint in results.values():
            tell_scores_(checkpoint, report, scratch=self.folder.state)
        self.folder.write_atomic("report.json", report.model_dump_json(indent=2) + "\n")
        self._renew(self._stale())
        self._list_files(facts, results)
        write_atomic(self.folder.state / "report-of", facts)
        return report

    def _list_files(self, facts: str, results: Mapping[str, Path]) -> None:
        """What `merging verify` needs beside the checkpoints' own manifests: these themselves, heads, report,
        what was measured on."""
        ours = [self.folder.path / name for name in self.folder.owned if name.startswith("heads/")]
        for place in results.values():
            keep_manifest(self.folder.state, place)
        files = [self.folder.path / "report.json", *(place / MANIFEST for place in results.values())]
        files += [file for file in sorted(ours) if file.is_file()]
        about = {"format": FORMAT, "stage": "run", "fingerprint": facts, "data": self.facts.measured_on}
        text = json.dumps({**about, **listing(self.folder.path, files)}, indent=2, ensure_ascii=False)
        write_atomic(self.folder.state / MANIFEST, text + "\n")

    def _stale(self) -> dict[Path, str]:
        """Finished checkpoints whose manifests say other things of their inputs than what was read now, each
        with the text that its manifest should have."""
        wanted = {"merged": self.facts.merge()}
        if self.calibrators:
            wanted["calibrated"] = self.facts.calibrate()
        done = [
            self.folder.path / name
            for name, facts in wanted.items()
            if self.folder.stage_done(name, fingerprint(facts))
        ]
        texts = {
            place: renewed(place, inputs=self.facts.read, opened=self.opened, tasks=self.tasks)
            for place in done
        }
        return {place: text for place, text in texts.items() if text is not None}

    def _renew(self, stale: Mapping[Path, str]) -> None:
        for place, text in stale.items():
            renew_(place, text, scratch=self.folder.state)
            keep_manifest(self.folder.state, place)

    def _refuse_changed(self, until: Literal["merge", "calibrate"] | None) -> None:
        """Raise OutputError where what this run would go on with or replace, a checkpoint or a head, is not
        what a run wrote, or a checkpoint cannot be replaced. With `overwrite` what was changed is made
        again."""
        known, wanted = FileHashes(), {"merged": self.facts.merge()}
        done, spoilt = [], []
        if self.calibrators and until != "merge":
            wanted["calibrated"] = self.facts.calibrate()
        for name, facts in wanted.items():
            place = self.folder.path / name
            finished = self.folder.stage_done(name, fingerprint(facts))
            if not finished:
                self.folder.refuse_unlisted(name)
                refuse_unfit_target(place)
            changed = changed_files(place, known)
            if changed and not self.folder.overwrite:
                raise changed_results(place, changed)
            if not finished:
                continue
            done.append(name)
            added = strays(place)
            if not self.folder.overwrite:
                refuse_strays(place, added)
            if changed or added:
                spoilt.append(name)
        calibrated = self.folder.path / "calibrated" if "calibrated" in done else None
        heads = changed_heads(self.folder.path, self.folder.state, calibrated, self.folder.owned, known)
        if heads and not self.folder.overwrite:
            raise changed_results(self.folder.path / "heads", heads)
        known.save()
        for name in spoilt:
            self.folder.undo(name)
        for one in heads:
            one.file.unlink()

    def _merge(self) -> Path:
        target = self.folder.claim("merged")
        facts = self.facts.merge()
        if not self.folder.stage_done("merged", fingerprint(facts)):
            data = self._data(self.spec.merge) if "data" in self.merger.needs else None
            known = self._known("merge", self.merger, facts)
            with self._stage("merge"):
                sink = self._sink(target)
                with run_begun(CheckpointError), self._inputs_blamed(), sink:
                    self._begin()
                    pinned = self.opened.pinned(sink)
                    shared = self.leader.ask(None, self.merger, sink, known=known)
                    notes = run_merger(self.merger, self.opened.models, data, pinned, progress=self.progress)
                    if shared:
                        self.leader.collect(sink)
                    self._describe(sink, "merged", facts, [(self.spec.merge, self.merger)], notes)
                self._tell_moved(sink)
        self.folder.forget("merge")
        keep_manifest(self.folder.state, target)
        return target

    def _known(self, step: str, method: Merger | Calibrator, facts: Mapping[str, Any]) -> SolvedBlocks:
        """Blocks that an earlier run has solved in this step, and place for more, told to the method."""
        decides = {
            "facts": facts,
            "device": self.device,
            "versions": versions(),
            "code": code_of(type(method)),
        }
        known = SolvedBlocks(self.folder.begun / step, fingerprint(decides))
        if known.spoilt is not None:
            self.remarks += (
                f"{known.spoilt} was cut or changed since the run that wrote it: that block, and what comes "
                "after it, is solved again.",
            )
        if isinstance(method, Placed):
            method.known = known
        return known

    def _calibrate(self, merged: Path) -> Path:
        target = self.folder.claim("calibrated")
        facts = self.facts.calibrate()
        plugins = self.folder.path / "heads"  # what lies in it is claimed file by file
        if self.folder.stage_done("calibrated", fingerprint(facts)) and not self._plugins_lost():
            for calibrator in self.calibrators:
                calibrator.load_plugins(plugins)
            self.folder.forget("calibrate")
            keep_manifest(self.folder.state, target)
            return target
        with self._stage("calibrate"):
            source, steps = merged, self.folder.work / "steps"
            solved: dict[str, Any] = {}
            saved: dict[str, str] = {}  # plug-ins
            known = [
                self._known(f"calibrate-{number}", calibrator, facts)
                for number, calibrator in enumerate(self.calibrators)
            ]
            for number, calibrator in enumerate(self.calibrators):
                data = self._data(self.spec.calibrate[number])
                final = number == len(self.calibrators) - 1
                place = target if final else steps / str(number)
                place.parent.mkdir(parents=True, exist_ok=True)
                sink = self._sink(place, delivered=final)
                with self._inputs_blamed(), sink:
                    shared = self.leader.ask(number, calibrator, sink, merged=source, known=known[number])
                    notes = calibrator.calibrate(
                        open_result(source, self.opened),
                        self.opened.models,
                        data,
                        self.opened.pinned(sink),
                        progress=self.progress,
                    )
                    if shared:
                        self.leader.collect(sink)
                    saved |= self._save_plugins(calibrator, plugins)
                    notes = _joined(solved, notes)
                    solved = notes
                    if final:
                        used = [
                            (self.spec.merge, self.merger),
                            *zip(self.spec.calibrate, self.calibrators, strict=True),
                        ]
                        if saved:
                            notes = MergeNotes({**notes, PLUGINS: saved})
                        self._describe(sink, "calibrated", facts, used, notes)
                if final:
                    self._tell_moved(sink)
                source = place
        self.folder.forget("calibrate")
        keep_manifest(self.folder.state, target)
        return target

    def _save_plugins(self, calibrator: Calibrator, folder: Path) -> dict[str, str]:
        """What it has to keep beside the checkpoint, put into that folder; name in OUT -> SHA-256."""
        scratch = self.folder.work / "plugins"
        scratch.mkdir(exist_ok=True)
        saved = {}
        for file in calibrator.save_plugins(scratch):
            name = f"{folder.name}/{file.name}"
            saved[name] = hashes([file])[str(file)]
            self._place(file, name)
        return saved

    def _place(self, file: Path, name: str) -> None:
        """Move a finished file of ours to its place in the output folder."""
        refuse_unfit_places(self.folder.path, [name])
        target = self.folder.claim(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)

    @contextmanager
    def _inputs_blamed(self) -> Iterator[None]:
        """Where a value turns out not to be finite, name the expert and tensor that it came from."""
        try:
            yield
        except NumericalError as error:
            problems = not_finite(self.opened.models)
            if not problems:
                raise
            raise refusal(problems) from error

    def _sink(self, target: Path, *, delivered: bool = True) -> SafetensorsSink | LoraSink:
        """`delivered`: it is one of the results, which are adapters if the spec says so, and are opened again
        before they are published."""
        sink = self._plain_sink(target, delivered=delivered)
        if delivered:
            sink.check = partial(
                reload_check,
                stage=target.name,
                spec=self.spec,
                opened=self.opened,
                tasks=self.tasks,
                device=self.device,
            )
        return sink

    def _tell_moved(self, sink: SafetensorsSink | LoraSink) -> None:
        """Put into the report where files of the user's had to go, once the checkpoint is published."""
        self.remarks += tuple(f"{sink.target.name}/{note}" for note in sink.notes)

    def _plain_sink(self, target: Path, *, delivered: bool) -> SafetensorsSink | LoraSink:
        output, models = self.spec.output, self.opened.models
        dtype = None if output.dtype == "base" else getattr(torch, output.dtype)
        if output.form == "lora" and delivered:
            return LoraSink(
                target,
                models.base,
                self.opened.outline(),
                rank=output.adapter_rank,
                dtype=dtype,
                experts=models.experts,
                base_name=self.spec.base.model,
                revision=self.opened.inputs["base"].revision,
            )
        return SafetensorsSink(
            target,
            models.base,
            dtype=dtype,
            shard_size=output.shard_size,
            side_files_from=self.opened.side_files if self.opened.side_files.is_dir() else None,
            single_file=models.backbone.weights_file if models.backbone is not None else None,
        )

    def _describe(
        self,
        sink: SafetensorsSink | LoraSink,
        stage: str,
        facts: Mapping[str, Any],
        methods: list[tuple[Component, Any]],
        notes: MergeNotes,
    ) -> None:
        describe(
            sink,
            stage,
            facts,
            methods,
            notes,
            spec=self.spec,
            opened=self.opened,
            tasks=self.tasks,
            inputs=self.facts.read,
            device=self.device,
        )

    def _save_heads(self) -> None:
        for name, task in self.tasks.items():
            if task.head is not None:
                scratch = self.folder.work / "head.safetensors"
                save_head(task.head, scratch)
                self._place(scratch, f"heads/{name}.safetensors")
        for name, tensors in self.opened.heads.items():
            if tensors:
                own = self.opened.inputs[f'expert "{name}"'].path
                config = read_config(own) or read_config(self.opened.side_files)
                for file in save_kept_head(tensors, config, self.folder.work / "head"):
                    self._place(file, f"heads/{name}/{file.name}")

    def _lost_heads(self) -> list[str]:
        """Files of ours in heads/ that are gone."""
        ours = [name for name in self.folder.owned if name.startswith("heads/")]
        return [name for name in ours if not (self.folder.path / name).is_file()]

    def _plugins_lost(self) -> bool:
        """Whether files are gone from heads/ that only calibrating makes."""
        heads = {f"heads/{name}.safetensors" for name, task in self.tasks.items() if task.head is not None}
        kept = tuple(f"heads/{name}/" for name in self.opened.heads)
        return any(name not in heads and not name.startswith(kept) for name in self._lost_heads())

    def _data(self, method: Component) -> CalibrationData:
        lacking = [task for task in self.opened.models.tasks if self.tasks[task].calibration is None]
        if lacking:
            raise DataError(
                f"{method.type} needs calibration examples; there are none for {', '.join(lacking)}",
                remedy='Give each task a "calibration" source.',
            )
        heads = {name: task.head for name, task in self.tasks.items() if task.head is not None}
        return CalibrationData(
            {task: self.tasks[task].calibration for task in self.opened.models.tasks},  # type: ignore[misc]
            heads,
        )

    def _finished(self, facts: str) -> Report | None:
        """The report of an earlier run that did all of this, if its checkpoints are still whole."""
        place, known = self.folder.path / "report.json", self.folder.state / "report-of"
        if not place.is_file() or not known.is_file() or known.read_bytes() != facts.encode():
            return None
        if not (self.folder.state / MANIFEST).is_file():  # without it nobody can tell what was measured on
            return None
        record = read_manifest(self.folder.state)
        if record is None or record.get("format", FORMAT) != FORMAT:
            what = f"{self.folder.state / MANIFEST} is damaged, or of another version"
            self.remarks += (f"{what}: scores are measured again.",)
            return None
        if (report := self._known_report(place)) is None:
            return None
        wanted = {"merged": self.facts.merge()}
        if Path(report.checkpoint).name == "calibrated":
            wanted["calibrated"] = self.facts.calibrate()
        whole = all(self.folder.stage_done(name, fingerprint(asked)) for name, asked in wanted.items())
        if not whole or ("calibrated" in wanted and self._plugins_lost()):
            return None
        stale, lost = self._stale(), self._lost_heads()
        if stale or lost or record.get("data") != json.loads(json.dumps(self.facts.measured_on, default=str)):
            (self.folder.state / MANIFEST).unlink()  # which is listed anew once all of it is there
            self._renew(stale)
            if lost:
                self._save_heads()
            self._list_files(facts, {name: self.folder.path / name for name in wanted})
        told = self._moved(report)
        return told.model_copy(update={"warnings": (*told.warnings, *self.folder.remarks)})

    def _known_report(self, place: Path) -> Report | None:
        """The report as the run wrote it; None, and a remark, where it was cut or edited since."""
        recorded = (read_manifest(self.folder.state) or {}).get("sha256")
        digest = hashes([place])[str(place)]
        try:
            if isinstance(recorded, dict) and recorded.get(place.name) == digest:
                return Report.read(place)
        except DataError:  # of another version
            pass
        self.remarks += (
            f"{place.name} was not what the run recorded (it was cut, edited or replaced): it is made anew, "
            "with scores measured again.",
        )
        return None

    def _moved(self, report: Report) -> Report:
        """The report, brought up to date where the output folder has been moved or copied since."""
        checkpoint = str(self.folder.path / Path(report.checkpoint).name)
        if report.checkpoint == checkpoint:
            return report
        moved = report.model_copy(update={"checkpoint": checkpoint})
        text, state = moved.model_dump_json(indent=2) + "\n", self.folder.state
        amend_(self.folder.path, "report.json", text, scratch=state, manifest=state)
        return moved

    def _stage(self, name: str) -> _Kept:
        return _Kept(name, self.stages)


class _Kept(Stage):
    """A stage that lists itself once it is over."""

    def __init__(self, name: str, stages: list[StageReport]) -> None:
        super().__init__(name)
        self._stages = stages

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stages.append(StageReport(name=self.name, seconds=self.seconds, peak_bytes=self.peak_bytes))


def _joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> MergeNotes:
    """Notes of calibrators applied one after the other: what any of them solved is solved."""
    solved = list(dict.fromkeys([*earlier.get("solved", ()), *later.get("solved", ())]))
    left = {name: why for name, why in later.get("left", {}).items() if name not in solved}
    health = {**earlier.get("health", {}), **later.get("health", {})}
    return MergeNotes({**earlier, **later, "solved": solved, "left": left, "health": health})
