"""What other methods find with the same cost model: fixed plans, early stop, Bayesian search."""
