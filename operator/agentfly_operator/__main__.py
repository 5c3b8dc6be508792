"""`python -m agentfly_operator`."""

import sys

from agentfly_operator.main import main

sys.exit(main())
