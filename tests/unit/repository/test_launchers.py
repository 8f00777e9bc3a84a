"""deploy/slurm and deploy/kubeflow: sound by what is known of both formats, calling commands that
there are, starting again what a restart mends.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner
from kubernetes_validate import validate
from torch.distributed.run import parse_args

from tests.unit.repository.test_k8s import K8S, VERSIONS, documents, rendered
from vfl_common.config.party import load_party
from vfl_party.cli import run

DEPLOY = Path(__file__).parents[3] / "deploy"
SBATCH = DEPLOY / "slurm" / "party.sbatch"
KUBEFLOW = DEPLOY / "kubeflow"

# -- Slurm


# Of sbatch(1), Slurm 22.05 to 25.05: what a value looks like; None if there is none.
OPTIONS = {
    "account": r"\w+",
    "cpus-per-task": r"\d+",
    "gpus-per-node": r"(\w+:)*\d+",
    "job-name": r"[\w-]+",
    "mem": r"\d+[KMGT]?",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "open-mode": "append|truncate",
    "output": r"[\w%-]+\.log",
    "partition": r"\w+",
    "requeue": None,
    "signal": r"([BR]{1,2}:)?[A-Z0-9]+(@\d+)?",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
}
# Slurm reads options up to the first command.
HEADER = re.compile(r"^##?SBATCH +(.*)$", re.MULTILINE)
STUBS = {
    # As on the first node: the command, until it ends.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nSLURM_NODEID=0 exec "$@"',
    "torchrun": """said=torchrun
while [ "$1" != -- ]; do said="$said $1"; shift; done
shift
echo "$said -- $1" >>"$SAID"
"$@" || exit 1""",
    "vfl-party": 'echo "vfl-party $*" >>"$SAID"\nexit "$PARTY_ENDS"',
    "scontrol": 'echo "scontrol $*" >>"$SAID"\necho "JobId=7 JobState=$STATE Reason=None"',
}


def options(text: str) -> dict[str, str | None]:
    """What #SBATCH lines ask for, those that are commented out, too."""
    found: dict[str, str | None] = {}
    for line in HEADER.findall(text):
        name, _, value = line.removeprefix("--").partition("=")
        found[name] = value or None
    return found


def test_every_option_is_one_of_sbatch() -> None:
    text = SBATCH.read_text()
    body = text.index("set -euo")
    assert not HEADER.findall(text[body:])
    found = options(text)
    assert found.keys() == OPTIONS.keys()
    for name, value in found.items():
        pattern = OPTIONS[name]
        assert value is None if pattern is None else re.fullmatch(pattern, value or ""), name
    # Slurm's own restart and the time limit's signal are what the script counts on.
    assert (found["requeue"], found["ntasks-per-node"]) == (None, "1")
    assert (found["signal"] or "").startswith("TERM@")


def job(tmp_path: Path, code: int, state: str = "RUNNING", **more: str) -> tuple[int, list[str]]:
    """Runs the script where Slurm's, torch's and our programs are stubs; (its exit code, the calls
    in their order).
    """
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/bin/sh\n{text}\n")
        (stubs / name).chmod(0o755)
    said = tmp_path / "said"
    environment = {
        "PATH": os.environ["PATH"],
        "VFL_BIN": str(stubs),
        "SAID": str(said),
        "PARTY_ENDS": str(code),
        "STATE": state,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_GPUS_ON_NODE": "4",
        **more,
    }
    done = subprocess.run(
        ["bash", str(SBATCH), "bank.toml"],  # noqa: S607
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    # Nothing is left behind.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "said"]
    return done.returncode, said.read_text().splitlines()


def test_torchrun_and_the_party_know_their_options(tmp_path: Path) -> None:
    code, (torchrun, party) = job(tmp_path, 0)
    assert code == 0
    args = parse_args(shlex.split(torchrun)[1:])
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "4", 0)
    # So that rank 0 is on the first node: other rendezvous give ranks in the order of names.
    assert (args.rdzv_backend, args.master_port, args.no_python) == ("static", 20007, True)
    assert args.training_script == "bash"
    words = shlex.split(party)
    assert words[:2] == ["vfl-party", "run"]
    with run.make_context("run", words[2:], resilient_parsing=True) as context:
        assert context.args == []
        assert (context.params["party"], context.params["wait_s"]) == (Path("bank.toml"), 3600)


REQUEUED = "scontrol requeue 7"


@pytest.mark.parametrize("code", [1, 3, 4, 130])
def test_what_a_restart_mends_is_started_again(tmp_path: Path, code: int) -> None:
    ended, said = job(tmp_path, code)
    assert (ended, said[-1]) == (0, REQUEUED)


@pytest.mark.parametrize(
    ("code", "more"),
    [
        # Bad input.
        (2, {}),
        # By a person, or a node was lost: Slurm has decided what becomes of it.
        (130, {"state": "CANCELLED"}),
        (1, {"SLURM_RESTART_COUNT": "50"}),
        (1, {"SLURM_RESTART_COUNT": "3", "MOST_RESTARTS": "3"}),
    ],
)
def test_what_a_restart_does_not_mend_stays_ended(
    tmp_path: Path, code: int, more: dict[str, str]
) -> None:
    ended, said = job(tmp_path, code, **more)
    assert ended == (2 if code == 2 else 1)
    assert REQUEUED not in said


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", str(SBATCH)],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


# -- Kubeflow Trainer

# See its $comment.
SCHEMA = Path(__file__).with_name("kubeflow-trainer.json")
FILES = ("trainjob.yaml", "runtime.yaml")
Resource = dict[str, Any]


def resource(name: str) -> Resource:
    (found,) = documents(KUBEFLOW / name)
    return found


def said_by_schema(path: Path) -> tuple[int, str]:
    done = CliRunner().invoke(check_jsonschema, ["--schemafile", str(SCHEMA), str(path)])
    return done.exit_code, done.output


def replicated() -> Resource:
    """The one kind of job of the runtime."""
    (found,) = resource("runtime.yaml")["spec"]["template"]["spec"]["replicatedJobs"]
    assert isinstance(found, dict)
    return found


def as_job() -> Resource:
    """The Job that a JobSet makes of it for two nodes, with what TrainJob adds."""
    template = replicated()["template"]
    trainer = resource("trainjob.yaml")["spec"]["trainer"]
    (container,) = template["spec"]["template"]["spec"]["containers"]
    container |= {"command": trainer["command"], "resources": trainer["resourcesPerNode"]}
    nodes = trainer["numNodes"]
    spec = template["spec"] | {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
    }
    metadata = {"name": "party-node-0", **template["metadata"]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("name", FILES)
def test_a_file_follows_kubeflow_s_schema(name: str) -> None:
    code, output = said_by_schema(KUBEFLOW / name)
    assert code == 0, output


@pytest.mark.parametrize(
    ("name", "was", "now"),
    [
        ("trainjob.yaml", "numNodes: 2", "nodes: 2"),
        ("trainjob.yaml", "numProcPerNode: 4", 'numProcPerNode: "4"'),
        ("trainjob.yaml", "runtimeRef:", "runtime:"),
        ("runtime.yaml", "maxRestarts: 5", "max: 5"),
        ("runtime.yaml", "replicatedJobs:", "jobs:"),
    ],
)
def test_a_mistake_would_be_found(tmp_path: Path, name: str, was: str, now: str) -> None:
    text = (KUBEFLOW / name).read_text()
    assert text.count(was) == 1
    (tmp_path / name).write_text(text.replace(was, now))
    code, output = said_by_schema(tmp_path / name)
    assert (code, name in output) == (1, True)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_part_fits_its_schema(version: str) -> None:
    validate(as_job(), version, strict=True)
    for name in ("network.yaml", "claims.yaml"):
        for each in documents(KUBEFLOW / name):
            validate(each, version, strict=True)


def test_trainer_finds_what_it_looks_for() -> None:
    job, runtime = resource("trainjob.yaml"), resource("runtime.yaml")
    wanted = job["spec"]["runtimeRef"]
    assert (wanted["kind"], wanted["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    # It passes PET_ variables to the container "node" of the step "trainer" alone.
    node = replicated()
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert (node["name"], container["name"]) == ("node", "node")
    assert node["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    # One failed pod fails the job, and with it all pods; the JobSet starts all of them again.
    spec = node["template"]["spec"]
    assert (spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_torchrun_takes_the_rest_from_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = resource("trainjob.yaml")["spec"]["trainer"]
    for name, value in {
        "NNODES": trainer["numNodes"],
        "NPROC_PER_NODE": trainer["numProcPerNode"],
        "NODE_RANK": 1,
        "MASTER_ADDR": "party-node-0-0.party",
        "MASTER_PORT": 29500,
    }.items():
        monkeypatch.setenv(f"PET_{name}", str(value))
    program, *words = trainer["command"]
    args = parse_args(words)
    assert program == "torchrun"
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "4", 1)
    assert (args.rdzv_backend, args.master_addr) == ("static", "party-node-0-0.party")
    assert (args.training_script, args.no_python) == ("vfl-party", True)
    with run.make_context("run", args.training_script_args[1:], resilient_parsing=True) as context:
        assert context.args == []
        assert context.params["device"] == "cuda"
    # A process for each GPU.
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]


def test_a_pod_is_that_of_the_party_s_job() -> None:
    """But for GPUs' shared memory, and for what TrainJob and JobSet say."""
    (job,) = documents(K8S / "base" / "party" / "job.yaml")
    wanted, pod = (each["spec"]["template"] for each in (job, as_job()))
    assert pod["metadata"] == wanted["metadata"]
    shared = {"name": "shared", "mountPath": "/dev/shm"}  # noqa: S108
    (container,) = pod["spec"].pop("containers")
    (other,) = wanted["spec"].pop("containers")
    container["volumeMounts"].remove(shared)
    assert {"sizeLimit", "medium"} == pod["spec"]["volumes"].pop()["emptyDir"].keys()
    differ = {key for key in container if container[key] != other.get(key)}
    assert differ == {"name", "command", "resources"}
    del pod["spec"]["restartPolicy"], wanted["spec"]["restartPolicy"]
    assert pod["spec"] == wanted["spec"]
    assert {"memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()


def test_claims_differ_by_their_modes_alone() -> None:
    claims, others = (
        [*documents(folder / "claims.yaml")] for folder in (KUBEFLOW, K8S / "base" / "party")
    )
    modes = [each["spec"].pop("accessModes") for each in [*claims, *others]]
    assert claims == others
    assert modes == [["ReadWriteMany"]] * 2 + [["ReadWriteOnce"]] * 2


def test_ranks_reach_each_other_and_nobody_else() -> None:
    policy = resource("network.yaml")["spec"]
    ranks = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "party"}}
    assert resource("trainjob.yaml")["metadata"]["name"] == "party"
    assert policy["podSelector"] == ranks
    assert policy["ingress"] == [{"from": [{"podSelector": ranks}]}]
    assert policy["egress"] == [{"to": [{"podSelector": ranks}]}]


def test_rendered_by_kustomize() -> None:
    made = rendered(KUBEFLOW)
    found = [each for each in yaml.safe_load_all(made) if each]
    party = load_party(K8S / "hospital" / "party.toml").name
    assert {each["metadata"].get("namespace", f"vfl-{party}") for each in found} == {f"vfl-{party}"}
    kinds = [each["kind"] for each in found]
    assert "Job" not in kinds
    assert {"TrainJob", "TrainingRuntime"} <= set(kinds)
    # The pods are on several nodes.
    modes = [
        each["spec"]["accessModes"] for each in found if each["kind"] == "PersistentVolumeClaim"
    ]
    assert modes == [["ReadWriteMany"]] * 2
    (image,) = re.findall(r"image: (\S+)", made)
    assert image.startswith("registry.example.org/vfl:")
