"""``python -m mmpos``: the command `mmpos` where no console script is on the path."""

import os
import sys

if sys.path[0] in ("", os.getcwd()):  # a folder `tasks` of the user's must not hide ours
    sys.path.append(sys.path.pop(0))

from tasks.cli import main

if __name__ == "__main__":
    sys.exit(main())
