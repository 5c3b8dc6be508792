"""Whatever a holder left in a pod's sandbox, the next one sees what the first of all saw."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from agentfly.sandbox import SandboxAdmin, SandboxClient
from tests.local import sandboxd_pod
from tests.local.sandboxd_pod import ADMIN, BASELINE, UNMASKED, Shape, pod
from tests.local.tenant import root
from tests.local.tenant.sequences import sequences
from tests.local.test_pristine_property import FILES, FOLDERS, TOKEN, Tenancy, examples

SHAPES = {"baseline": BASELINE, "unmasked": UNMASKED}


class OfPod(Tenancy):
    """By the keeper, which replaces the sandbox each time."""

    def __init__(self, loop: asyncio.Runner, image: Path, sandboxd: Path, shape: Shape) -> None:
        super().__init__(loop)
        self.running = ExitStack()
        self.pod = self.running.enter_context(pod(image, sandboxd, shape, {"ownNetwork": True}))
        self.admin = SandboxAdmin(self.pod.address, ADMIN)
        self.client = SandboxClient(self.pod.address, TOKEN)
        self.lease()
        self.pristine = self.seen()

    def lease(self) -> None:
        self.loop.run(self.admin.lease("tenant", 0, TOKEN, 600))

    def leave(self, sequence: list[Any]) -> None:
        super().leave(sequence)
        self.loop.run(self.client.close())

    def seen(self) -> dict[str, Any]:
        """But for what makes the next root, and what an account of the whole machine shows."""
        seen = super().seen()
        seen["kernel"].pop("locks")
        seen["processes"] = [each for each in seen["processes"] if not each.endswith("\0ground\0")]
        return seen

    def next(self) -> bool:
        report = self.loop.run(self.admin.reset())
        assert report.clean, report
        self.kept += 1
        self.lease()
        return True

    def close(self) -> None:
        self.loop.run(self.client.close())
        self.loop.run(self.admin.close())
        self.running.close()


@pytest.fixture(scope="module", params=SHAPES)
def tenancy(request: pytest.FixtureRequest, sandboxd: Path) -> Iterator[OfPod]:
    if (reason := sandboxd_pod.missing() or root.missing()) is not None:
        pytest.skip(f"a pod: {reason}")
    home = Path(tempfile.mkdtemp(prefix="af-pods-"))
    home.chmod(0o755)
    try:
        root.build(home / "image")
        for folder in ("agentfly", "sys"):
            (home / "image" / folder).mkdir()
        with asyncio.Runner() as loop:
            made = OfPod(loop, home / "image", sandboxd, SHAPES[request.param])
            yield made
            made.close()
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.timeout(300)
@examples(40)
@given(sequence=sequences(FOLDERS, FILES))
def test_nothing_of_a_holder_is_left_in_a_pod(tenancy: OfPod, sequence: list[Any]) -> None:
    tenancy.property(sequence)
