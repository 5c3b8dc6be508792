"""What verl imports in every one of its processes (``VERL_USE_EXTERNAL_MODULES=agentfly.training.plugin``).

Guarantees:
1. After the import verl knows the rollout backend ``agentfly_vllm``, the advantage estimator ``agentfly`` and
   agentfly's trainers, and loads a critic with whatever attention the run says.
2. With ``VERL_PLATFORM=cpu`` it knows the platform ``cpu`` too; without, nothing about platforms is touched.
"""

import os

if os.environ.get("VERL_PLATFORM") == "cpu":
    from agentfly.training import cpu_platform

    cpu_platform.register()  # first: the trainer imports engines, which ask for their platform at once

from agentfly.training import external_vllm, value_head, verl_advantages, verl_trainer

external_vllm.register()
verl_advantages.register()
verl_trainer.register()
value_head.register()
