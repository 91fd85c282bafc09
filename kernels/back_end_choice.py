"""Which back end of a kernel was found fastest for a shape. Filled in by whoever measured; empty: the defaults."""

Shape = tuple[int, ...]

_CHOSEN: dict[tuple[str, Shape], str] = {}


def choose(operation: str, shape: Shape, backend: str) -> None:
    """From now on, ``operation`` on weights of ``shape`` runs by ``backend`` in this process."""
    _CHOSEN[operation, shape] = backend


def chosen(operation: str, shape: Shape) -> str | None:
    """The back end chosen for weights of ``shape``; None: nobody measured."""
    return _CHOSEN.get((operation, shape))


def choices() -> dict[str, str]:
    """All choices, as ``operation ExHxF`` to back end, in order."""
    named = {f"{operation} {'x'.join(map(str, shape))}": name for (operation, shape), name in _CHOSEN.items()}
    return dict(sorted(named.items()))


def forget() -> None:
    """Back to the defaults."""
    _CHOSEN.clear()
