"""The command line: `jpaged generate | chat | batch | convert`."""

from jpaged.cli.app import main

__all__ = ["main"]
