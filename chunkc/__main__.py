"""`python -m chunkc`."""

import sys

from chunkc.cli.command import main

sys.exit(main())
