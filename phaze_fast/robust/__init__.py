"""Chips that stay good where constants are uncertain: intervals, regret, value of information."""
