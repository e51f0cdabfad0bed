"""The search for the fastest mapping on a wafer, its bounds, and plans of other systems."""
