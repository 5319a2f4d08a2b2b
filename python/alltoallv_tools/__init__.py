"""The command line and its commands: demo, bench, planner, doctor. They import alltoallv, never the reverse."""
