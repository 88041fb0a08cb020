"""Runs the command line: `python -m shardstep`."""

from shardstep_command import main

main()
