"""Packages that a machine may lack, and that are called only in the versions that were tested."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def version_in_series(package: str, series: str) -> str | None:
    """The installed version of a distribution, where there is one and it begins with ``series``."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return None
    return found if found.startswith(series) else None
