"""verl's queue in one process, for what test_algorithms.py runs."""

from collections.abc import Iterable, Sequence
from typing import Any

import transfer_queue
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

PARTITION = "train"


class Queue:
    """Takes the place of the real one as soon as it is made."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self.fields: dict[str, dict[str, Any]] = {}
        for name in ("kv_list", "kv_batch_get", "kv_batch_put", "kv_clear"):
            setattr(transfer_queue, name, getattr(self, name))

    def put_prompt(self, group: str) -> None:
        self.tags[group] = {"is_prompt": True, "status": "finished", "global_steps": 1}

    def put_rollout(self, group: str, number: int, rows: Sequence[dict[str, Any]]) -> None:
        """As verl's agent loop worker does: each row gets the reward of the last one."""
        for place, row in enumerate(rows):
            output = AgentLoopOutput(**{**row, "reward_score": rows[-1]["reward_score"]})
            key = f"{group}_{number}_{place}"
            self.fields[key] = {**output.as_dict(), "uid": group}
            self.tags[key] = {"status": "success", "seq_len": len(row["response_ids"])}

    def kv_list(self, partition_id: str = PARTITION) -> dict[str, dict[str, dict[str, Any]]]:
        return {PARTITION: dict(self.tags)}

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None = None
    ) -> Any:
        names = select_fields or list(self.fields[keys[0]])
        return list_of_dict_to_tensordict(
            [{name: self.fields[key][name] for name in names if name in self.fields[key]} for key in keys]
        )

    def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Any = None,
        tags: Sequence[dict[str, Any]] | None = None,
    ) -> Any:
        for place, key in enumerate(keys):
            if tags is not None:
                self.tags[key] = tags[place]
            if fields is not None:
                row = fields[place]
                names = list(row.keys())  # a TensorDict iterates over rows
                self.fields.setdefault(key, {}).update({name: row[name] for name in names})
        return transfer_queue.KVBatchMeta(
            partition_id=partition_id, keys=list(keys), tags=[self.tags.get(key, {}) for key in keys]
        )

    def kv_clear(self, partition_id: str, keys: Iterable[str]) -> None:
        for key in keys:
            self.tags.pop(key, None)
            self.fields.pop(key, None)
