"""Fair tables: metrics, `evaluate`, its `Results`, intervals and paired comparisons."""

from .bootstrap import Comparison as Comparison
from .bootstrap import compare as compare
from .evaluator import evaluate as evaluate
from .feature_detectors import evaluate_features as evaluate_features
from .result_tables import compare_table as compare_table
from .results import Results as Results
