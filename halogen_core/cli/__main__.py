"""`python -m halogen_core.cli`, the same as `halogen`."""

from halogen_core.cli.entry import main

if __name__ == "__main__":
    main()
