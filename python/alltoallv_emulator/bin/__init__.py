"""A folder for PATH: the commands that a machine with NPUs has."""
