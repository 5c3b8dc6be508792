"""What `kubectl apply -k` sends: everything that is needed, with the fewest rights, and nothing twice."""

import re
from pathlib import Path

import pytest
import yaml

from agentfly.api import crd
from agentfly_operator.config import Config
from tests.unit.manifests.rendered import MANIFESTS, ROOT, Object, objects

BASE = MANIFESTS / "base"
NAMESPACED = MANIFESTS / "overlays/namespaced"
WATCHED = NAMESPACED / "watched"
QUEUES = MANIFESTS / "queues"
CRDS = {("CustomResourceDefinition", f"{kind.plural}.agentfly.dev") for kind in crd.KINDS}
OPERATOR = {
    ("ServiceAccount", "agentfly-operator"),
    ("Role", "agentfly-operator-leader"),
    ("RoleBinding", "agentfly-operator-leader"),
    ("Deployment", "agentfly-operator"),
    ("Service", "agentfly-operator"),
    ("PodDisruptionBudget", "agentfly-operator"),
}


def rights(scope: str) -> set[tuple[str, str]]:
    names = ("agentfly-operator", "agentfly-operator-credentials")
    return {(f"{scope}{suffix}", name) for suffix in ("", "Binding") for name in names}


def container(folder: Path) -> Object:
    (found,) = objects(folder)["Deployment", "agentfly-operator"]["spec"]["template"]["spec"]["containers"]
    return found


def overlay(tmp_path: Path, text: str) -> Path:
    """A kustomization of a user, whose resources are named from the root of this repository."""
    relative = Path(*[".."] * len(tmp_path.parts[1:]), *ROOT.parts[1:])
    (tmp_path / "kustomization.yaml").write_text(text.replace("agentfly/manifests", f"{relative}/manifests"))
    return tmp_path


def test_base_is_complete():
    users = {("ClusterRole", "agentfly-view"), ("ClusterRole", "agentfly-edit")}
    namespace = {("Namespace", "agentfly-system")}
    queues = {(kind, "agentfly-operator-queues") for kind in ("ClusterRole", "ClusterRoleBinding")}
    assert set(objects(BASE)) == CRDS | OPERATOR | namespace | users | queues | rights("ClusterRole")
    assert set(objects(QUEUES)) == queues


def test_cluster_wide_is_base():
    assert objects(MANIFESTS / "overlays/cluster-wide") == objects(BASE)


def test_namespaced_needs_no_right_to_anything_of_the_cluster():
    found = objects(NAMESPACED)
    assert set(found) == OPERATOR | rights("Role") | {("Lease", "agentfly-operator")}
    assert {each["metadata"]["namespace"] for each in found.values()} == {"agentfly-system"}
    # The Lease ends with the install: the operator cannot make it again while both are deleted.
    (rule,) = found["Role", "agentfly-operator-leader"]["rules"]
    assert (rule["resourceNames"], rule["verbs"]) == (["agentfly-operator"], ["get", "update"])
    assert container(NAMESPACED)["args"] == ["--namespace", "$(POD_NAMESPACE)"]
    assert container(BASE)["args"] == ["--all-namespaces"]


def test_crds_alone_are_those_of_base():
    alone = objects(ROOT / "crds")
    assert set(alone) == CRDS
    assert {key: objects(BASE)[key] for key in CRDS} == alone
    for (_, name), found in alone.items():
        made = yaml.safe_load((ROOT / f"crds/agentfly.dev_{name.partition('.')[0]}.yaml").read_text())
        assert found["spec"] == made["spec"]


def test_rights_of_one_namespace_are_those_of_all():
    everywhere, here = objects(BASE), objects(WATCHED)
    for name in ("agentfly-operator", "agentfly-operator-credentials"):
        assert here["Role", name]["rules"] == everywhere["ClusterRole", name]["rules"]


def test_a_namespaced_install_can_be_anywhere(tmp_path):
    found = objects(
        overlay(tmp_path, "namespace: team\nresources: [agentfly/manifests/overlays/namespaced]\n")
    )
    assert {each["metadata"]["namespace"] for each in found.values()} == {"team"}
    subjects = [each["subjects"] for (kind, _), each in found.items() if kind == "RoleBinding"]
    assert len(subjects) == 3
    assert {subject["namespace"] for (subject,) in subjects} == {"team"}


def test_one_operator_can_watch_a_further_namespace(tmp_path):
    text = "namespace: more\nresources: [agentfly/manifests/overlays/namespaced/watched]\n"
    found = objects(overlay(tmp_path, text))
    assert set(found) == rights("Role")
    for (kind, _), each in found.items():
        assert each["metadata"]["namespace"] == "more"
        if kind == "RoleBinding":
            assert each["subjects"][0]["namespace"] == "agentfly-system"


def test_everything_can_be_found_by_one_label():
    for folder in (
        BASE,
        NAMESPACED,
        WATCHED,
        QUEUES,
        ROOT / "crds",
        *(MANIFESTS / "overlays").glob("monitoring/**/"),
    ):
        for key, each in objects(folder).items():
            assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "agentfly", key


@pytest.mark.parametrize("folder", [BASE, NAMESPACED], ids=lambda folder: folder.name)
def test_the_operator_is_restricted_and_its_root_is_read_only(folder):
    spec = objects(folder)["Deployment", "agentfly-operator"]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(folder)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["volumes"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}]
    assert container(folder)["resources"]["limits"].keys() == {"memory"}


def test_the_operators_namespace_admits_nothing_less_than_restricted():
    labels = objects(BASE)["Namespace", "agentfly-system"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_selectors_find_the_operator_and_no_other_component():
    found = objects(BASE)
    labels = found["Deployment", "agentfly-operator"]["spec"]["template"]["metadata"]["labels"]
    wanted = {"agentfly.dev/component": "operator"}
    assert wanted.items() <= labels.items()
    assert found["Deployment", "agentfly-operator"]["spec"]["selector"] == {"matchLabels": wanted}
    assert found["PodDisruptionBudget", "agentfly-operator"]["spec"]["selector"] == {"matchLabels": wanted}
    assert found["Service", "agentfly-operator"]["spec"]["selector"] == wanted


def test_the_broker_runs_what_the_operator_runs_and_every_image_is_one_that_is_built():
    variables = {each["name"]: each.get("value") for each in container(BASE)["env"]}
    assert variables["AGENTFLY_IMAGE"] == container(BASE)["image"]
    made = re.findall(
        r"-t (\S+) \.", "".join(p.read_text() for p in ROOT.glob("operator/images/*/Dockerfile"))
    )
    named = {value for name, value in variables.items() if name.startswith("AGENTFLY_")}
    assert named == set(made)
    config = Config.from_environment({})
    assert named == {
        config.image, config.sandboxd_image,
        config.trainer_image, config.inference_image, config.colocated_image,
    }  # fmt: skip
    read = Config.from_environment({name: value + "-x" for name, value in variables.items() if value})
    assert (read.trainer_image, read.inference_image, read.colocated_image) == (
        "agentfly/trainer:dev-x",
        "agentfly/inference:dev-x",
        "agentfly/colocated:dev-x",
    )


def test_no_kustomization_is_forgotten_here():
    tested = {BASE, NAMESPACED, WATCHED, QUEUES, MANIFESTS / "operator", MANIFESTS / "overlays/cluster-wide"}
    tested |= {MANIFESTS / "overlays/monitoring", MANIFESTS / "overlays/monitoring/pools"}
    assert {path.parent for path in MANIFESTS.rglob("kustomization.yaml")} == tested
