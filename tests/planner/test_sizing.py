"""Clusters that others beat in both time and money are off the front."""

from hypothesis import given
from hypothesis import strategies as st

from moeplan.planner.sizing import on_front

SECONDS_AND_USD = st.lists(st.tuples(st.integers(1, 9).map(float), st.integers(1, 9).map(float)), min_size=1)


def test_the_front_keeps_what_is_best_in_one_thing() -> None:
    assert on_front([(1, 9), (2, 5), (3, 5), (9, 1), (9, 9)]) == [True, True, False, True, False]


@given(SECONDS_AND_USD)
def test_what_is_off_the_front_is_beaten_by_something_on_it(bills: list[tuple[float, float]]) -> None:
    front = on_front(bills)
    kept = [one for one, is_on in zip(bills, front, strict=True) if is_on]
    assert min(bills) in kept
    for one, is_on in zip(bills, front, strict=True):
        beaten = any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in kept)
        assert is_on != beaten
