"""`python -m moonwalk.lab.cli`, the same as `moonwalk`."""

from .entry import main

if __name__ == "__main__":
    main()
