"""A process on the first of two nodes of Ray, of which the second is lost: ``lost_node.py FOLDER``.

Prints where actors that belong on the head were placed. Ends with 3 if nobody ends it before.
"""

import os
import sys
import time
from pathlib import Path

import ray
from two_nodes import start

from agentfly.training import nodes

VARIABLES = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
LOST_S = 120.0


@ray.remote
class Runner:
    """Anything that runs."""

    def place(self) -> str:
        """The address of its node."""
        return str(ray.util.get_node_ip_address())


def main() -> int:
    """The exit code."""
    os.environ |= VARIABLES
    address, second = start(VARIABLES, Path(sys.argv[1]))
    ray.init(address=address, log_to_driver=False)
    with nodes.watched(2):
        runners = [nodes.on_head(Runner).remote() for _ in range(4)]
        sys.stdout.write(" ".join(ray.get([each.place.remote() for each in runners], timeout=60)) + "\n")
        sys.stdout.flush()
        second.kill()
        time.sleep(LOST_S)
    return 3


if __name__ == "__main__":
    sys.exit(main())
