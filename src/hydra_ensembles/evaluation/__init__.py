"""Metrics, `evaluate` and its `Results`, intervals, paired comparisons and tables."""

from .bootstrap import Comparison as Comparison
from .bootstrap import compare as compare
from .evaluator import evaluate as evaluate
from .feature_detectors import evaluate_features as evaluate_features
from .result_tables import compare_table as compare_table
from .results import Results as Results
