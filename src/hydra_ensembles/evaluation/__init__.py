"""Metrics, `evaluate` and its `Results`, intervals, paired comparisons and tables."""

from .evaluator import evaluate as evaluate
from .intervals import Comparison as Comparison
from .intervals import compare as compare
from .results import Results as Results
from .tables import compare_table as compare_table
