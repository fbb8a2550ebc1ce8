"""What the spec may say of a task's metric; which metrics exist is said here only. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from merging.settings import Settings


class AccuracySpec(Settings):
    """Share of examples whose class is the head's highest score."""

    type: Literal["accuracy"] = "accuracy"


class ChoiceSpec(Settings):
    """Share of examples whose class has the likeliest answer, among the answers in `labels`."""

    type: Literal["choice"] = "choice"
    normalise: Literal["none", "tokens", "characters"] = Field(
        default="none", description="Whether an answer's log-likelihood is divided by its length."
    )


class ExactMatchSpec(Settings):
    """Share of examples whose generated text is the target, or an answer of their class; greedy."""

    type: Literal["exact_match"] = "exact_match"
    max_new_tokens: int = Field(default=16, ge=1, description="The most tokens that are generated.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=("\n",), description="What is generated counts up to the first of these."
    )


class Seq2SeqSpec(Settings):
    """Share of examples whose answer is right: the likeliest one (as `choice`), or the text that is
    generated (as `exact_match`)."""

    type: Literal["seq2seq"] = "seq2seq"
    by: Literal["likelihood", "generation"] = Field(
        default="likelihood", description="Whether answers are compared by likelihood, or one is generated."
    )
    max_new_tokens: int = Field(default=16, ge=1, description="The most tokens that are generated.")


class PerplexitySpec(Settings):
    """exp of the mean negative log-likelihood per token: of the target given the prompt, or else of the
    prompt; lower is better."""

    type: Literal["perplexity"] = "perplexity"


class LmEvalSpec(Settings):
    """A score of the lm-eval harness (extra `lm-eval`), which brings its own data."""

    type: Literal["lm_eval"] = "lm_eval"
    tasks: tuple[str, ...] = Field(
        min_length=1, description="Tasks of the harness; their scores are averaged."
    )
    include_path: Path | None = Field(default=None, description="A folder of further task files (YAML).")
    metric: str = Field(
        default="acc,none", min_length=1, description="Which of the tasks' scores: `acc,none`."
    )
    limit: int | None = Field(default=None, ge=1, description="Only the first so many examples of each task.")
    shots: int | None = Field(
        default=None, ge=0, description="Solved examples before each question; as the task says if not given."
    )
    batch_size: int = Field(default=16, ge=1, description="Examples per forward pass.")


MetricSpec: TypeAlias = Annotated[
    AccuracySpec | ChoiceSpec | ExactMatchSpec | Seq2SeqSpec | PerplexitySpec | LmEvalSpec,
    Field(discriminator="type"),
]

METRIC_TYPES: dict[str, type[Settings]] = {
    "accuracy": AccuracySpec,
    "choice": ChoiceSpec,
    "exact_match": ExactMatchSpec,
    "seq2seq": Seq2SeqSpec,
    "perplexity": PerplexitySpec,
    "lm_eval": LmEvalSpec,
}
