"""The command line: tables for people, JSON for programs. Nothing imports this package."""
