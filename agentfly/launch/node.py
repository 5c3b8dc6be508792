"""A trainer pod beside the head: it brings its ranks to the head's Ray.

    python3 -m agentfly.launch.node

Guarantees:
1. It joins as soon as the head's Ray answers, and tries again until the time for that is over.
2. It ends when Ray does, which is when the head has gone.
3. Asked to end, it keeps Ray until the head has gone, because the head's checkpoint needs it; at most the
   grace of the pod.
4. The termination message says why it ended.
5. It does not join an attempt that has begun without it: verl cannot use a pod that takes the place of
   another one, and would wait for that.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from agentfly.api.reasons import Reason
from agentfly.launch.attempt import log_file, resolved, this_pod
from agentfly.launch.child import Child, reap_orphans, running
from agentfly.launch.pod import main_process, stop_asked
from agentfly.launch.ray import Place, authentication, node_command
from agentfly.roles.failure import reason_in
from agentfly.roles.launch import Report, TrainerLaunch
from agentfly.roles.life import is_closed
from agentfly.training.verl_config import environment

logger = logging.getLogger("agentfly.node")

TICK_S = 1.0
CONNECT_S = 5.0
GONE = 3  # looks in a row that find no head: one that is busy may miss one
GRACE_S = 900.0  # less than the pod's, so that there are last words


class Node:
    """A pod of one attempt.

    Args:
        place: of this pod.
        ray: the command that joins.
        stop: set when the pod has to end.
    """

    def __init__(self, launch: TrainerLaunch, place: Place, ray: Sequence[str], stop: asyncio.Event) -> None:
        self._launch = launch
        self._config = resolved(launch.trainer)
        self._place = place
        self._ray = ray
        self._stop = stop
        self._key = authentication(self._config, os.environ)
        self._log = log_file(self._config, f"ray-{place.pod}")

    async def run(self) -> Report:
        """The last word of the pod."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._launch.barrier_s
        if await asyncio.to_thread(is_closed, self._config.run_dir, self._config.attempt):
            return self._ended(1, "the attempt has begun without this pod, which came too late")
        while True:
            if not await self._head_answers_until(end):
                what = "asked to end" if self._stop.is_set() else f"no Ray at {self._launch.head}"
                return self._ended(1, f"{what} before this pod had joined")
            code = await self._joined()
            if code is None:
                return self._ended(0, "the head has gone")
            message = f"Ray: ended with exit code {code}: {reason_in(self._log)}; read {self._log}"
            logger.warning("%s", message)
            if self._stop.is_set() or clock() >= end or not await self._head_answers():
                return self._ended(1, message)

    async def _joined(self) -> int | None:
        """Run Ray to its end; its exit code, None if it was not needed any more."""
        config = self._config
        variables = {**environment(config, config.config_file, os.environ), **self._key}
        async with running(self._ray, env=variables, log=self._log, cwd=config.run_dir) as ray:
            return await self._ends(ray)

    async def _ends(self, ray: Child) -> int | None:
        clock = asyncio.get_running_loop().time
        asked: float | None = None
        unanswered = 0
        while not await ray.ends_within(TICK_S):
            if os.getpid() == 1:
                reap_orphans()
            if not self._stop.is_set():
                continue
            asked = clock() if asked is None else asked
            unanswered = 0 if await self._head_answers() else unanswered + 1
            if unanswered >= GONE or clock() - asked >= GRACE_S:
                return None
        return await ray.wait(TICK_S)

    async def _head_answers_until(self, end: float) -> bool:
        clock = asyncio.get_running_loop().time
        while not self._stop.is_set():
            if await self._head_answers():
                return True
            if clock() >= end:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stop.wait()
        return False

    async def _head_answers(self) -> bool:
        """Whether somebody listens at the head's port of Ray; its name may not be known yet."""
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(self._launch.head, self._place.port)
        except OSError:  # TimeoutError is one
            return False
        writer.close()
        return True

    def _ended(self, code: int, message: str) -> Report:
        logger.info("%s", message)
        reason = Reason.AttemptFailed.value if code else ""
        return Report(
            attempt=self._config.attempt, phase="Ended", reason=reason, message=message, exit_code=code
        )


async def join(launch: TrainerLaunch, place: Place) -> Report:
    """Be a node of the attempt in this pod; its last word."""
    with stop_asked() as stop:
        return await Node(launch, place, node_command(place, launch.head), stop).run()


async def _join(launch: TrainerLaunch) -> Report:
    return await join(launch, this_pod(launch.trainer))


if __name__ == "__main__":
    sys.exit(main_process("agentfly.launch.node", TrainerLaunch, _join))
