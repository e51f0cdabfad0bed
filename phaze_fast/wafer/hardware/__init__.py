"""Wafers as validated records: dies, rules of manufacture, fault maps, totals and spaces."""
