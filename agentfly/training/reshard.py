"""A checkpoint for another number of ranks: ``agentfly.training.reshard --checkpoint DIR --ranks N``.

Guarantees:
1. Every tensor is the same afterwards, bit for bit: what was cut by ranks is put together and cut again, of
   the actor and of a critic.
2. Cut short at any time, the checkpoint is whole for the old number or for the new one: a file is complete
   before it has its name, and the old ones go last. Another try goes on.
3. A layout that is not FSDP2's on one dimension is refused, with both numbers; nothing is changed then.
4. Exit code 0: it is for N ranks now. 87: it cannot be. Anything else: it may be tried again.

A rank that is new draws random numbers as the first one did. Runs in the trainer environment, without GPUs;
it needs memory for all tensors of the model, or of the optimizer, whichever are more.
"""

import argparse
import copy
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from agentfly.errors import AgentflyError
from agentfly.roles.trainer import EXIT_INVALID
from agentfly.training.checkpoints import parts, rank_file, whole_sizes

_TENSORS = ("model", "optim")
_COPIED = "extra_state"  # learning rate and random numbers
_PARTIAL = ".partial"
_CONFIG = "fsdp_config.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite one checkpoint; returns the exit code."""
    parser = argparse.ArgumentParser(prog="agentfly.training.reshard")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a folder global_step_N")
    parser.add_argument("--ranks", type=int, required=True, help="that will load it")
    options = parser.parse_args(arguments)
    logging.getLogger(DeviceMesh.__module__).setLevel(logging.ERROR)  # no process group is no news here
    try:
        reshard(options.checkpoint, options.ranks)
    except AgentflyError as error:
        sys.stderr.write(error.render() + "\n")
        return EXIT_INVALID
    return 0


def reshard(checkpoint: Path, ranks: int) -> None:
    """Make a checkpoint one for ``ranks`` ranks; nothing is done where it is that already.

    Raises:
        AgentflyError: its layout is another one.
    """
    sizes = whole_sizes(checkpoint)
    if not sizes:
        raise AgentflyError(f"checkpoint {checkpoint}: no ranks have written all of their files")
    if ranks not in sizes:
        before = max(sizes)
        try:
            for part in parts(checkpoint):
                _rewrite(part, before, ranks)
        except _OtherLayout as error:
            for part in parts(checkpoint):
                _leave(part, before)
            raise AgentflyError(
                f"checkpoint {checkpoint}: {before} ranks wrote it, it cannot be cut for {ranks}: {error}",
                hints=[f"train on {before} ranks: set spec.trainer back"],
            ) from error
    for part in parts(checkpoint):
        _leave(part, ranks)
        config = part / _CONFIG
        if config.exists():
            text = json.dumps(json.loads(config.read_text()) | {"world_size": ranks}, indent=4)
            _write(config, partial(_put, text))


def _put(text: str, path: Path) -> None:
    path.write_text(text)


class _OtherLayout(Exception):
    """Tensors are not cut as FSDP2 does on one dimension."""


@dataclass(frozen=True)
class _Whole:
    """A tensor that all ranks had a part of."""

    tensor: torch.Tensor
    part: DTensor


def _rewrite(actor: Path, before: int, ranks: int) -> None:
    config = actor / _CONFIG
    if config.exists() and (version := json.loads(config.read_text())["FSDP_version"]) != 2:
        raise _OtherLayout(f"it is of FSDP version {version}")
    for kind in _TENSORS:
        parts = [
            torch.load(rank_file(actor, kind, before, rank), weights_only=False, map_location="cpu")
            for rank in range(before)
        ]
        whole = _merge(parts, before)
        del parts
        for rank in range(ranks):
            cut = _cut(whole, ranks, rank)
            _write(rank_file(actor, kind, ranks, rank), partial(torch.save, cut))
    for rank in range(ranks):
        source = rank_file(actor, _COPIED, before, rank if rank < before else 0)
        _write(rank_file(actor, _COPIED, ranks, rank), partial(shutil.copyfile, source))


def _merge(parts: Sequence[Any], before: int) -> Any:
    first = parts[0]
    if isinstance(first, DTensor):
        return _whole(parts, before)
    if isinstance(first, torch.Tensor):
        if type(first) not in (torch.Tensor, torch.nn.Parameter):
            raise _OtherLayout(f"it has a {type(first).__name__}")
        if not all(torch.equal(first.nan_to_num(), part.nan_to_num()) for part in parts[1:]):
            raise _OtherLayout("a tensor that is not cut has another value in each rank")
        return first
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise _OtherLayout("its ranks have different tensors")
        merged = copy.copy(first)  # with what a state dict has beside its items
        for key in first:
            merged[key] = _merge([part[key] for part in parts], before)
        return merged
    if isinstance(first, list | tuple):
        return type(first)(_merge(each, before) for each in zip(*parts, strict=True))
    return first


def _whole(parts: Sequence[DTensor], before: int) -> _Whole:
    first = parts[0]
    mesh, placements = first.device_mesh, first.placements
    if mesh.ndim != 1 or mesh.size() != before:
        raise _OtherLayout(f"a tensor is cut over {tuple(mesh.shape)} ranks")
    (placement,) = placements
    local = [part.to_local() for part in parts]
    if type(placement) is Shard:
        tensor = torch.cat(local, placement.dim)
    elif isinstance(placement, Replicate):
        tensor = local[0]
    else:
        raise _OtherLayout(f"a tensor is placed as {placement}")
    if tensor.shape != first.shape:
        raise _OtherLayout(f"parts of a tensor make {tuple(tensor.shape)}, not {tuple(first.shape)}")
    return _Whole(tensor, first)


def _cut(tree: Any, ranks: int, rank: int) -> Any:
    if isinstance(tree, _Whole):
        return _part(tree, ranks, rank)
    if isinstance(tree, dict):
        cut = copy.copy(tree)
        for key in tree:
            cut[key] = _cut(tree[key], ranks, rank)
        return cut
    if isinstance(tree, list | tuple):
        return type(tree)(_cut(each, ranks, rank) for each in tree)
    return tree


def _part(whole: _Whole, ranks: int, rank: int) -> DTensor:
    old = whole.part
    (placement,) = old.placements
    local = whole.tensor
    if isinstance(placement, Shard):
        chunks = local.chunk(ranks, placement.dim)  # as FSDP2 cuts: the last ones may be smaller, or empty
        local = chunks[rank] if rank < len(chunks) else local.narrow(placement.dim, 0, 0)
    # Without process groups: whoever loads it has its own mesh, of the same ranks.
    mesh = DeviceMesh(
        old.device_mesh.device_type,
        torch.arange(ranks),
        mesh_dim_names=old.device_mesh.mesh_dim_names,
        _init_backend=False,
        _rank=rank,
    )
    meta = TensorMeta(old.shape, old.stride(), old.dtype)
    spec = DTensorSpec(mesh, (placement,), tensor_meta=meta)
    return DTensor(local.clone(), spec, requires_grad=old.requires_grad)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """A file that has its name only once it is on the disk."""
    fresh = path.with_name(path.name + _PARTIAL)
    write(fresh)
    with fresh.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _leave(actor: Path, ranks: int) -> None:
    """Remove all files of ranks but those of ``ranks``."""
    for kind in (*_TENSORS, _COPIED):
        for path in actor.glob(f"{kind}_world_size_*_rank_*.pt*"):
            if path.name.endswith(_PARTIAL) or f"_world_size_{ranks}_rank_" not in path.name:
                path.unlink()


if __name__ == "__main__":
    sys.exit(main())
