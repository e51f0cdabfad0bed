"""Mappings of a model on a wafer, and the time, memory and energy of one training step."""
