"""Counted cost, budgets and the frontier of cost against quality."""

from .cost_frontier import frontier as frontier
from .cost_record import Cost as Cost
from .counting import cost as cost
