"""TextReader: the base's own tokenizer, and how its architecture reads text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from merging.data.prompts import Prompt
from merging.errors import DataError
from merging.libraries import reading_with

Kind: TypeAlias = Literal["encoder", "causal", "seq2seq"]

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
)

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_WRITERS = (*_CAUSAL, "ForConditionalGeneration", "MTModel", "EncoderDecoderModel")


class TextReader:
    """Text to token ids, as the base does it."""

    def __init__(self, tokenizer: Any, config: Any) -> None:
        """`config`: the base's transformers config."""
        self.tokenizer = tokenizer
        self.kind: Kind = kind_of(config)
        self.start: int | None = getattr(config, "decoder_start_token_id", None)
        self.end: int | None = tokenizer.eos_token_id
        self.pad: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        names = getattr(config, "architectures", None) or ()
        self.writes = any(str(name).endswith(_WRITERS) for name in names)
        self.positions = _positions(config)
        self.limit = _limit(tokenizer, self.positions)
        relative = self.positions is None and hasattr(config, "relative_attention_num_buckets")
        self.bound = None if relative else self.limit  # longer texts cannot be asked for

    def prompt(self, text: str) -> list[int]:
        """What the model reads; a causal model's prompt is left open, without the token that ends a text."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        ended = self.kind == "causal" and len(ids) > 1 and ids[-1] == self.end
        return ids[:-1] if ended else ids

    def target(self, text: str) -> list[int]:
        """What an encoder-decoder shall say, with the token that ends it."""
        ids: list[int] = self.tokenizer(text_target=text)["input_ids"]
        if self.end is None or (ids and ids[-1] == self.end):
            return ids
        return [*ids, self.end]

    def answer(self, prompt: Prompt, text: str) -> list[int]:
        """The answer's tokens as they follow the prompt."""
        if self.kind == "seq2seq":
            return self.target(text)
        whole = self.prompt(prompt.text + text)
        if whole[: len(prompt.ids)] == prompt.ids:
            return whole[len(prompt.ids) :]
        alone: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return alone

    def text(self, ids: Sequence[int]) -> str:
        decoded: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return decoded


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer's files lie beside the weights."""
    return any((folder / name).is_file() for name in _FILES)


def text_reader(folder: Path, where: str) -> TextReader:
    """The tokenizer that lies beside the base's weights. Raises DataError if there is none."""
    folder = Path(folder)
    if not has_tokenizer(folder):
        raise DataError(
            f"{where}: the base {folder} has no tokenizer (tokenizer.json, tokenizer_config.json)",
            remedy='Copy it from the model the base was made from, or give token ids as {"type": "tensors"}.',
        )
    files = [folder / name for name in (*_FILES, "config.json") if (folder / name).is_file()]
    states = [file.stat() for file in files]
    with reading_with(DataError, f"{where}: the base's tokenizer in {folder} cannot be used"):
        return _opened(folder, tuple((state.st_mtime_ns, state.st_size) for state in states))


@lru_cache(maxsize=2)
def _opened(folder: Path, states: tuple[tuple[int, int], ...]) -> TextReader:
    """Opened once for all tasks of a run. `states`: of the files, so that changed ones are read anew."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return TextReader(tokenizer, config)


def kind_of(config: Any) -> Kind:
    """How a model of this config reads text."""
    names = [str(name) for name in getattr(config, "architectures", None) or ()]
    if getattr(config, "is_encoder_decoder", False):
        return "encoder" if any("Encoder" in name for name in names) else "seq2seq"
    causal = any(name.endswith(_CAUSAL) for name in names)
    return "causal" if causal else "encoder"


def _positions(config: Any) -> int | None:
    """How many tokens the model has positions for; None where they are relative, or nothing tells."""
    from merging.backbones.pretrained import first_position

    found = getattr(config, "max_position_embeddings", None)
    return int(found) - first_position(config) if found and found > 0 else None


def _limit(tokenizer: Any, positions: int | None) -> int | None:
    """How many tokens the model can read, as far as its config and tokenizer tell."""
    found = [positions]
    if tokenizer.model_max_length < 10**6:  # transformers' stand-in for "not known" is 10**30
        found.append(tokenizer.model_max_length)
    known = [int(one) for one in found if one]
    return min(known) if known else None
