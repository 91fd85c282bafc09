"""Settings of a run as values."""

from moeplan.run_config import RunConfig


def test_equal_settings_have_one_hash() -> None:
    one, same, other = (RunConfig(data_mix=mix) for mix in ({"a": 1.0}, {"a": 1.0}, {"a": 2.0}))
    assert one == same
    assert len({one, same, other, RunConfig()}) == 3
