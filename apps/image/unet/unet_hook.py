"""Another name of hook.py."""

from hook import main

if __name__ == "__main__":
    main()
