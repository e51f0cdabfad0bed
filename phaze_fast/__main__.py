"""Takes ``python -m phaze_fast``, gives the command line."""

import sys

from phaze_fast.cli.main import main

sys.exit(main())
