"""TextExamples: rows of text, through a prompt and the base's own tokenizer.

Shape letters: B examples, T tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from merging.contracts.backbone import Batch
from merging.data.batching import LazyBatches
from merging.data.classes import Classes, read_classes
from merging.data.draw import drawn_order, shuffled
from merging.data.hashing import tokens_hash
from merging.data.numbering import renumbered
from merging.data.prompts import Prompt, Template
from merging.data.rows import Row, no_number, refuse_bad_rows, refuse_missing_columns
from merging.data.task import Examples
from merging.data.text_spec import MAX_LENGTH, TextColumns
from merging.data.tokenizer import TextReader
from merging.errors import DataError, Problem


class TextExamples(Examples):
    """Prompts in a fixed order: shuffled, or round by round one of each class where there are classes; a
    smaller number is the beginning of a larger one.

    Batches are padded at the end to their longest prompt, under an `attention_mask`. An encoder-decoder gets
    its first token and, where there is a target, the target's after it."""

    def __init__(
        self,
        rows: Sequence[Row],
        columns: TextColumns,
        reader: TextReader,
        *,
        where: str,
        task: str,
        seed: int,
        asked: int | None = None,
        skip: int = 0,
        batch_size: int = 16,
    ) -> None:
        """`where` starts every message: 'task "mnli": test data'. Opening tokenises all prompts. `skip`: so
        many of the order are passed over."""
        self.asked, self.reader, self.batch_size = asked, reader, batch_size
        self._where, self._columns = where, columns
        template = Template(columns.template)
        read = (*template.columns, *filter(None, (columns.target, columns.label)))
        refuse_missing_columns(list(rows), read, where)
        values = _texts(rows, (*template.columns, *filter(None, (columns.target,))), where)
        classes = Classes(())
        if columns.label is not None:
            classes = read_classes(rows, columns.label, columns.labels, where)
        drawn = _order(len(rows), classes.labels, seed, task)[skip:][:asked]
        # answers in a list are those of classes 0, 1, ..., which have no names
        self.classes = () if isinstance(columns.labels, tuple) else classes.names
        self.found_classes = columns.labels is None and bool(classes.names)
        self.answers = classes.answers
        self._labels = torch.tensor([classes.labels[row] for row in drawn]) if classes.labels else None
        self.targets = tuple(values[row][columns.target] for row in drawn) if columns.target else ()
        self.prompts = self._prompts(
            template, [rows[row].where for row in drawn], [values[row] for row in drawn]
        )
        self._decoder = self._decoder_inputs()
        self._empty = sum(not any(values[row][name].strip() for name in template.columns) for row in drawn)
        self._hashes = tuple(tokens_hash("input_ids", prompt.ids) for prompt in self.prompts)
        self.notes = self._notes()

    def __len__(self) -> int:
        return len(self.prompts)

    def batches(self) -> Sequence[Batch]:
        return LazyBatches(len(self), self.batch_size, self._read)

    @property
    def labels(self) -> Tensor | None:
        return self._labels

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256("\n".join(self._hashes).encode())
        labels = self._labels.tolist() if self._labels is not None else None
        digest.update(repr((self._decoder, labels, self.answers, self.targets)).encode())
        return digest.hexdigest()

    def hashes(self) -> tuple[str, ...]:
        return self._hashes

    def renumber_(self, names: Sequence[str]) -> None:
        assert self._labels is not None
        self._labels = renumbered(self._labels, self.classes, names)
        self.classes = tuple(names)

    @cached_property
    def answer_ids(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each example the tokens of all answers, class by class, as they follow its prompt."""
        texts = [text for answers in self.answers for text in answers]
        return tuple(
            tuple(tuple(self.reader.answer(prompt, text)) for text in texts) for prompt in self.prompts
        )

    def _read(self, start: int, stop: int) -> Batch:
        batch = padded([prompt.ids for prompt in self.prompts[start:stop]], self.reader.pad)
        if self._decoder:
            decoder = padded(self._decoder[start:stop], self.reader.pad)
            batch |= {f"decoder_{name}": value for name, value in decoder.items()}
        return batch

    def _prompts(
        self, template: Template, places: Sequence[str], values: Sequence[Mapping[str, str]]
    ) -> tuple[Prompt, ...]:
        limit, asked = self.reader.limit, self._columns.max_length
        bound = self.reader.bound
        if asked is not None and bound is not None and asked > bound:
            raise DataError(
                f'{self._where}: "max_length" is {asked}, the base reads {bound} tokens at most',
                remedy=f'"max_length": {bound} or less.',
            )
        self.max_length = asked or min(MAX_LENGTH, limit or MAX_LENGTH)
        prompts, problems = [], []
        for place, row in zip(places, values, strict=True):
            prompt = template.prompt(row, self.reader.prompt, self.max_length)
            if prompt is None:
                alone = len(self.reader.prompt(template.fill(dict.fromkeys(template.columns, ""))))
                raise DataError(
                    f"{self._where}: the prompt's own text has {alone} tokens, "
                    f'"max_length" is {self.max_length}',
                    remedy='Give a larger "max_length" or a shorter "prompt".',
                )
            if not prompt.ids:
                problems.append(Problem(place, "is a text without tokens"))
            prompts.append(prompt)
        refuse_bad_rows(problems, self._where, len(places))
        return tuple(prompts)

    def _decoder_inputs(self) -> tuple[tuple[int, ...], ...]:
        """What an encoder-decoder's decoder reads: its first token, and the target without its end."""
        if self.reader.kind != "seq2seq":
            return ()
        if self.reader.start is None:
            raise DataError(
                f"{self._where}: the base's config has no decoder_start_token_id to start the decoder with",
                remedy="Add it to the base's config.json.",
            )
        start = (self.reader.start,)
        if not self.targets:
            return (start,) * len(self)
        said = [self.reader.target(target)[:-1][: self.max_length] for target in self.targets]
        return tuple((*start, *ids) for ids in said)

    def _notes(self) -> tuple[str, ...]:
        cut, count = sum(prompt.cut for prompt in self.prompts), len(self)
        silent = sum(not target.strip() for target in self.targets)
        told = {
            f"texts were cut to {self.max_length} tokens": cut,
            "texts are empty; mend or remove these rows if that is not meant": self._empty,
            "targets are empty; mend or remove these rows if that is not meant": silent,
        }
        return tuple(f"{self._where}: {number} of {count} {what}" for what, number in told.items() if number)


def padded(rows: Sequence[Sequence[int]], pad: int, *, left: bool = False) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` (B T), filled up at the end, or at the beginning."""
    longest = max(len(row) for row in rows)
    ids_BT = torch.full((len(rows), longest), pad)
    mask_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids_BT[number, place] = torch.tensor(row, dtype=torch.long)
        mask_BT[number, place] = 1
    return {"input_ids": ids_BT, "attention_mask": mask_BT}


def _order(count: int, labels: Sequence[int], seed: int, task: str) -> list[int]:
    if not labels:
        return shuffled(count, seed, task)
    members: dict[int, list[int]] = {label: [] for label in sorted(set(labels))}
    for row, label in enumerate(labels):
        members[label].append(row)
    classes = list(members.values())
    return [classes[label][index] for label, index in drawn_order([len(one) for one in classes], seed, task)]


def _texts(rows: Sequence[Row], columns: Sequence[str], where: str) -> list[dict[str, str]]:
    """The columns' values as text. Raises DataError that names each row with something else."""
    problems = []
    texts = []
    for row in rows:
        text = {}
        for column in columns:
            value: Any = row.values.get(column)
            if isinstance(value, float) and not math.isfinite(value):
                problems.append(Problem(row.where, f'column "{column}" is {no_number(value)}, expected text'))
                continue
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                text[column] = str(value)
                if _is_unicode(text[column]):
                    continue
                problems.append(Problem(row.where, f'column "{column}" holds half a character (a surrogate)'))
                continue
            found = "missing" if value is None else f"a {type(value).__name__}"
            problems.append(Problem(row.where, f'column "{column}" is {found}, expected text'))
        texts.append(text)
    refuse_bad_rows(problems, where, len(rows))
    return texts


def _is_unicode(text: str) -> bool:
    """JSON can write halves of characters, as `\\ud83d`, which no tokenizer takes."""
    return text.isascii() or not any("\ud800" <= one <= "\udfff" for one in text)
