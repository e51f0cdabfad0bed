"""Fits of a few constants: what is known is found, what is not is said."""

import numpy as np
import pytest

from phaze_fast.calibration.fit import Constant, cross_validated_errors, fit_constants

RNG = np.random.default_rng(3)
SIZE = 2.0 ** RNG.uniform(5, 25, 80)


def two(values):
    return np.maximum(values[0] + SIZE / values[1], 0.0)


TRUTH = np.array([20.0, 300.0])
WANTED = [Constant("startup", 1.0, 0.01, 1e4), Constant("rate", 50.0, 1.0, 1e5)]


def test_known_constants_are_found_within_their_intervals():
    noise = RNG.normal(0.0, 0.03, len(SIZE))
    measured = two(TRUTH) * np.exp(noise)
    fit = fit_constants(lambda x: np.log(two(x) / measured), WANTED)
    assert fit.values == pytest.approx(TRUTH, rel=0.03)
    assert np.all((fit.low < fit.values) & (fit.values < fit.high))
    assert np.all((fit.low <= TRUTH) & (fit.high >= TRUTH))
    unseen = cross_validated_errors(lambda x: np.log(two(x) / measured), WANTED)
    assert 0.5 * np.abs(noise).mean() < np.abs(unseen).mean() < 1.5 * np.abs(noise).mean()


def test_one_wrong_row_does_not_decide():
    measured = two(TRUTH).copy()
    measured[::20] *= 3.0
    fit = fit_constants(lambda x: np.log(two(x) / measured), WANTED)
    assert fit.values == pytest.approx(TRUTH, rel=0.02)


def test_what_rows_cannot_tell_is_named():
    measured = SIZE * 6.0
    wanted = [Constant("a", 1.0, 0.1, 10.0), Constant("b", 3.0, 0.1, 10.0)]
    wanted.append(Constant("unused", 2.0, 1.0, 4.0))
    fit = fit_constants(lambda x: np.log(SIZE * x[0] * x[1] / measured), wanted)
    assert fit.collinear == (("b", "a"),)
    assert fit.undetermined == ("unused",)
    assert (fit.values[2], fit.low[2], fit.high[2]) == pytest.approx((2.0, 1.0, 4.0))
    assert fit.values[0] * fit.values[1] == pytest.approx(6.0)
