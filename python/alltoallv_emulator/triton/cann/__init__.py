"""Stands for ``triton.language.extra.cann``, where the package `triton` has none."""
