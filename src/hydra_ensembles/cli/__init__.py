"""The command line: parse, call, print; one file per command. Heavy imports wait for it."""
