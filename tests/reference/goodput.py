"""A training run that fails at random, second by second of its timeline."""

import random


def simulate(work_s, checkpoint_s, restart_s, mtbf_s, segments, seed):
    """Seconds of work that was kept over all seconds, for so many segments between checkpoints.

    The next failure is drawn whenever the run was just struck by one: failures have no memory.
    """
    rng = random.Random(seed)
    now, next_failure = 0.0, rng.expovariate(1.0 / mtbf_s)

    def passes(seconds):
        """Let time pass; tell whether it did without a failure."""
        nonlocal now, next_failure
        if now + seconds <= next_failure:
            now += seconds
            return True
        now = next_failure
        next_failure = now + rng.expovariate(1.0 / mtbf_s)
        return False

    for _ in range(segments):
        while not passes(work_s + checkpoint_s):
            while not passes(restart_s):
                pass
    return segments * work_s / now
