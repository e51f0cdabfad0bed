"""What a mapping of a model on a wafer is, and what one step of it takes."""
