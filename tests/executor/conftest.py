"""Fixtures of the executor's tests."""

from collections.abc import Iterator

import pytest

from tests.executor.pools import Pools


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Gloo processes that live through a module."""
    with Pools(tmp_path_factory) as pools:
        yield pools
