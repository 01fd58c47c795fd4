"""The command line: `jpaged serve | generate | chat | batch | convert | client | bench`."""

from jpaged.cli.app import main

__all__ = ["main"]
