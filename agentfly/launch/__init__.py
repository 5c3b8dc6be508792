"""The main processes of a run's pods.

Guarantees:
1. A SIGTERM that comes while one of them is still starting is kept for `pod.stop_asked`: the kernel would
   drop it, because the first process of a container has no default way to end.
"""

import os
import signal

early: list[int] = []  # signals that came before anybody listened

if os.getpid() == 1:
    signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
