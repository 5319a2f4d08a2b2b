"""A sitecustomize of a user's own, which the emulator's must not hide."""

import builtins

builtins.own_sitecustomize = True  # type: ignore[attr-defined]
