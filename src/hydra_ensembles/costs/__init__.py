"""Counted cost, budgets and the frontier of cost against quality."""

from .cost_record import Cost as Cost
from .formula import cost as cost
from .unit_choice import choose_units as choose_units
