"""Pools of gloo processes by their number, started when they are first asked for, one at a time."""

from contextlib import ExitStack
from typing import Self

import pytest

from tests.executor.gloo_pool import GlooPool, gloo_pool


class Pools(dict[int, GlooPool]):
    """``pools[4]`` is a pool of four. Asking for another number ends the pool before it, to spare the machine."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory, self._stack = factory, ExitStack()

    def __missing__(self, world_size: int) -> GlooPool:
        self._stack.close()
        self.clear()
        self[world_size] = self._stack.enter_context(gloo_pool(world_size, self._factory.mktemp("gloo")))
        return self[world_size]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
