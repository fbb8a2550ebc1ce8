"""What adapters share: reading a case, naming its experts, and the error where it cannot be expressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class NotExpressible(Exception):
    """The case asks for something that this package's settings cannot say; the message says what."""


def named(values: Sequence[T]) -> dict[str, T]:
    """expert000, expert001, ...: names that sort in the order of the list."""
    return {f"expert{index:03}": value for index, value in enumerate(values)}


def refuse_unknown(params: dict[str, object], *known: str) -> None:
    """Raise NotExpressible for a parameter that the adapter does not translate."""
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise NotExpressible(f"no translation for {', '.join(unknown)}")


def resolve(keys: Any, stored: dict[str, Tensor]) -> Any:
    """The tensors behind keys: "a/b" is one, "a/" all below it by the rest of their names; keys nest."""
    if isinstance(keys, dict):
        return {name: resolve(key, stored) for name, key in keys.items()}
    if isinstance(keys, list):
        return [resolve(key, stored) for key in keys]
    if isinstance(keys, str) and keys.endswith("/"):
        return {name.removeprefix(keys): tensor for name, tensor in stored.items() if name.startswith(keys)}
    return stored[keys] if isinstance(keys, str) else keys
