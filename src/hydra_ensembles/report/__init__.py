"""Pictures and pages of plain results."""
