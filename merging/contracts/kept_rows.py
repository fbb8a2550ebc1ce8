"""KeptRows: what was read of a parameter, as it is stored, for a second walk over it."""

from __future__ import annotations

from torch import Tensor

from merging.checkpoints.source import CheckpointSource, CopyRows, fill_


class KeptRows:
    """Row blocks of one parameter, of several models, as far as `room` bytes go; more is read again."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._blocks: dict[tuple[int, int], Tensor] = {}

    def copying(self, model: int, source: CheckpointSource, name: str, copy: CopyRows) -> CopyRows:
        """`copy` of that source (the run's `model`-th), of what is kept where it is."""

        def kept(target_S: Tensor, rows: slice | None, less_S: Tensor | None) -> None:
            place = (model, 0 if rows is None else rows.start)
            stored_S = self._blocks.get(place)
            if stored_S is None:
                if target_S.numel() * source.spec(name).dtype.itemsize > self._room:
                    copy(target_S, rows, less_S)
                    return
                stored_S = self._blocks[place] = source.read(name, rows)
                self._room -= stored_S.numel() * stored_S.itemsize
            source.check_shape(name, tuple(stored_S.shape), target_S)
            fill_(target_S, stored_S, less_S)

        return kept
