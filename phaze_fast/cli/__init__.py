"""Takes a command line, gives tables for people and JSON for programs. Nothing imports this."""
