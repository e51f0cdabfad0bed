"""Benchmarks: subjects x stages, registered once, each asserting its answer."""
