"""Which chip: a best-first search over chips and strategies that proves its answer."""
