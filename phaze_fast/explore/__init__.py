"""Takes a space of chips and the stages before it, gives the best chip with a certificate.

So far it holds the first bound of the search; the search itself comes after placement.
"""

from phaze_fast.explore.bounds import ADAM_STATE_BYTES, compute_bound_s, training_flops

__all__ = ["ADAM_STATE_BYTES", "compute_bound_s", "training_flops"]
