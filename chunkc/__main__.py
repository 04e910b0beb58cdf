"""`python -m chunkc`."""

import sys

from chunkc.cli import main

sys.exit(main())
