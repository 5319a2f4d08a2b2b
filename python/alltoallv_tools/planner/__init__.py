"""Predicts the time of exchanges and quantized reductions on clusters that are not at hand; docs/plan.md has the model.

`topology` describes machines, `patterns` what the ranks send, `model` the algorithms, `fit` takes parameters from
measurements.
"""
