"""What papers need and products do not: rivals, sweeps, the shift gap, the frontier, head roles."""
