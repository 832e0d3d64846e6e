"""`python -m parcompiler` is the command `parcompiler`."""

from parcompiler.cli import main

if __name__ == "__main__":
    main()
