"""Jobs that want more sandboxes than there are: `overload.py JSON`, in the pod of a worker.

It is given {"pool":.., "leases":.., "seconds":.., "jobs": {share: [askers, hold_s]}}, and ends after so many
leases or seconds. It prints [[share, seconds waited], ..], in the order of giving. Each lease runs a command.
"""

import asyncio
import json
import os
import sys
import time

from agentfly.broker.client import BrokerClient

wanted = json.loads(sys.argv[1])


async def main() -> None:
    found = []
    end = time.monotonic() + wanted["seconds"]

    async def asker(client: BrokerClient, share: str, number: int, hold_s: float) -> None:
        turn = 0
        while time.monotonic() < end and len(found) < wanted["leases"]:
            turn += 1
            asked = time.monotonic()
            lease = await client.acquire(
                wanted["pool"], f"{share}-{number}-{turn}", share=share, deadline=120
            )
            async with lease:
                given = time.monotonic()
                found.append([share, given - asked])
                assert (await lease.sandbox.exec("echo here")).stdout == "here\n"
                await asyncio.sleep(hold_s - (time.monotonic() - given))

    async with BrokerClient(os.environ["AGENTFLY_BROKER"]) as client:
        jobs = wanted["jobs"].items()
        await asyncio.gather(
            *(asker(client, share, n, hold) for share, (askers, hold) in jobs for n in range(askers))
        )
    print(json.dumps(found[: wanted["leases"]]))  # noqa: T201


asyncio.run(main())
