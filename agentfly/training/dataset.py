"""The tasks of a run as verl's dataset; runs in the trainer environment."""

from typing import Any

from torch.utils.data import Dataset

from agentfly.roles.trainer import TrainerConfig, current_config
from agentfly.training.tasks import task_index


class TaskDataset(Dataset):  # type: ignore[misc]
    """As many rows as the run trains on, in the run's own order.

    ``task`` is JSON text: verl would take a nested dict for columns of its own. It wants ``raw_prompt`` and
    ``index`` in every row; the prompt is made by the agent, from the whole task.
    """

    def __init__(self, data_files: str, **_: Any) -> None:
        self._config: TrainerConfig = current_config()
        with open(data_files) as handle:
            self._tasks = handle.read().splitlines()

    def __len__(self) -> int:
        return self._config.rows

    def __getitem__(self, position: int) -> dict[str, Any]:
        task = self._tasks[task_index(position, len(self._tasks), self._config.seed)]
        return {"raw_prompt": "", "index": position, "task": task, "data_source": "agentfly"}
