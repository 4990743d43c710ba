"""`python -m meshkit.cli` is `v4mesh`; the supervisor starts services this way, whatever the PATH holds."""

import sys

from meshkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
