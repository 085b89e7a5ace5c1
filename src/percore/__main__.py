"""`python -m percore`: the command line. The console script `percore` is the same."""

from percore._cli.main import main

if __name__ == "__main__":
    main()
