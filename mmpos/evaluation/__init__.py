"""A verdict on long contexts: samples, subjects, acceptance, the range that holds."""

from mmpos.evaluation.acceptance import Acceptance, accept
from mmpos.evaluation.again import Again, rerun
from mmpos.evaluation.costs import Cost, costs_of
from mmpos.evaluation.effective import (
    Cell,
    EffectiveRange,
    Failing,
    effective_range,
    samples_needed,
    wilson_lower,
)
from mmpos.evaluation.interface import Decoded, Taken, decoded, taken
from mmpos.evaluation.judging import Outcome, outcomes
from mmpos.evaluation.limits import Limits
from mmpos.evaluation.networks import NetworkSubject, TransformersSubject
from mmpos.evaluation.perplexity import (
    Perplexity,
    by_context,
    control,
    last_k,
    non_overlapping,
    sliding_window,
)
from mmpos.evaluation.rows import Row
from mmpos.evaluation.samples import Needles, Sample, Verdict, read_samples
from mmpos.evaluation.subjects import CallableSubject, Session, Subject
from mmpos.evaluation.symbols import SymbolNeedles
from mmpos.evaluation.text_needles import TextNeedles

__all__ = [
    "Acceptance",
    "Again",
    "CallableSubject",
    "Cell",
    "Cost",
    "Decoded",
    "EffectiveRange",
    "Failing",
    "Limits",
    "Needles",
    "NetworkSubject",
    "Outcome",
    "Perplexity",
    "Row",
    "Sample",
    "Session",
    "Subject",
    "SymbolNeedles",
    "Taken",
    "TextNeedles",
    "TransformersSubject",
    "Verdict",
    "accept",
    "by_context",
    "control",
    "costs_of",
    "decoded",
    "effective_range",
    "last_k",
    "non_overlapping",
    "outcomes",
    "read_samples",
    "rerun",
    "samples_needed",
    "sliding_window",
    "taken",
    "wilson_lower",
]
