"""``python -m moeplan``: the same command line as the installed ``moeplan``."""

from moeplan.cli.app import main

if __name__ == "__main__":
    main()
