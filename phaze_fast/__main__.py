"""The command line as a module: ``python -m phaze_fast``."""

import sys

from phaze_fast.cli.main import main

sys.exit(main())
