"""The metrics: from what the spec says to the object that measures."""

from __future__ import annotations

from importlib import import_module

from merging.evaluation.metric import Metric
from merging.evaluation.metric_spec import MetricSpec, Seq2SeqSpec

_CLASSES = {
    "accuracy": "merging.evaluation.accuracy:Accuracy",
    "choice": "merging.evaluation.choice:Choice",
    "exact_match": "merging.evaluation.exact_match:ExactMatch",
    "perplexity": "merging.evaluation.perplexity:Perplexity",
    "lm_eval": "merging.evaluation.lm_eval:LmEval",
}


def metric(spec: MetricSpec) -> Metric:
    """The metric with these settings."""
    name = spec.type
    if isinstance(spec, Seq2SeqSpec):
        name = "choice" if spec.by == "likelihood" else "exact_match"
    module, _, kind = _CLASSES[name].partition(":")
    made: Metric = getattr(import_module(module), kind)(spec)
    return made
