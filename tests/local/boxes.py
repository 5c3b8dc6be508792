"""A leased sandbox for a test, and its end."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from agentfly.resources.runners.base import Member
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxAdmin, SandboxClient

TOKEN = "token-of-the-first-lease"


@dataclass
class Box:
    """A member with a client that holds its lease, and its owner's client."""

    member: Member
    client: SandboxClient
    admin: SandboxAdmin
    runner: BubblewrapRunner

    async def sh(self, line: str, **options: object) -> str:
        """The output of a line that must succeed."""
        result = await self.client.exec(line, **options)  # type: ignore[arg-type]
        assert result.exit_code == 0, result
        return result.stdout

    async def next_lease(self) -> "Box":
        """Reset the member and lease it again: what the next tenant gets."""
        member = await self.runner.reset(self.member)
        assert member is not None
        self.member = member
        await self.client.close()
        await self.admin.close()
        self.admin = SandboxAdmin(member.address, member.admin_token)
        self.client = SandboxClient(member.address, TOKEN)
        await self.runner.lease(member, "next", 0, TOKEN, 60)
        return self


@contextlib.asynccontextmanager
async def box(runner: BubblewrapRunner, spec: ContainerSpec | None = None) -> AsyncIterator[Box]:
    """Start, lease, and stop a sandbox."""
    member = await runner.start(spec or ContainerSpec(), "m-0")
    made = Box(
        member,
        SandboxClient(member.address, TOKEN),
        SandboxAdmin(member.address, member.admin_token),
        runner,
    )
    try:
        await runner.lease(member, "first", 0, TOKEN, 60)
        yield made
    finally:
        await made.client.close()
        await made.admin.close()
        await runner.stop(made.member)
