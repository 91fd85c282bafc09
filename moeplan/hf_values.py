"""Typed reading of a Hugging Face config: each wrong or missing value becomes one error naming file and key."""

from typing import Any, NoReturn

from moeplan.errors import InvalidInputError


class HfValues:
    """The keys of one parsed config. A null value counts as absent, as transformers writes unset ones."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self._nulls = {key for key, value in config.items() if value is None}
        self._config = {key: value for key, value in config.items() if value is not None}
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._config

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """The whole number of ``key``, at least ``minimum``."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            self._wrong(key, value, "a whole number")
        if value < minimum:
            self._wrong(key, value, f"at least {minimum}")
        return value

    def integer_or_null(self, key: str) -> int | None:
        """The whole number of ``key``, or None where it is null; absent is an error."""
        return None if key in self._nulls else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """The number of ``key``."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """The boolean of ``key``."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None, *, allowed: tuple[str, ...] = ()) -> str:
        """The string of ``key``, one of ``allowed`` where given."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self._wrong(key, value, "a string")
        if allowed and value not in allowed:
            self._wrong(key, value, f"one of {', '.join(allowed)}")
        return value

    def texts(self, key: str) -> list[str]:
        """The list of strings of ``key``."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._wrong(key, value, "a list of strings")
        return value

    def layer_types(self, *allowed: str) -> list[str]:
        """The kind of every layer, each of them ``allowed``."""
        types, layers = self.texts("layer_types"), self.integer("num_hidden_layers")
        if unknown := sorted(set(types) - set(allowed)):
            self.refuse("layer_types", f"holds {unknown[0]!r}; {' and '.join(allowed)} can be imported")
        if len(types) != layers:
            self.refuse("layer_types", f"has {len(types)} entries for {layers} layers")
        return types

    def integers(self, key: str, default: list[int]) -> list[int]:
        """The list of whole numbers of ``key``."""
        value = self._get(key, default)
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            self._wrong(key, value, "a list of whole numbers")
        return value

    def inner(self, key: str) -> "HfValues":
        """The object of ``key``, empty where absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            self._wrong(key, value, "an object")
        return HfValues(value, f"{self.where}: {key}")

    def require(self, key: str, *, default: bool | float | str) -> None:
        """Raises unless ``key`` is absent or has its usual value, the only one that ModelSpec can hold."""
        value = self._get(key, default)
        if value != default:
            self.refuse(key, f"is {value!r}; only {default!r} can be imported")

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raises for a value that ModelSpec cannot hold."""
        raise InvalidInputError(f"{self.where}: {key} {reason}", "describe the model in a .toml file of your own")

    def _get(self, key: str, default: Any) -> Any:
        value = self._config.get(key, default)
        if value is None:
            raise InvalidInputError(f"{self.where}: the key {key} is missing", "add it: this family's model needs it")
        return value

    def _wrong(self, key: str, value: Any, wanted: str) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise InvalidInputError(f"{self.where}: {key} must be {wanted}, got {shown}", "correct that key and try again")
