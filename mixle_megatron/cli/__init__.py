"""The command line: one module for each command, with no logic of its own."""
