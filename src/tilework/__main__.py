"""`python -m tilework`: the same as `tilework`, where the command is not on the path."""

from .cli.main import main

main()
