import copy

import pytest

from agentfly.kube import DEPLOYMENTS, NAMESPACES, PODS, RESOURCE_POOLS, project_pod

POD = {
    "metadata": {
        "name": "a-1",
        "namespace": "ns",
        "uid": "u",
        "resourceVersion": "7",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "deletionTimestamp": "2026-01-01T00:00:01Z",
        "labels": {"agentfly.dev/pool": "a"},
        "annotations": {"agentfly.dev/spec-json": "{...}"},
        "ownerReferences": [{"kind": "ResourcePool", "name": "a", "uid": "p", "controller": True}],
        "managedFields": [{"manager": "x"}],
    },
    "spec": {"nodeName": "node1", "containers": [{"name": "sandbox", "image": "i"}]},
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "qosClass": "Guaranteed",
        "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": None}],
        "containerStatuses": [
            {
                "name": "sandbox",
                "image": "i",
                "imageID": "sha256:1",
                "ready": True,
                "restartCount": 1,
                "state": {"running": {"startedAt": "2026"}},
                "lastState": {"terminated": {"exitCode": 137, "message": "killed"}},
            }
        ],
    },
}


def test_projection_is_a_pod_with_identity_owner_node_and_status():
    assert project_pod(copy.deepcopy(POD)) == {
        "metadata": {name: value for name, value in POD["metadata"].items() if name != "managedFields"},  # type: ignore[attr-defined]
        "spec": {"nodeName": "node1"},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [
                {name: v for name, v in POD["status"]["containerStatuses"][0].items() if name != "imageID"}
            ],
        },
    }


def test_projection_of_a_projection_is_the_same():
    kept = project_pod(copy.deepcopy(POD))
    assert project_pod(copy.deepcopy(kept)) == kept


def test_pod_that_has_nothing_yet():
    bare = {"metadata": {"name": "a", "uid": "u"}, "spec": {}}
    assert project_pod(bare) == {"metadata": {"name": "a", "uid": "u"}, "spec": {}, "status": {}}


def test_what_is_the_same_in_all_pods_is_one_object():
    def fresh():
        text = "".join(["{", "x" * 500, "}"])
        return {"metadata": {"uid": "u", "annotations": {"agentfly.dev/spec-json": text}}, "spec": {}}

    one, two = project_pod(fresh()), project_pod(fresh())
    name = "agentfly.dev/spec-json"
    assert one["metadata"]["annotations"][name] is two["metadata"]["annotations"][name]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (PODS.path(), "/api/v1/pods"),
        (PODS.path("ns"), "/api/v1/namespaces/ns/pods"),
        (PODS.path("ns", "a", "log"), "/api/v1/namespaces/ns/pods/a/log"),
        (PODS.path("ns", "../x"), "/api/v1/namespaces/ns/pods/..%2Fx"),
        (DEPLOYMENTS.path("ns", "a"), "/apis/apps/v1/namespaces/ns/deployments/a"),
        (NAMESPACES.path(None, "ns"), "/api/v1/namespaces/ns"),
        (NAMESPACES.path("ns", "ns"), "/api/v1/namespaces/ns"),
        (
            RESOURCE_POOLS.path("ns", "a", "status"),
            "/apis/agentfly.dev/v1alpha1/namespaces/ns/resourcepools/a/status",
        ),
    ],
)
def test_paths(path, expected):
    assert path == expected


def test_api_versions():
    assert (PODS.api_version, DEPLOYMENTS.api_version) == ("v1", "apps/v1")
