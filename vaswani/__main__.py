"""`python -m vaswani` is the command `vaswani`."""

from .cli import main

if __name__ == "__main__":
    main()
