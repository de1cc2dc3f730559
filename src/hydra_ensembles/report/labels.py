"""What figures are called on a page, and what they mean to a reader who meets them first."""

from __future__ import annotations

LABELS = {
    "cls/Acc": "accuracy",
    "cls/NLL": "NLL",
    "cls/Brier": "Brier",
    "cal/ECE": "ECE",
    "cal/aECE": "adaptive ECE",
    "ood/mean/AUROC": "OOD AUROC",
    "ood/mean/mutual-information/AUROC": "OOD AUROC by mutual information",
    "ood/mean/AUPR": "OOD AUPR",
    "ood/mean/FPR95": "OOD FPR95",
    "sc/AURC": "AURC",
    "fail/AUROC": "error AUROC",
    "ood/mean/novelty/AUROC": "OOD AUROC by novelty",
    "ood/mean/novelty/FPR95": "OOD FPR95 by novelty",
    "ood/mean/novelty/Caught_5": "OOD caught at 5 % alarms",
    "novelty/Alarms_5": "alarms on test data at 5 %",
    "policy/Answered": "answered by the policy",
    "policy/WrongOfAll": "answered and wrong, of all",
    "policy/WrongOfAnswered": "wrong, of the answered",
    "policy/New": "called new",
    "ood/mean/policy/Answered": "OOD answered by the policy",
    "shift/mean/cls/Acc": "shifted accuracy",
    "shift/mean/cls/NLL": "shifted NLL",
    "shift/mean/cal/ECE": "shifted ECE",
    "div/Disagreement": "disagreement",
}

MEANINGS = {
    "cls/NLL": "negative log-likelihood of the true class, in nats: how good the probabilities are",
    "cls/Brier": "squared error of the probabilities, summed over classes",
    "cal/ECE": "gap between confidence and accuracy, in 15 bins of equal width (%)",
    "cal/aECE": "the same, in bins of equally many examples (%)",
    "sc/AURC": "error rate among the answered, averaged over all shares that may be answered (%)",
    "fail/AUROC": "how well uncertainty ranks wrong answers above right ones (%; 50 is chance)",
    "ood/mean/AUROC": "how well uncertainty ranks outliers (out of distribution, mean of all sets) "
    "above test data (%; 50 is chance)",
    "ood/mean/AUPR": "area under precision and recall of finding outliers (%)",
    "ood/mean/FPR95": "test data called outliers where 95 % of the outliers are found (%)",
    "ood/mean/novelty/AUROC": "how well novelty ranks outliers above test data (%; 50 is chance)",
    "ood/mean/novelty/FPR95": "test data called new where 95 % of the outliers are found (%)",
    "ood/mean/novelty/Caught_5": "outliers that are newer than 95 % of the known data (%)",
    "novelty/Alarms_5": "test data that is newer than 95 % of the known data (%; 5 is expected)",
    "div/Disagreement": "pairs of members that give different answers (%)",
}
"""Of the figures whose names do not say it."""

SPOKEN = {
    key: LABELS[key]
    for key in (
        *("cls/Acc", "cls/NLL", "cal/ECE", "cal/aECE", "sc/AURC", "fail/AUROC", "ood/mean/AUROC"),
        *("ood/mean/novelty/AUROC", "shift/mean/cls/Acc", "shift/mean/cls/NLL"),
    )
}
"""The figures that verdicts speak of."""
