"""Pools that break a rule, with what is said of it, and pools that just keep to it."""

from typing import Any

Case = tuple[str, dict[str, Any], list[str]]

API: dict[str, Any] = {
    "type": "ExternalAPI",
    "scope": "Global",
    "container": None,
    "externalAPI": {"baseUrl": "https://judge/v1"},
    "capacity": {"max": 1},
}
SERVICE: dict[str, Any] = {
    "type": "ModelService",
    "container": None,
    "modelService": {"model": "m", "maxModelLen": 1024},
}
NO_CPU, NO_MEMORY = (
    f"spec.capacity: capacity has a quota.{resource} for fewer members than min, or for none; "
    f"raise capacity.quota.{resource}, or lower container.{resource} or capacity.min"
    for resource in ("cpu", "memory")
)
PODS = "is for members that are pods, and those of this type are none"
PULLS = f"spec.images: images pullPolicy or pullSecrets {PODS}; remove pullPolicy or pullSecrets from images"
# 32761 characters: with LAST and three more it is the longest that is allowed.
ENV = {f"N{number}": "x" * 4093 for number in range(7)} | {"N7": "x" * 4094}

REFUSED: dict[str, Case] = {
    "min above max": (
        "ResourcePool",
        {"capacity.min": 5},
        ["spec.capacity.max: max is less than min; raise max or lower min"],
    ),
    "buffer above max": (
        "ResourcePool",
        {"capacity.buffer": 5},
        ["spec.capacity.max: max is less than buffer; raise max or lower buffer"],
    ),
    "a Container pool without its arm": (
        "ResourcePool",
        {"container": None},
        ["spec.container: container is required when type is Container; add container: {image: host}"],
    ),
    "a Container pool with both arms": (
        "ResourcePool",
        {"modelService": SERVICE["modelService"]},
        ["spec.modelService: modelService is allowed only when type is ModelService; remove modelService"],
    ),
    "a ModelService pool with the wrong arm": (
        "ResourcePool",
        {"type": "ModelService"},
        [
            "spec.container: container is allowed only when type is Container; remove container",
            "spec.modelService: modelService is required when type is ModelService; "
            "add modelService: {model: DIR, maxModelLen: 4096}",
        ],
    ),
    "a Container shared by all": (
        "ResourcePool",
        {"scope": "Global"},
        ["spec.scope: scope does not suit a Container, which has one holder at a time; set scope to Rollout"],
    ),
    "an ExternalAPI pool without its arm": (
        "ResourcePool",
        {**API, "externalAPI": None},
        [
            "spec.externalAPI: externalAPI is required when type is ExternalAPI; "
            "add externalAPI: {baseUrl: https://HOST/v1}"
        ],
    ),
    "an InProcess pool with the wrong arm": (
        "ResourcePool",
        {"type": "InProcess", "container": None, "externalAPI": API["externalAPI"]},
        [
            "spec.externalAPI: externalAPI is allowed only when type is ExternalAPI; remove externalAPI",
            "spec.inProcess: inProcess is required when type is InProcess; "
            "add inProcess: {entrypoint: package.module:make}",
        ],
    ),
    "a Container pool with the object of another": (
        "ResourcePool",
        {"inProcess": {"entrypoint": "games.py:make"}},
        ["spec.inProcess: inProcess is allowed only when type is InProcess; remove inProcess"],
    ),
    "an ExternalAPI for one holder at a time": (
        "ResourcePool",
        {**API, "scope": "Rollout"},
        [
            "spec.scope: scope does not suit an ExternalAPI, whose limits are those of all holders "
            "together; set scope: Global"
        ],
    ),
    "an ExternalAPI with several members": (
        "ResourcePool",
        {**API, "capacity": {"max": 2}},
        [
            "spec.capacity: capacity of an ExternalAPI must have max 1: one gateway keeps the limits of "
            "all holders; set capacity: {max: 1}; externalAPI.concurrency bounds the requests"
        ],
    ),
    "an ExternalAPI with both places of a key": (
        "ResourcePool",
        {**API, "externalAPI.credentials": [{"env": "KEY", "file": "key.txt"}]},
        [
            "spec.externalAPI.credentials[]: exactly one of env, file and secretKeyRef must be set; "
            "keep env: JUDGE_API_KEY, file: key.txt, or in a cluster secretKeyRef: {name: judge, key: token}"
        ],
    ),
    "money without prices": (
        "ResourcePool",
        {**API, "externalAPI.budget": {"usd": 5.0}},
        [
            "spec.externalAPI.budget.usd: usd bounds nothing while both prices are 0; "
            "set usdPerMillionInput and usdPerMillionOutput"
        ],
    ),
    "paths to reset, and none said": (
        "ResourcePool",
        {"container.reset.method": "Paths"},
        ["spec.container.reset.paths: paths is required when method is Paths; add paths: [/workspace]"],
    ),
    "a repository to reset, and none said": (
        "ResourcePool",
        {"container.reset.method": "Git"},
        ["spec.container.reset.git: git is required when method is Git; add git: /testbed"],
    ),
    "a command to reset, and none said": (
        "ResourcePool",
        {"container.reset.method": "Command"},
        [
            "spec.container.reset.command: command is required when method is Command; "
            "add command: [/reset.sh]"
        ],
    ),
    "images for what has none": (
        "ResourcePool",
        {**SERVICE, "images.policy": "PerAcquire"},
        ["spec.images: images is for a Container, the other types have no image; remove images"],
    ),
    "all members reserved": (
        "ResourcePool",
        {"queue.reserved": {"verifier": 3, "eval": 1}},
        [
            "spec.queue: queue reserves all of capacity.max and leaves none for others; "
            "raise capacity.max or lower queue.reserved"
        ],
    ),
    "members reserved that all share": (
        "ResourcePool",
        {**SERVICE, "scope": "Global", "queue.reserved": {"verifier": 1}},
        [
            "spec.queue: queue reserves members of a Global pool, which nobody has to wait for; "
            "remove queue.reserved"
        ],
    ),
    "a quarantine of all members": (
        "ResourcePool",
        {"reuse.quarantine": 4},
        ["spec.reuse: reuse quarantine could fill all of capacity.max; lower reuse.quarantine"],
    ),
    "tensor parallelism above the GPUs": (
        "ResourcePool",
        {**SERVICE, "modelService.gpus": 1, "modelService.tensorParallel": 2},
        [
            "spec.modelService.tensorParallel: tensorParallel times pipelineParallel is more than gpus; "
            "set gpus to their product"
        ],
    ),
    "an image that is a form alone": (
        "ResourcePool",
        {"container.image": "docker-archive:"},
        ["spec.container.image: image names no path after the colon; write it there, as in tar:root.tar.gz"],
    ),
    "an environment longer than a daemon reads": (
        "ResourcePool",
        {"container.env": {**ENV, "LAST": "x" * 4}},
        [
            "spec.container.env: env has more than 32768 characters of names and values together; "
            "let the agent's setup write long values to files"
        ],
    ),
    "requests of nothing": (
        "ResourcePool",
        {"container.requests": {}},
        ["spec.container.requests: cpu or memory must be set; write {cpu: 100m}"],
    ),
    "requests above the limits": (
        "ResourcePool",
        {"container.cpu": "500m", "container.requests": {"cpu": "0.501", "memory": "257Mi"}},
        [
            "spec.container.requests: requests has more cpu than cpu, which is the limit; "
            "lower requests.cpu or raise cpu, as in cpu: 1, requests: {cpu: 100m}",
            "spec.container.requests: requests has more memory than memory, which is the limit; "
            "lower requests.memory or raise memory, as in memory: 1Gi, requests: {memory: 256Mi}",
        ],
    ),
    "a quota below what min members ask for": (
        "ResourcePool",
        {
            "container.requests": {"cpu": "100m", "memory": "64Mi"},
            "capacity.min": 4,
            "capacity.quota": {"cpu": "399m", "memory": "255Mi"},
        },
        [NO_CPU, NO_MEMORY],
    ),
    "a quota of nothing": (
        "ResourcePool",
        {"capacity.quota": {}},
        ['spec.capacity.quota: cpu or memory must be set; write {cpu: "64", memory: 256Gi}'],
    ),
    "a quota for members of unknown size": (
        "ResourcePool",
        {**SERVICE, "capacity.quota": {"cpu": 64}},
        [
            "spec.capacity: capacity quota is for a Container, whose members all have cpu and memory; "
            "remove capacity.quota; capacity.max bounds the members"
        ],
    ),
    "a quota below one member": (
        "ResourcePool",
        {"container.cpu": "1.5", "container.memory": "1Gi", "capacity.quota": {"cpu": 1, "memory": "1023Mi"}},
        [NO_CPU, NO_MEMORY],
    ),
    "a quota below min": (
        "ResourcePool",
        {"container.cpu": "100m", "capacity.min": 3, "capacity.quota": {"cpu": "0.299", "memory": "767Mi"}},
        [NO_CPU, NO_MEMORY],
    ),
    "resident images for a pool of one image": (
        "ResourcePool",
        {"images.maxResident": 2},
        [
            "spec.images.maxResident: maxResident is for the policy PerAcquire; "
            "set policy: PerAcquire, or remove maxResident"
        ],
    ),
    "blocks of pods for what is none": (
        "ResourcePool",
        {
            **API,
            "security": {},
            "placement": {},
            "capacity": {"max": 1, "perNode": 1},
            "images": {"pullPolicy": "Never"},
        },
        [
            f"spec.capacity: capacity perNode {PODS}; remove perNode from capacity",
            PULLS,
            f"spec.placement: placement {PODS}; remove placement",
            f"spec.security: security {PODS}; remove security",
        ],
    ),
    "secrets to pull nothing": (
        "ResourcePool",
        {**API, "images.pullSecrets": ["registry"]},
        [PULLS],
    ),
    "an opening in a wall without a door": (
        "ResourcePool",
        {"security.egress": [{"cidr": "10.0.0.0/8"}]},
        [
            "spec.security: security egress opens nothing while container.network is false; "
            "set container.network: true, or remove security.egress"
        ],
    ),
    "an overlay where nothing is mounted": (
        "ResourcePool",
        {"security.podSecurity": "Restricted", "container.reset.method": "Overlay"},
        [
            "spec.security: security podSecurity Restricted lets no member mount the overlay that "
            "container.reset.method asks for; set security.podSecurity: Baseline, or "
            "container.reset.method: Paths"
        ],
    ),
    "addresses that are no range": (
        "ResourcePool",
        {
            "container.network": True,
            "security.egress": [{"cidr": "10.1.0.0/8"}],
        },
        [
            "spec.security.egress[].cidr: cidr is no range of addresses in its shortest form; "
            "write the first address of the range and its length, as in 10.20.0.0/16 or 10.20.1.7/32"
        ],
    ),
    "a toleration of nothing": (
        "ResourcePool",
        {"placement.tolerations": [{"effect": "NoSchedule"}]},
        [
            "spec.placement.tolerations[].operator: operator must be Exists when there is no key; "
            "add key, or operator: Exists"
        ],
    ),
    "a toleration with a value that is not compared, of an effect without time": (
        "ResourcePool",
        {"placement.tolerations": [{"key": "a", "operator": "Exists", "value": "b", "tolerationSeconds": 1}]},
        [
            "spec.placement.tolerations[].tolerationSeconds: tolerationSeconds is for the effect NoExecute; "
            "set effect: NoExecute",
            "spec.placement.tolerations[].value: value is not compared when operator is Exists; "
            "remove value, or set operator: Equal",
        ],
    ),
    "keys that Kubernetes does not take": (
        "ResourcePool",
        {
            "placement.nodeSelector": {"a b": ""},
            "placement.podLabels": {"/a": ""},
            "placement.podAnnotations": {f"{'x' * 64}": ""},
        },
        [
            f"spec.placement.{field}: {field} has a key that is none of Kubernetes; "
            "write keys as in example.com/team"
            for field in ("nodeSelector", "podAnnotations", "podLabels")
        ],
    ),
    "keys that agentfly writes": (
        "ResourcePool",
        {
            "placement.nodeSelector": {"agentfly.dev/rollouts": "yes"},
            "placement.podLabels": {"app.kubernetes.io/managed-by": "me"},
            "placement.podAnnotations": {"agentfly.dev/spec-json": "{}"},
        },
        [
            f"spec.placement.{field}: {field} has a key that agentfly writes itself; "
            "take keys of your own domain, not agentfly.dev/ or app.kubernetes.io/managed-by"
            for field in ("podAnnotations", "podLabels")
        ],
    ),
}

ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "the right pool": ("ResourcePool", {}),
    "min equal to max": ("ResourcePool", {"capacity.min": 4}),
    "a quota that min fills to the last digit": (
        "ResourcePool",
        {
            "container.cpu": "0.1",
            "container.memory": "1.1Gi",
            "capacity.min": 3,
            "capacity.quota": {"cpu": "300m", "memory": "3.3Gi"},
        },
    ),
    "requests that are the limits, and one alone": (
        "ResourcePool",
        {"container.cpu": "0.5", "container.requests": {"cpu": "500m"}},
    ),
    "a quota for what members ask for": (
        "ResourcePool",
        {
            "container.requests": {"cpu": "100m"},
            "capacity.min": 4,
            "capacity.quota": {"cpu": "400m", "memory": "1Gi"},
        },
    ),
    "a quota of one resource": ("ResourcePool", {"capacity.quota": {"memory": "256Mi"}}),
    "resident images": ("ResourcePool", {"images": {"policy": "PerAcquire", "maxResident": 1}}),
    "pods of a ModelService": (
        "ResourcePool",
        {
            **SERVICE,
            "security": {},
            "placement": {},
            "capacity.perNode": 1,
            "images": {"pullPolicy": "Never"},
        },
    ),
    "openings of a ModelService": ("ResourcePool", {**SERVICE, "security.egress": [{"cidr": "0.0.0.0/0"}]}),
    "openings for a network": (
        "ResourcePool",
        {
            "container.network": True,
            "security.egress": [{"cidr": "2001:db8::/32", "ports": [443]}, {"cidr": "10.20.1.7/32"}],
        },
    ),
    "paths in a restricted pod": (
        "ResourcePool",
        {
            "security.podSecurity": "Restricted",
            "container.reset": {"method": "Paths", "paths": ["/workspace"]},
        },
    ),
    "tolerations of all forms": (
        "ResourcePool",
        {
            "placement.tolerations": [
                {"operator": "Exists"},
                {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
                {"key": "team", "value": "rl"},
                {"key": "a", "operator": "Equal", "effect": "NoExecute", "tolerationSeconds": 60},
            ]
        },
    ),
    "keys with and without a domain": (
        "ResourcePool",
        {
            "placement.nodeSelector": {"kubernetes.io/arch": "arm64", "pool": ""},
            "placement.podLabels": {"a": "b"},
        },
    ),
    "a key in a Secret": (
        "ResourcePool",
        {**API, "externalAPI.credentials": [{"secretKeyRef": {"name": "judge", "key": "token"}}]},
    ),
    "a ModelService pool": ("ResourcePool", SERVICE),
    "tensor parallelism equal to the GPUs": (
        "ResourcePool",
        {**SERVICE, "modelService.gpus": 2, "modelService.tensorParallel": 2},
    ),
    "tensor parallelism on the CPU": ("ResourcePool", {**SERVICE, "modelService.tensorParallel": 2}),
    "a ModelService shared by all": ("ResourcePool", {**SERVICE, "scope": "Global"}),
    "the longest environment": ("ResourcePool", {"container.env": {**ENV, "LAST": "x" * 3}}),
}
