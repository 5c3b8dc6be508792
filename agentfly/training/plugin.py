"""What verl imports in every one of its processes (``VERL_USE_EXTERNAL_MODULES=agentfly.training.plugin``).

Guarantees:
1. After the import verl knows the rollout backend ``agentfly_vllm``.
2. With ``VERL_PLATFORM=cpu`` it knows the platform ``cpu`` too; without, nothing about platforms is touched.
"""

import os

from agentfly.training import external_vllm

external_vllm.register()
if os.environ.get("VERL_PLATFORM") == "cpu":
    from agentfly.training import cpu_platform

    cpu_platform.register()
