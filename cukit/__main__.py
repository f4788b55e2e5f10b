"""`python -m cukit` is the `cukit` command."""

from cukit.cli import main

if __name__ == "__main__":
    main()
