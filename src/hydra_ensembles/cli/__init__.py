"""The command line: parse, call, print; one file a command. Heavy imports wait for the command."""
