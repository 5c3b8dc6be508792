"""Percentiles and ratios, with values worked by hand."""

import pytest

from tests.bench.stats import Series, Spread, percentile, ratio, spread


def test_a_percentile_lies_between_its_two_nearest_samples() -> None:
    samples = [40.0, 10.0, 30.0, 20.0]
    # position 1.5 of 0..3 is half way from 20 to 30; position 2.97 is 0.97 of the way from 30 to 40
    assert percentile(samples, 50) == 25.0
    assert percentile(samples, 99) == pytest.approx(39.7)


def test_the_outer_percentiles_are_the_extremes() -> None:
    assert percentile([3.0, 1.0, 2.0], 0) == 1.0
    assert percentile([3.0, 1.0, 2.0], 100) == 3.0
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_a_percentile_that_does_not_exist_is_refused(samples: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        percentile(samples, percent)


def test_a_spread_is_median_and_extremes() -> None:
    assert spread([3.0, 9.0, 4.0]) == Spread(4.0, 3.0, 9.0, 3)
    assert spread([1.0, 2.0]) == Spread(1.5, 1.0, 2.0, 2)
    with pytest.raises(ValueError, match="no repeats"):
        spread([])


def test_a_ratio_is_formed_within_each_repeat() -> None:
    slow, fast = Series(), Series()
    # Noise doubles both sides in the second repeat: the ratio stays 2, that of pooled medians would not.
    slow.add([2.0, 2.0, 90.0])
    fast.add([1.0, 1.0, 1.0])
    slow.add([4.0, 4.0, 4.0])
    fast.add([2.0, 2.0, 70.0])
    slow.add([9.0])
    fast.add([3.0])
    assert ratio(slow, fast) == Spread(2.0, 2.0, 3.0, 3)


def test_a_ratio_of_different_numbers_of_repeats_is_refused() -> None:
    one, none = Series(), Series()
    one.add([1.0])
    with pytest.raises(ValueError, match="zip"):
        ratio(one, none)


def test_a_series_pools_its_samples_for_percentiles_and_keeps_repeats_apart_for_medians() -> None:
    series = Series()
    series.add([1.0, 2.0, 3.0])
    series.add([10.0])
    assert series.percentile(50) == 2.5
    assert series.medians() == [2.0, 10.0]
    assert len(series) == 4
    with pytest.raises(ValueError, match="no samples"):
        series.add([])
