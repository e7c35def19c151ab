"""``python -m deuteron`` is the command ``deuteron``."""

from deuteron.cli import main

if __name__ == "__main__":
    main()
