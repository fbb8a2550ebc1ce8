"""Prompts: columns of a row put into a template, cut to a number of tokens."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Prompt(NamedTuple):
    """What is left of a prompt after cutting, as text and tokens."""

    text: str
    ids: list[int]
    cut: bool


class Template:
    """Text with columns in braces. Only columns are ever cut: the longest first, from its end."""

    def __init__(self, template: str) -> None:
        self._parts = [(literal, field) for literal, field, _, _ in string.Formatter().parse(template)]
        self.columns = tuple(dict.fromkeys(field for _, field in self._parts if field))

    def fill(self, values: Mapping[str, str]) -> str:
        return "".join(
            literal + (values[field] if field is not None else "") for literal, field in self._parts
        )

    def prompt(
        self, values: Mapping[str, str], encode: Callable[[str], list[int]], most: int
    ) -> Prompt | None:
        """At most `most` tokens; None where the template alone has more."""
        text = self.fill(values)
        ids = encode(text)
        if len(ids) <= most:
            return Prompt(text, ids, cut=False)
        left = dict(values)
        for column in sorted(self.columns, key=lambda column: -len(values[column])):
            left[column] = ""
            if len(encode(self.fill(left))) > most:
                continue
            left[column] = self._longest(left, column, values[column], encode, most)
            text = self.fill(left)
            return Prompt(text, encode(text), cut=True)
        return None

    def _longest(
        self, left: dict[str, str], column: str, value: str, encode: Callable[[str], list[int]], most: int
    ) -> str:
        """The longest beginning of the column's value with which the prompt fits, in whole words if there
        are any."""
        fits, too_long = 0, len(value)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if len(encode(self.fill({**left, column: value[:middle]}))) <= most:
                fits = middle
            else:
                too_long = middle
        start = value[:fits]
        words = start.rsplit(maxsplit=1)
        inside_a_word = fits < len(value) and not value[fits].isspace() and not start[-1:].isspace()
        return words[0] if inside_a_word and len(words) == 2 else start.rstrip()
