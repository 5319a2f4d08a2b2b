"""Reads numbers, paths and texts from environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from alltoallv.errors import InvalidParamError

Environ = Mapping[str, str]
LARGEST = 2**31 - 1


def value_of(env: Environ, name: str) -> str | None:
    """Returns a variable; None if it is not set, or is one of ours and empty, which means the same."""
    value = env.get(name)
    return None if value == "" and name.startswith("ALLTOALLV_") else value


def required(env: Environ, name: str) -> int:
    """Returns the number in a variable that the launcher sets together with others; raises if it is missing."""
    if value_of(env, name) is None:
        raise InvalidParamError(
            f"{name} is not set, expected an integer: the launcher's other variables are set", id=1299
        )
    return integer(env, name, 0)


def optional(env: Environ, *names: str) -> int | None:
    """Returns the number in the first of these variables that is set; None if none is."""
    return next((integer(env, name, 0) for name in names if value_of(env, name) is not None), None)


def port(name: str, default: int) -> int:
    """Returns the number of a port from the environment, or ``default``; raises if that is none."""
    number = integer(os.environ, name, default)
    if not 1 <= number <= 65535:
        what = "is not set, which means" if value_of(os.environ, name) is None else "is"
        raise InvalidParamError(f"{name} {what} {number}, expected a port, 1 to 65535", id=1300)
    return number


def utf8(name: str, value: object, secret: bool = False) -> str:
    """Returns the text; raises if it has no UTF-8 form. No error shows a text that is ``secret``."""
    if not isinstance(value, str) or any("\ud800" <= c <= "\udfff" for c in value):
        raise InvalidParamError(f"{name} is {'none' if secret else ascii(value)}, expected text in UTF-8", id=1301)
    return value


def order(name: str, value: object) -> str | None:
    """Returns the order of sums that ``name`` asks for; raises unless it is None, empty or ``"rank"``."""
    if value not in (None, "", "rank"):
        raise InvalidParamError(f"{name} is {value!r}, expected 'rank' or None", id=1302)
    return "rank" if value else None


def switch(env: Environ, name: str) -> None:
    """Raises InvalidParamError for a variable that is neither 0 nor 1, nor empty."""
    if env.get(name, "") not in ("", "0", "1"):
        raise InvalidParamError(f"{name} is {env[name]!r}, expected 0 or 1", id=1303)


def folder(env: Environ, name: str) -> None:
    """Raises InvalidParamError for a variable that does not name an existing folder."""
    if env.get(name) and not os.path.isdir(env[name]):
        raise InvalidParamError(f"{name} is {env[name]!r}, expected a folder that exists", id=1304)


def seconds(env: Environ, name: str, default: float) -> float:
    """Returns the seconds, above 0, in a variable."""
    value = value_of(env, name)
    if value is None:
        return default
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise InvalidParamError(f"{name} is {value!r}, expected seconds above 0", id=1305)
    return number


def integer(env: Environ, name: str, default: int) -> int:
    """Returns the integer of 0 to ``LARGEST`` in a variable."""
    text = value_of(env, name)
    if text is None:
        return default
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal()):
        raise InvalidParamError(f"{name} is {text!r}, expected an integer of at least 0", id=1306)
    if len(digits) > 10 or int(digits) > LARGEST:
        raise InvalidParamError(f"{name} is {text[:40]!r}, expected an integer of at most {LARGEST}", id=1307)
    return int(digits)
