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


def with_compiler(package_version: str) -> str:
    """A version of quack or FlashAttention beside that of the compiler they share, for what is remembered of both."""
    return f"{package_version} by cutlass-dsl {version_in_series('nvidia-cutlass-dsl', '')}"
