"""What long runs need: workers, journals, sweeps and a store of results."""
