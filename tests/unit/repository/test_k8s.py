"""deploy/k8s: sound by Kubernetes' own schemas, open on the ports that the programs use and on no
other.

Where kustomize or kubectl is at hand, what they make of it; elsewhere the files as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate

from vfl_common.config.party import load_party
from vfl_common.config.recipe import load_recipe
from vfl_hub.commands import hub, members, node
from vfl_party.cli import run
from vfl_serve.commands import serve as served
from vfl_server.cli import run as server_run

ROOT = Path(__file__).parents[3]
K8S = ROOT / "deploy" / "k8s"
# The oldest and the newest that we look at.
VERSIONS = ("1.31", "1.34")
RECIPE = load_recipe(K8S / "base" / "recipe" / "recipe.toml")
Resource = dict[str, Any]


def documents(path: Path) -> Iterator[Resource]:
    yield from (document for document in yaml.safe_load_all(path.read_text()) if document)


def folders(folder: Path) -> Iterator[Path]:
    """A kustomization and all that it is made of. Fails where something that is named is not
    there.
    """
    (kustomization,) = documents(folder / "kustomization.yaml")
    yield folder
    for name in kustomization.get("resources", []):
        path = (folder / name).resolve(strict=True)
        if path.is_dir():
            yield from folders(path)


def resources(folder: Path) -> list[Resource]:
    """Everything that a kustomization has, before its patches."""
    found: list[Resource] = []
    for each in folders(folder):
        (kustomization,) = documents(each / "kustomization.yaml")
        for name in kustomization.get("resources", []):
            if (each / name).is_file():
                found += documents(each / name)
    return found


def named(folder: Path, kind: str, name: str) -> Resource:
    (found,) = (
        each
        for each in resources(folder)
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_fits_its_schema(version: str) -> None:
    found = [*resources(K8S), *documents(K8S / "files.yaml")]
    assert {each["kind"] for each in found} == {
        "Job",
        "Namespace",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "Pod",
        "Service",
    }
    for each in found:
        validate(each, version, strict=True)
    # A patch: a part of a Job.
    validate(next(documents(K8S / "bank" / "active.yaml")), version, strict=False)


def test_a_mistake_would_be_found() -> None:
    job = named(K8S / "server", "Job", "server")
    job["spec"]["template"]["spec"]["containers"][0]["readOnlyRoot"] = True
    with pytest.raises(Exception, match="readOnlyRoot"):
        validate(job, VERSIONS[0], strict=True)


def rendered(folder: Path) -> str:
    """Returns the documents that kustomize makes of a folder; skips the test if there is no kustomize."""
    command = next((name for name in ("kustomize", "kubectl") if shutil.which(name)), None)
    if command is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    args = [command, "build" if command == "kustomize" else "kustomize", str(folder)]
    return subprocess.run(args, check=True, capture_output=True, text=True, timeout=60).stdout


def test_rendered_by_kustomize() -> None:
    found = [each for each in yaml.safe_load_all(rendered(K8S)) if each]
    for each in found:
        validate(each, VERSIONS[-1], strict=True)
    jobs = {
        each["metadata"]["namespace"]: each["spec"]["template"]["spec"]
        for each in found
        if each["kind"] == "Job"
    }
    assert sorted(jobs) == sorted(
        f"vfl-{name}" for name in [RECIPE.server, *(p.name for p in RECIPE.parties)]
    )
    assert ["vfl-party", "health", "party.toml"] in (
        spec["containers"][0].get("readinessProbe", {}).get("exec", {}).get("command")
        for spec in jobs.values()
    )


def test_the_same_recipe_as_everywhere() -> None:
    assert RECIPE.digest() == load_recipe(ROOT / "examples" / "digits.toml").digest()


def test_parties_and_addresses() -> None:
    """Names, ports and services of party files, Services and policies belong together."""
    port_of: dict[str, Any] = {}
    for folder, service in ((K8S / "server", "server"), (K8S / "bank", "active")):
        (port,) = named(folder, "Service", service)["spec"]["ports"]
        port_of[f"{service}.vfl-{folder.name}"] = port["port"]
    for party in RECIPE.parties:
        folder = K8S / party.name
        file = load_party(folder / "party.toml")
        (kustomization,) = documents(folder / "kustomization.yaml")
        assert (file.name, kustomization["namespace"]) == (party.name, f"vfl-{party.name}")
        host, _, port = file.server.partition(":")
        assert port_of[host] == int(port) == 7000
        if party.role == "active":
            host, _, port = (file.advertise or "").partition(":")
            assert port_of[host] == int(port) == int(file.listen.partition(":")[2]) == 7001


def peers(rule: Resource) -> set[str]:
    """The namespaces of one rule of a policy."""
    found = set()
    for peer in rule.get("from") or rule.get("to") or []:
        selector = peer["namespaceSelector"]
        for expression in selector.get("matchExpressions", []):
            found |= set(expression["values"])
        found |= set(selector.get("matchLabels", {}).values())
    return found


def opened(folder: Path) -> set[tuple[str, str, int]]:
    """(direction, namespace of the other side, port) of all that the policies let pass."""
    found = set()
    denied = named(folder, "NetworkPolicy", "nothing-else")["spec"]
    assert denied == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for policy in (each for each in resources(folder) if each["kind"] == "NetworkPolicy"):
        for direction in ("ingress", "egress"):
            for rule in policy["spec"].get(direction, []):
                found |= {
                    (direction, peer, port["port"])
                    for peer in peers(rule)
                    for port in rule["ports"]
                }
    return found


def test_policies_open_what_the_guide_says_and_no_more() -> None:
    parties = {f"vfl-{party.name}" for party in RECIPE.parties}
    passive = {f"vfl-{party.name}" for party in RECIPE.passives}
    names = ("egress", "kube-system", 53)
    assert opened(K8S / "server") == {("ingress", party, 7000) for party in parties}
    assert opened(K8S / "bank") == {("ingress", p, 7001) for p in passive} | {
        ("egress", "vfl-server", 7000),
        names,
    }
    for party in RECIPE.passives:
        assert opened(K8S / party.name) == {
            ("egress", "vfl-server", 7000),
            ("egress", "vfl-bank", 7001),
            names,
        }


@pytest.mark.parametrize("folder", ["server", "bank", "hospital", "retailer", "telecom"])
def test_no_key_is_committed_and_no_process_has_rights(folder: str) -> None:
    assert not list((K8S / folder).rglob("*.key"))
    assert not [each for each in resources(K8S / folder) if each["kind"] == "Secret"]
    (job,) = (each for each in resources(K8S / folder) if each["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("folder", ["server", "bank", "hospital", "retailer", "telecom"])
def test_no_process_can_fill_the_node(folder: str) -> None:
    (job,) = (each for each in resources(K8S / folder) if each["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
    assert {"memory", "ephemeral-storage"} <= container["resources"]["requests"].keys()
    empty = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
    assert [list(each) for each in empty] == [["sizeLimit"]]


@pytest.mark.parametrize("kind", ["server", "passive", "active"])
def test_a_night_s_job_is_the_job(kind: str) -> None:
    (cron,) = documents(K8S / "nightly" / kind / "cronjob.yaml")
    for version in VERSIONS:
        validate(cron, version, strict=True)
    (job,) = documents(K8S / ("server" if kind == "server" else "base/party") / "job.yaml")
    wanted = job["spec"]
    if kind == "active":
        (patch,) = documents(K8S / "bank" / "active.yaml")
        container = wanted["template"]["spec"]["containers"][0]
        container |= patch["spec"]["template"]["spec"]["containers"][0]
    assert cron["spec"]["jobTemplate"]["spec"] == wanted
    assert cron["spec"]["concurrencyPolicy"] == "Forbid"
    assert [*folders(K8S / "nightly" / kind)] == [K8S / "nightly" / kind]


def test_what_prometheus_reads_is_what_a_service_offers_and_a_policy_lets_pass() -> None:
    """The operator's resources are not of Kubernetes' own schemas: what they name is looked at."""
    folder = K8S / "monitoring"
    service, policy = (
        named(folder, "Service", "metrics"),
        named(folder, "NetworkPolicy", "from-prometheus"),
    )
    for each in (service, policy):
        for version in VERSIONS:
            validate(each, version, strict=True)
    monitor = named(folder, "ServiceMonitor", "vfl")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    # No other Service has these labels, and every process has those that the Service looks for.
    (endpoint,), (port,) = monitor["spec"]["endpoints"], service["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    for name in ("server", "bank", "hospital"):
        for each in resources(K8S / name):
            if each["kind"] == "Service":
                assert not wanted.items() <= each["metadata"].get("labels", {}).items()
            if each["kind"] == "Job":
                labels = each["spec"]["template"]["metadata"]["labels"]
                assert service["spec"]["selector"].items() <= labels.items()
    (rule,) = policy["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [port["port"]] == [port["targetPort"]]
    # The programs listen there, by options that they have.
    (kustomization,) = documents(folder / "kustomization.yaml")
    options: dict[str, list[str]] = {}
    for patch in kustomization["patches"]:
        steps = yaml.safe_load(patch["patch"])
        options[patch["target"]["kind"]] = [each["value"] for each in steps]
    assert {each[0] for each in options.values()} == {f"--metrics=0.0.0.0:{port['port']}"}
    for command, file, kind in (
        (server_run, "recipe.toml", "Job"),
        (run, "party.toml", "CronJob"),
        (served, "party.toml", "Deployment"),
    ):
        words = [file, *options[kind], *(["--run", "production"] if command is served else [])]
        context = command.make_context("x", words, resilient_parsing=True)
        assert context.params["metrics"] == "0.0.0.0:9464"
        assert command is served or context.params["linger_s"] == 60


def test_every_process_opens_the_port_of_metrics_with_the_component(tmp_path: Path) -> None:
    """Jobs, those of every night, and those that serve."""
    seen = set()
    for name in ("bank", "nightly/passive", "serving/active"):
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        above = os.path.relpath(K8S, folder)
        text = f"resources: [{above}/{name}]\ncomponents: [{above}/monitoring]\n"
        (folder / "kustomization.yaml").write_text(text)
        for each in yaml.safe_load_all(rendered(folder)):
            if each["kind"] in ("Job", "CronJob", "Deployment"):
                spec = each["spec"]
                spec = spec["jobTemplate"]["spec"] if each["kind"] == "CronJob" else spec
                (container,) = spec["template"]["spec"]["containers"]
                assert "--metrics=0.0.0.0:9464" in container["command"], each["kind"]
                seen.add(each["kind"])
    assert seen == {"Job", "CronJob", "Deployment"}


def test_the_operator_s_rules_are_the_alerts() -> None:
    rule = named(K8S / "rules", "PrometheusRule", "vfl")
    (alerts,) = documents(ROOT / "deploy" / "observability" / "alerts.yml")
    assert rule["spec"] == alerts


SERVING = K8S / "serving"


def deployment(folder: Path) -> Resource:
    return named(folder, "Deployment", "serving")


@pytest.mark.parametrize("version", VERSIONS)
def test_what_serves_fits_its_schema(version: str) -> None:
    found = resources(SERVING)
    assert {each["kind"] for each in found} == {"Deployment", "NetworkPolicy", "Service"}
    for each in found:
        validate(each, version, strict=True)


def test_the_parties_that_serve_find_each_other() -> None:
    """Names, ports, labels, Services and policies of those that serve belong together."""
    active = SERVING / "active"
    ports = {each["name"]: each for each in named(active, "Service", "serving")["spec"]["ports"]}
    (container,) = deployment(active)["spec"]["template"]["spec"]["containers"]
    opened_by = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert {name: each["targetPort"] for name, each in ports.items()} == {
        name: name for name in opened_by
    }
    file = load_party(active / "party.toml")
    assert file.listen == f"0.0.0.0:{opened_by['exchange']}"
    assert file.serve.http == f"0.0.0.0:{opened_by['http']}"
    for party in RECIPE.passives:
        own = load_party(SERVING / party.name / "party.toml")
        assert own.active == file.advertise == f"serving.vfl-bank:{ports['exchange']['port']}"
        (was, now) = (
            tomllib.loads((folder / party.name / "party.toml").read_text())
            for folder in (K8S, SERVING)
        )
        assert now == {**was, "active": own.active}
        (kustomization,) = documents(SERVING / party.name / "kustomization.yaml")
        assert kustomization["namespace"] == f"vfl-{party.name}"
    # To it they may go, and it lets them in: on this port, and nobody else.
    (to,) = named(SERVING / "passive", "NetworkPolicy", "to-serving-party")["spec"]["egress"]
    (come,) = named(active, "NetworkPolicy", "from-serving-parties")["spec"]["ingress"]
    labels = deployment(active)["spec"]["template"]["metadata"]["labels"]
    assert to["to"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert come["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert peers(come) == {f"vfl-{party.name}" for party in RECIPE.passives}
    assert {each["port"] for rule in (to, come) for each in rule["ports"]} == {7001}


def assert_confined(pod: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Compares a pod with the Job of a party in all that keeps it in its place, and its container
    in ``keys``. Returns the container.
    """
    (container,) = pod["containers"]
    (job,) = documents(K8S / "base" / "party" / "job.yaml")
    wanted = job["spec"]["template"]["spec"]
    for key in ("automountServiceAccountToken", "enableServiceLinks", "securityContext"):
        assert pod[key] == wanted[key]
    for key in keys:
        assert container[key] == wanted["containers"][0][key]
    return dict(container)


@pytest.mark.parametrize("role", ["active", "passive"])
def test_who_serves_has_no_rights_and_probes_that_its_port_answers(role: str) -> None:
    of = deployment(SERVING / role)["spec"]
    pod = of["template"]["spec"]
    container = assert_confined(pod, "image", "securityContext", "resources", "workingDir")
    assert (of["replicas"], of["strategy"]) == (1, {"type": "Recreate"})
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}
    context = served.make_context("x", container["command"][2:], resilient_parsing=True)
    assert context.params["trained"] == ("production",)
    probes = {name: each for name, each in container.items() if name.endswith("Probe")}
    assert set(probes) == (
        {"startupProbe", "livenessProbe", "readinessProbe"} if role == "active" else set()
    )
    for each in probes.values():
        assert each["httpGet"]["path"] in ("/healthz", "/v2/health/live", "/v2/health/ready")
        assert (each["httpGet"]["port"], each["httpGet"]["scheme"]) == ("http", "HTTPS")


STANDING = K8S / "standing"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_standing_federation_fits_its_schema(version: str) -> None:
    kinds = {}
    for name in ("hub", "node"):
        found = resources(STANDING / name)
        kinds[name] = {each["kind"] for each in found}
        for each in found:
            validate(each, version, strict=True)
    assert kinds["node"] == {"Deployment", "NetworkPolicy"}
    assert kinds["hub"] == kinds["node"] | {"Namespace", "PersistentVolumeClaim", "Service"}


@pytest.mark.parametrize("name", ["hub", "node"])
def test_kustomize_renders_hub_and_node(name: str) -> None:
    found = [each for each in yaml.safe_load_all(rendered(STANDING / name)) if each]
    for each in found:
        validate(each, VERSIONS[-1], strict=True)
    (deployed,) = (each for each in found if each["kind"] == "Deployment")
    assert deployed["metadata"].get("namespace") == ("vfl-hub" if name == "hub" else None)
    (container,) = deployed["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.org/vfl:latest"


def test_nodes_only_dial_out() -> None:
    assert opened(STANDING / "node") == {
        ("egress", "vfl-hub", 7443),
        ("egress", "kube-system", 53),
    }
    assert opened(STANDING / "hub") == {
        ("ingress", f"vfl-{party.name}", 7443) for party in RECIPE.parties
    }
    labels = {
        name: named(STANDING / name, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        for name in ("hub", "node")
    }
    (come,) = named(STANDING / "hub", "NetworkPolicy", "from-nodes")["spec"]["ingress"]
    to = named(STANDING / "node", "NetworkPolicy", "to-hub")["spec"]["egress"][0]["to"]
    for peer, label in ((come["from"][0], labels["node"]), (to[0], labels["hub"])):
        assert peer["podSelector"]["matchLabels"].items() <= label.items()
    service = named(STANDING / "hub", "Service", "hub")["spec"]
    assert service["selector"].items() <= labels["hub"].items()
    (port,) = service["ports"]
    (container,) = named(STANDING / "hub", "Deployment", "hub")["spec"]["template"]["spec"][
        "containers"
    ]
    (listens,) = container["ports"]
    assert port["targetPort"] == listens["name"]
    # The hub's default.
    context = hub.make_context("x", container["command"][2:], resilient_parsing=True)
    assert context.params["listen"] == f"0.0.0.0:{port['port']}" == "0.0.0.0:7443"
    assert listens["containerPort"] == port["port"]


@pytest.mark.parametrize("name", ["hub", "node"])
def test_hub_and_node_have_no_rights_and_probes(name: str) -> None:
    of = named(STANDING / name, "Deployment", name)["spec"]
    assert (of["replicas"], of["strategy"]) == (1, {"type": "Recreate"})
    pod = of["template"]["spec"]
    container = assert_confined(pod, "securityContext")
    for limits in container["resources"].values():
        assert {"memory", "ephemeral-storage"} <= limits.keys()
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }
    assert all("sizeLimit" in each["emptyDir"] for each in pod["volumes"] if "emptyDir" in each)
    probes = {each: container[each] for each in container if each.endswith("Probe")}
    assert set(probes) == {"livenessProbe", "readinessProbe"}
    for each in probes.values():
        if name == "hub":
            assert each["httpGet"] == {"path": "/healthz", "port": "hub", "scheme": "HTTPS"}
        else:
            assert each["exec"] == {"command": ["vfl", members.name]}
    command = hub if name == "hub" else node
    program = "vfl-server" if name == "hub" else "vfl-party"
    assert container["command"][:2] == [program, command.name]
    # Fails where an option is unknown.
    with command.make_context(program, container["command"][2:]) as context:
        assert context.args == []
    if name == "node":
        (own,) = (each for each in container["volumeMounts"] if each["name"] == "runs")
        assert container["env"] == [{"name": "VFL_NODE", "value": f"{own['mountPath']}/node"}]
