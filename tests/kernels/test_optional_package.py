from importlib.metadata import PackageNotFoundError

import pytest

from moeplan.kernels import flash_attention, grouped_gemm_quack, optional_package
from moeplan.kernels.optional_package import version_in_series


@pytest.mark.parametrize("found, expected", [("0.6.5", "0.6.5"), ("0.7.0", None), (None, None)])
def test_another_series_is_left_alone(found: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        assert package == "some-kernels"
        if found is None:
            raise PackageNotFoundError(package)
        return found

    monkeypatch.setattr(optional_package, "version", version)
    version_in_series.cache_clear()
    assert version_in_series("some-kernels", "0.6.") == expected
    version_in_series.cache_clear()


def test_what_is_installed_is_asked_by_the_names_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names and series that pyproject.toml pins."""
    versions = {"quack-kernels": "0.6.5", "flash-attn-4": "4.0.0b36"}
    monkeypatch.setattr(optional_package, "version", versions.__getitem__)
    version_in_series.cache_clear()
    found = grouped_gemm_quack.installed_version(), flash_attention.installed_version()
    version_in_series.cache_clear()
    assert found == ("0.6.5", "4.0.0b36")
