import json

import pytest

from agentfly.resources.errors import ResourceError
from agentfly.resources.runners.kubernetes.identity import annotations, labels, recall
from agentfly.resources.runners.kubernetes.pod import Start, daemon_config, sandbox_pod
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, PodOptions, ResetSpec

OWNER = {"apiVersion": "agentfly.dev/v1alpha1", "kind": "ResourcePool", "name": "p", "uid": "u"}
START = Start("p", "p-0a1b-0", "ns", OWNER, "nonce")


def spec(**fields):
    return ContainerSpec(runtime="kubernetes", **({"image": "python:3.12"} | fields))


def with_pod(**options):
    return spec(pod=PodOptions(**options))


def rendered(wanted, start=START):
    return sandbox_pod(start, wanted, admin_key="a2V5", sandboxd_image="agentfly/sandboxd:dev")


def container(wanted):
    return rendered(wanted)["spec"]["containers"][0]


def config(wanted, start=START):
    [variable] = rendered(wanted, start)["spec"]["containers"][0]["env"]
    assert variable["name"] == "AGENTFLY_SANDBOXD"
    return json.loads(variable["value"])


def test_pod_is_marked_as_the_member_that_it_is():
    pod = rendered(spec())
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    meta = pod["metadata"]
    assert (meta["name"], meta["namespace"], meta["ownerReferences"]) == ("p-0a1b-0", "ns", [OWNER])
    assert meta["labels"] == {
        "agentfly.dev/pool": "p",
        "agentfly.dev/component": "member",
        "app.kubernetes.io/managed-by": "agentfly",
        "agentfly.dev/spec": spec().identity(),
    }
    assert meta["annotations"]["agentfly.dev/start"] == "nonce"


def test_labels_and_annotations_of_a_spec_never_replace_ours():
    wanted = with_pod(
        labels={"team": "a", "agentfly.dev/pool": "other"},
        annotations={"note": "b", "agentfly.dev/start": "other"},
    )
    meta = rendered(wanted)["metadata"]
    assert (meta["labels"]["team"], meta["labels"]["agentfly.dev/pool"]) == ("a", "p")
    assert (meta["annotations"]["note"], meta["annotations"]["agentfly.dev/start"]) == ("b", "nonce")


def test_pod_runs_once_without_anybody_elses_rights():
    pod = rendered(spec())["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["terminationGracePeriodSeconds"] == 1
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName", "shareProcessNamespace"} & set(pod)


@pytest.mark.parametrize(
    ("wanted", "shared"),
    [
        (spec(), False),
        (spec(network=True), True),
        (with_pod(security="restricted"), True),
        (spec(reset=ResetSpec(method="recreate")), True),
    ],
)
def test_policies_are_in_force_before_commands_that_use_the_pods_network(wanted, shared):
    [install] = rendered(wanted)["spec"]["initContainers"]
    assert install["command"][3:] == (["5s"] if shared else [])


def test_daemon_is_installed_into_any_image_and_cannot_be_changed_from_there():
    pod = rendered(spec())["spec"]
    [install] = pod["initContainers"]
    assert install["image"] == "agentfly/sandboxd:dev"
    assert install["command"] == ["/sandboxd", "install", "/agentfly"]
    assert install["volumeMounts"] == [{"name": "agentfly", "mountPath": "/agentfly"}]
    [main] = pod["containers"]
    assert (main["image"], main["command"]) == ("python:3.12", ["/agentfly/sandboxd", "--pod"])
    assert main["volumeMounts"] == [{"name": "agentfly", "mountPath": "/agentfly", "readOnly": True}]
    assert pod["volumes"] == [{"name": "agentfly", "emptyDir": {"sizeLimit": "64Mi"}}]
    assert main["ports"] == [{"name": "sandboxd", "containerPort": 7070}]


@pytest.mark.parametrize(
    ("fields", "quota"),
    [
        ({}, {"cpu": "1000m", "memory": "256Mi"}),
        ({"cpu": 0.25, "memory_mb": 512}, {"cpu": "250m", "memory": "512Mi"}),
        ({"cpu": 0.0001}, {"cpu": "1m", "memory": "256Mi"}),
        ({"disk_mb": 1000}, {"cpu": "1000m", "memory": "256Mi", "ephemeral-storage": "1064Mi"}),
    ],
)
def test_limits_are_requests(fields, quota):
    pod = rendered(spec(**fields))["spec"]
    for each in (*pod["containers"], *pod["initContainers"]):
        assert each["resources"] == {"requests": quota, "limits": quota}


@pytest.mark.parametrize(
    ("fields", "requests"),
    [
        ({"cpu_request": 0.1}, {"cpu": "100m", "memory": "256Mi"}),
        ({"memory_request_mb": 32}, {"cpu": "1000m", "memory": "32Mi"}),
        (
            {"cpu_request": 0.1, "disk_mb": 1000},
            {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "1064Mi"},
        ),
    ],
)
def test_requests_are_what_the_spec_asks_for(fields, requests):
    pod = rendered(spec(**fields))["spec"]
    for each in (*pod["containers"], *pod["initContainers"]):
        assert each["resources"]["requests"] == requests
        assert each["resources"]["limits"] == requests | {"cpu": "1000m", "memory": "256Mi"}


BASELINE = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"], "add": ["SETUID", "SETGID", "SETFCAP", "KILL"]},
    "runAsUser": 0,
    "readOnlyRootFilesystem": True,
}
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
    "readOnlyRootFilesystem": True,
}
WRITABLE = {"readOnlyRootFilesystem": False}
OWNERS = {
    "capabilities": {
        "drop": ["ALL"],
        "add": ["SETUID", "SETGID", "SETFCAP", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID"],
    }
}
GIT = ResetSpec(method="git", git="/repo")


@pytest.mark.parametrize(
    ("options", "reset", "context"),
    [
        ({}, ResetSpec(), BASELINE),
        ({"security": "baseline", "user_namespace": True}, ResetSpec(), BASELINE),
        ({}, GIT, BASELINE | WRITABLE | OWNERS),
        ({}, ResetSpec(paths=("/repo",)), BASELINE | WRITABLE | OWNERS),  # auto, and no overlay may work
        ({}, ResetSpec(method="overlay", paths=("/repo",)), BASELINE),
        ({"security": "restricted"}, ResetSpec(), RESTRICTED),
        ({"security": "restricted"}, GIT, RESTRICTED | WRITABLE),
        ({"security": "privileged"}, ResetSpec(), BASELINE | {"seccompProfile": {"type": "Unconfined"}}),
        (
            {"security": "privileged", "user_namespace": True},
            ResetSpec(),
            BASELINE | {"seccompProfile": {"type": "Unconfined"}, "procMount": "Unmasked"},
        ),
    ],
)
def test_container_is_as_narrow_as_its_reset_allows(options, reset, context):
    wanted = spec(pod=PodOptions(**options), reset=reset)
    assert container(wanted)["securityContext"] == context
    assert rendered(wanted)["spec"].get("hostUsers") is (False if options.get("user_namespace") else None)
    assert rendered(wanted)["spec"]["initContainers"][0]["securityContext"] == RESTRICTED


@pytest.mark.parametrize(
    ("fields", "mounts"),
    [
        ({}, []),
        ({"pod": PodOptions(security="privileged")}, []),
        ({"reset": ResetSpec(method="overlay-shared-pid")}, []),
        ({"pod": PodOptions(security="restricted")}, ["/tmp", "/workspace"]),
        ({"reset": ResetSpec(method="recreate")}, ["/tmp", "/workspace"]),
        ({"reset": ResetSpec(method="paths", paths=("/workspace",))}, ["/tmp"]),
        ({"reset": ResetSpec(method="git", git="/workspace/repo")}, ["/tmp"]),
        ({"reset": ResetSpec(method="git", git="/work")}, ["/tmp", "/workspace"]),
        ({"workdir": "/tmp", "reset": ResetSpec(method="recreate")}, ["/tmp"]),
        ({"reset": ResetSpec(method="paths", paths=("/tmp/a", "/srv"))}, ["/workspace"]),
    ],
)
def test_folders_that_no_overlay_makes_writable_are_empty_volumes(fields, mounts):
    wanted = spec(disk_mb=100, **fields)
    found = container(wanted)["volumeMounts"][1:]
    assert [each["mountPath"] for each in found] == mounts
    assert config(wanted)["scratch"] == mounts
    volumes = rendered(wanted)["spec"]["volumes"][1:]
    assert volumes == [{"name": each["name"], "emptyDir": {"sizeLimit": "100Mi"}} for each in found]


def test_daemon_is_told_who_leads_it_and_what_it_may_use():
    wanted = spec(pids=50, env={"A": "b"}, workdir="/w", memory_mb=400, disk_mb=100)
    assert config(wanted, Start("p", "p-0a1b-0", "ns", OWNER, "n", incarnation=4)) == {
        "adminKey": "a2V5",
        "member": "p-0a1b-0",
        "incarnation": 4,
        "workdir": "/w",
        "env": {"PYTHONDONTWRITEBYTECODE": "1", "A": "b"},
        "ownNetwork": True,
        "scratch": [],
        "upperBytes": 100 << 20,
        "reset": {"method": "auto", "paths": [], "git": "", "command": [], "timeoutSeconds": 30.0},
    }


def test_processes_are_bounded_where_the_kernel_counts_those_of_one_pod():
    # It counts by user: without a user namespace all pods of a node would share one budget.
    told = {
        own: config(spec(pids=50, pod=PodOptions(user_namespace=own))).get("limits") for own in (True, False)
    }
    assert told == {True: {"processes": 70}, False: None}


@pytest.mark.parametrize(("disk", "told"), [(None, None), (191, 191 << 20), (192, None), (1000, None)])
def test_what_is_written_never_takes_the_memory_of_what_runs(disk, told):
    assert daemon_config(START, spec(memory_mb=256, disk_mb=disk), "k").get("upperBytes") == told


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({}, True),
        ({"network": True}, False),
        ({"pod": PodOptions(security="restricted")}, False),
        ({"reset": GIT}, False),
    ],
)
def test_sandbox_without_network_has_one_of_its_own_where_that_can_be_made(fields, own):
    assert config(spec(**fields))["ownNetwork"] is own


def test_home_of_a_restricted_sandbox_is_its_workdir_unless_it_says_otherwise():
    assert config(with_pod(security="restricted"))["env"]["HOME"] == "/workspace"
    wanted = spec(pod=PodOptions(security="restricted"), env={"HOME": "/h"})
    assert config(wanted)["env"]["HOME"] == "/h"


def test_nothing_of_a_spec_is_expanded_by_kubernetes():
    wanted = spec(env={"A": "$(HOME) $$ ${B}"})
    [variable] = container(wanted)["env"]
    assert "$" not in variable["value"]
    assert config(wanted)["env"]["A"] == "$(HOME) $$ ${B}"


def test_where_it_may_run_is_as_the_spec_says():
    toleration = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    wanted = with_pod(
        runtime_class="gvisor",
        pull_policy="Never",
        pull_secrets=("registry",),
        node_selector={"disk": "ssd"},
        tolerations=(toleration,),
        priority_class="low",
        scheduler="mine",
    )
    pod = rendered(wanted)["spec"]
    assert pod["runtimeClassName"] == "gvisor"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["nodeSelector"] == {"disk": "ssd"}
    assert pod["tolerations"] == [toleration]
    assert pod["priorityClassName"] == "low"
    assert pod["schedulerName"] == "mine"
    assert {each["imagePullPolicy"] for each in (*pod["containers"], *pod["initContainers"])} == {"Never"}


def test_what_the_spec_does_not_say_is_left_to_the_cluster():
    pod = rendered(spec())["spec"]
    assert not {"runtimeClassName", "imagePullSecrets", "nodeSelector", "tolerations", "affinity"} & set(pod)
    assert not {"priorityClassName", "schedulerName", "hostUsers"} & set(pod)
    assert "imagePullPolicy" not in pod["containers"][0]


def test_nodes_that_are_full_are_kept_away_from():
    pod = rendered(spec(), Start("p", "p-0a1b-0", "ns", OWNER, "n", excluded=frozenset({"b", "a"})))
    [term] = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term == {
        "matchFields": [
            {"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("a", "b")
        ]
    }


@pytest.mark.parametrize(
    "wanted",
    [
        spec(),
        spec(env={"ä": '"'}, reset=GIT, pod=PodOptions(tolerations=({"key": "a", "tolerationSeconds": 3},))),
        ModelServiceSpec(model="m", max_model_len=8, runtime="kubernetes", image="vllm"),
    ],
)
def test_member_is_read_back_as_it_was(wanted):
    meta = {
        "name": "p-0a1b-0",
        "labels": labels("p", wanted),
        "annotations": annotations(wanted, "nonce"),
    }
    found = recall({"metadata": meta})
    assert (found.pool, found.member_id, found.spec) == ("p", "p-0a1b-0", wanted)
    assert found.spec.identity() == meta["labels"]["agentfly.dev/spec"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta.update(name="x"), "x"),
        (lambda meta: meta["labels"].update({"agentfly.dev/pool": "q"}), "agentfly.dev/pool"),
        (lambda meta: meta.update(labels=None), "agentfly.dev/pool"),
        (lambda meta: meta.update(annotations=None), "agentfly.dev/spec-json: is missing"),
        (lambda meta: meta["annotations"].update({"agentfly.dev/spec-json": "["}), "is no spec"),
        (lambda meta: meta["annotations"].update({"agentfly.dev/spec-json": "[]"}), "is no spec"),
        (lambda meta: meta["annotations"].update({"agentfly.dev/spec-json": '{"kind":"x"}'}), "is no spec"),
    ],
)
def test_what_is_no_member_is_told_with_its_field(change, message):
    meta = {
        "name": "p-0a1b-0",
        "labels": labels("p", spec()),
        "annotations": annotations(spec(), "nonce"),
    }
    change(meta)
    with pytest.raises(ResourceError, match=message):
        recall({"metadata": meta})
