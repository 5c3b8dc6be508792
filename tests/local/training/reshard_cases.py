"""What test_reshard.py runs in the trainer environment: ``python reshard_cases.py FOLDER``.

Checkpoints are made by FSDP2 itself, in as many processes as there are ranks.
"""

import copy
import json
import os
import shutil
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from agentfly.errors import AgentflyError
from agentfly.training import reshard
from agentfly.training.checkpoints import KINDS, ranks

STEP = 3


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides, one smaller than the ranks, a buffer, a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 1)
        self.tied = self.first
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Any use of all parameters."""
        hidden: torch.Tensor = self.second(self.first(rows)) * self.scale
        return hidden


def build(world: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    net(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(rank: int, world: int, folder: str, port: int) -> None:
    with group(rank, world, port):
        net, optimizer = build(world)
        train(net, optimizer)
        state = {"lr_scheduler": {"last_epoch": 4}, "rng": {"cpu": torch.get_rng_state(), "rank": rank}}
        for kind, content in zip(KINDS, (net.state_dict(), optimizer.state_dict(), state), strict=True):
            torch.save(content, name(Path(folder), kind, world, rank))


def load(rank: int, world: int, folder: str, port: int) -> None:
    """As verl does; then the weights as a whole, and those after one more step, are written."""
    with group(rank, world, port):
        net, optimizer = build(world)
        files = [torch.load(name(Path(folder), kind, world, rank), weights_only=False) for kind in KINDS]
        net.load_state_dict(files[0])
        optimizer.load_state_dict(files[1])
        before = whole(net.state_dict())
        train(net, optimizer)
        after = whole(net.state_dict())
        if rank == 0:
            torch.save((before, after), Path(folder) / f"loaded-{world}.pt")


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        key: each.full_tensor().clone() if isinstance(each, DTensor) else each for key, each in state.items()
    }


class group:
    """A process group on this machine."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=world)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def name(actor: Path, kind: str, world: int, rank: int) -> Path:
    return actor / f"{kind}_world_size_{world}_rank_{rank}.pt"


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values of a tree; of a tensor that is cut, what this rank has of it and how."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from leaves(value, f"{path}/{number}")
    elif isinstance(tree, DTensor):
        yield path, (tree.shape, tree.stride(), tree.placements, tree.requires_grad)
        yield path, tree.to_local()
    else:
        yield path, tree


def same(one: Path, other: Path) -> None:
    first, second = (list(leaves(torch.load(path, weights_only=False))) for path in (one, other))
    assert len(first) == len(second)
    for (path, a), (path_b, b) in zip(first, second, strict=True):
        assert path == path_b
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


def checkpoint(root: Path, world: int, port: int) -> Path:
    actor = root / f"global_step_{STEP}" / "actor"
    actor.mkdir(parents=True)
    mp.spawn(save, (world, str(actor), port), nprocs=world)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    return actor


def names(actor: Path) -> set[str]:
    return {path.name for path in actor.glob("*_world_size_*")}


def refused(root: Path, to: int, *said: str) -> None:
    before = names(root / f"global_step_{STEP}" / "actor")
    message = ""
    try:
        reshard.reshard(root / f"global_step_{STEP}", to)
    except AgentflyError as error:
        message = error.message
    assert message, "not refused"
    assert all(each in message for each in said), message
    assert names(root / f"global_step_{STEP}" / "actor") == before


def there_and_back(root: Path) -> None:
    """1 -> 3 -> 1: the same files; what 3 ranks load and train is what one does."""
    actor = checkpoint(root / "a", 1, 29611)
    original = root / "original"
    original.mkdir()
    for kind in KINDS:
        name(actor, kind, 1, 0).rename(name(original, kind, 1, 0))
        name(actor, kind, 1, 0).write_bytes(name(original, kind, 1, 0).read_bytes())
    mp.spawn(load, (1, str(actor), 29612), nprocs=1)
    step = root / "a" / f"global_step_{STEP}"
    reshard.reshard(step, 3)
    assert ranks(root / "a", STEP) == 3
    assert names(actor) == {f"{kind}_world_size_3_rank_{rank}.pt" for kind in KINDS for rank in range(3)}
    assert json.loads((actor / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": 3}
    mp.spawn(load, (3, str(actor), 29613), nprocs=3)
    (before_1, after_1), (before_3, after_3) = (torch.load(actor / f"loaded-{n}.pt") for n in (1, 3))
    assert all(torch.equal(before_1[key], before_3[key]) for key in before_1)
    assert all(torch.allclose(after_1[key], after_3[key]) for key in after_1)
    reshard.reshard(step, 1)
    assert ranks(root / "a", STEP) == 1
    for kind in KINDS:
        same(name(original, kind, 1, 0), name(actor, kind, 1, 0))


def critic(root: Path) -> None:
    """Actor and critic are cut together, or not at all."""
    actor = checkpoint(root / "e", 1, 29617)
    step = actor.parent
    shutil.copytree(actor, step / "critic")
    writes = reshard._write
    left = 4

    def write(path: Path, content: Any) -> None:
        nonlocal left
        if left == 0:
            raise OSError("no space")
        left -= 1
        writes(path, content)

    reshard._write = write
    try:
        reshard.reshard(step, 2)
    except OSError:
        assert ranks(root / "e", STEP) == 1
    else:
        raise AssertionError
    finally:
        reshard._write = writes
    reshard.reshard(step, 2)
    assert ranks(root / "e", STEP) == 2
    assert names(actor) == names(step / "critic") != set()
    for part in (actor, step / "critic"):
        assert json.loads((part / "fsdp_config.json").read_text())["world_size"] == 2
    name(step / "critic", "model", 2, 1).unlink()
    assert ranks(root / "e", STEP) is None


def cut_short(root: Path) -> None:
    """However many files were written, the checkpoint is whole for one of both; the next try goes on."""
    actor = checkpoint(root / "b", 2, 29614)
    step = root / "b" / f"global_step_{STEP}"
    writes = reshard._write
    for allowed in range(10):
        left = allowed

        def write(path: Path, content: Any) -> None:
            nonlocal left
            if left == 0:
                path.with_name(path.name + ".partial").write_text("half")
                raise OSError("no space")
            left -= 1
            writes(path, content)

        reshard._write = write
        try:
            reshard.reshard(step, 3)
        except OSError:
            assert ranks(root / "b", STEP) == (2 if allowed < 9 else 3), allowed
        else:
            raise AssertionError(allowed)
        finally:
            reshard._write = writes
    reshard.reshard(step, 3)
    assert ranks(root / "b", STEP) == 3
    assert names(actor) == {f"{kind}_world_size_3_rank_{rank}.pt" for kind in KINDS for rank in range(3)}


def other_layouts(root: Path) -> None:
    actor = checkpoint(root / "c", 2, 29615)
    before = names(actor)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1}))
    refused(root / "c", 3, "2 ranks wrote it", "cut for 3", "FSDP version 1")
    (actor / "fsdp_config.json").unlink()
    model = torch.load(name(actor, "model", 2, 1), weights_only=False)
    for change, said in (
        (lambda state: state.update(scale=torch.tensor(4.0)), "another value in each rank"),
        (lambda state: state.pop("scale"), "different tensors"),
    ):
        changed = copy.copy(model)
        change(changed)
        torch.save(OrderedDict(changed), name(actor, "model", 2, 1))
        refused(root / "c", 1, "2 ranks wrote it", "cut for 1", said)
    torch.save(model, name(actor, "model", 2, 1))
    optimizer = torch.load(name(actor, "optim", 2, 1), weights_only=False)
    torch.save({}, name(actor, "optim", 2, 1))
    refused(root / "c", 1, "different tensors")
    torch.save(optimizer, name(actor, "optim", 2, 1))
    assert reshard.main(["--checkpoint", str(root / "none"), "--ranks", "2"]) == 87
    assert names(actor) == before
    assert reshard.main(["--checkpoint", str(root / "c" / f"global_step_{STEP}"), "--ranks", "1"]) == 0


def two_dimensions(rank: int, folder: str) -> None:
    with group(rank, 2, 29616):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ddp", "fsdp"))
        net = Net()
        fully_shard(net, mesh=mesh)
        for kind in KINDS:
            torch.save(net.state_dict(), name(Path(folder), kind, 2, rank))


def meshes(root: Path) -> None:
    actor = root / "d" / f"global_step_{STEP}" / "actor"
    actor.mkdir(parents=True)
    mp.spawn(two_dimensions, (str(actor),), nprocs=2)
    refused(root / "d", 4, "2 ranks wrote it", "cut for 4", "(2, 1)")


if __name__ == "__main__":
    cases = {
        "back": there_and_back,
        "critic": critic,
        "short": cut_short,
        "layouts": other_layouts,
        "meshes": meshes,
    }
    cases[sys.argv[1]](Path(sys.argv[2]))
