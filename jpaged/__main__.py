"""`python -m jpaged`: the same as the command `jpaged`."""

from jpaged.cli import main

main()
