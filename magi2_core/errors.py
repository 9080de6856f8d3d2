"""The errors of the core. Each message is a sentence: what was wrong, with which value, what to do."""

from __future__ import annotations

from collections.abc import Iterable


class Magi2Error(Exception):
    """Something the user can act on; its text is shown as it is."""


class RequestError(Magi2Error, ValueError):
    """A request that cannot be carried out: a bad size, prompt, picture, option or output path."""


class CheckpointError(Magi2Error, ValueError):
    """A checkpoint folder that does not hold what it must: names file, key, expected and found."""


class MissingDependencyError(Magi2Error, ImportError):
    """An optional package that a requested feature needs is absent, too old or broken."""


class DeviceMemoryError(Magi2Error, MemoryError):
    """A device has no room for what a call needs; the message names both, and what would lower it."""


class NonFiniteError(Magi2Error, ArithmeticError):
    """A latent became NaN or infinite; the message says at which step."""


def named(name: str | None) -> type[Magi2Error] | None:
    """The class of that name, if it is one of these: from one process to another errors travel by name (60 §6.6)."""
    kind = globals().get(name or "")
    return kind if isinstance(kind, type) and issubclass(kind, Magi2Error) else None


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """RequestError that lists the choices if `value` is none of them."""
    if value not in (choices := tuple(choices)):
        raise RequestError(f"{name} is {value!r}; it must be one of {', '.join(choices)}.")
