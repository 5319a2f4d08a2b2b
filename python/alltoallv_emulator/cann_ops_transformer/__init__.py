"""Stands for CANN's package of this name, where ``--with cann_ops_transformer`` asks for it."""

from . import ops
from .ops import *  # noqa: F403

__all__ = [*ops.__all__, "ops"]
