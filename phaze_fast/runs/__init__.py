"""Infrastructure of long runs: workers, journals, sweeps and a store of results."""
