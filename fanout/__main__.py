"""`python -m fanout` is the command `fanout`."""

from fanout.cli import main

if __name__ == "__main__":
    main()
