"""Constants of chips and fabrics fitted to measurements, and predictions held against them."""
