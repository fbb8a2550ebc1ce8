"""Together: the first process of a run decides and publishes, the others do their share of its steps.

Only steps that know how to be shared are: tensor-wise merges, each process writing its tensors into the files
that the first one made, and sweeps, each process running its part of the examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merging.checkpoints.disk_sink import SafetensorsSink
from merging.checkpoints.layout import Layout
from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.weight_writer import JoiningSink, NoSink
from merging.contracts.calibrator import Calibrator
from merging.contracts.merger import Merger
from merging.data.task import CalibrationData, Task
from merging.layerwise import Placed
from merging.limits import USUAL, Limits
from merging.making import make_calibrators, make_merger, open_result, run_merger
from merging.ranks import Ranks
from merging.report.report import Report
from merging.solved_blocks import SolvedBlocks

if TYPE_CHECKING:
    from merging.opened import Opened
    from merging.spec import PipelineSpec


@dataclass(frozen=True)
class Order:
    """A step in which all processes take part."""

    step: int | None  # number of the calibrator; None: the merge
    folder: Path | None = None  # where the weight files lie that all write into; None: the first writes all
    layout: Layout | None = None  # of these files
    merged: Path | None = None  # what is calibrated
    known: tuple[Path, str] | None = None  # where solved blocks lie, and which of them count


class Leader:
    """The first process' side: it tells the others what to do, and takes in what they wrote."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def ask(
        self,
        step: int | None,
        method: Merger | Calibrator,
        sink: CheckpointSink,
        *,
        merged: Path | None = None,
        known: SolvedBlocks | None = None,
    ) -> bool:
        """Have the others take part, if there are any and the method can be shared."""
        swept = isinstance(method, Placed)
        if self._ranks.size == 1 or not method.shares or not (swept or isinstance(sink, SafetensorsSink)):
            method.ranks = None
            return False
        method.ranks = self._ranks
        place = None if known is None else known.place
        if swept or not isinstance(sink, SafetensorsSink):
            order = Order(step, merged=merged, known=place)
        else:
            order = Order(step, sink.folder, sink.layout, merged)
        self._ranks.tell(order)
        return True

    def collect(self, sink: CheckpointSink) -> None:
        """Wait for the others' part of a step; what they wrote counts as written."""
        for ranges in self._ranks.gather({}):
            if ranges:
                assert isinstance(sink, SafetensorsSink)
                sink.also_written(ranges)

    def end(self, report: Report) -> None:
        self._ranks.tell(report.model_dump_json())


class Follower:
    """Every other process' side."""

    def __init__(
        self,
        spec: PipelineSpec,
        opened: Opened,
        tasks: Mapping[str, Task],
        *,
        device: str,
        ranks: Ranks,
        limits: Limits = USUAL,
    ) -> None:
        self._opened, self._tasks, self._ranks = opened, tasks, ranks
        self._merger = make_merger(spec, opened, device, None, limits)
        self._calibrators = make_calibrators(spec, device, None, limits)

    def serve(self) -> Report:
        """Do what the first process asks for until it has a report."""
        while not isinstance(order := self._ranks.tell(None), str):
            self._do(order)
        return Report.model_validate_json(order)

    def _do(self, order: Order) -> None:
        method: Any = self._merger if order.step is None else self._calibrators[order.step]
        method.ranks = self._ranks
        if isinstance(method, Placed):
            method.known = None if order.known is None else SolvedBlocks(*order.known)
        sink: CheckpointSink = NoSink()
        if order.folder is not None and order.layout is not None:
            sink = JoiningSink(self._opened.models.base, order.layout, order.folder)
        with sink:
            pinned = self._opened.pinned(sink)
            data = self._data() if "data" in method.needs else None
            if order.step is None:
                run_merger(method, self._opened.models, data, pinned)
            else:
                assert order.merged is not None
                method.calibrate(open_result(order.merged, self._opened), self._opened.models, data, pinned)
        self._ranks.gather(sink.written() if isinstance(sink, JoiningSink) else {})

    def _data(self) -> CalibrationData:
        heads = {name: task.head for name, task in self._tasks.items() if task.head is not None}
        examples = {task: self._tasks[task].calibration for task in self._opened.models.tasks}
        return CalibrationData({task: found for task, found in examples.items() if found is not None}, heads)
