"""Benchmarks: ours against peers, interleaved in one run, every result checked.

``python -m alltoallv bench`` (`alltoallv_tools.cli.bench`) starts one job per world size and competitor set; each rank
runs `alltoallv_tools.bench.rank`. Times are medians of many calls. Compare only ratios within one run, because machines
are noisy.
"""
