# SPDX-License-Identifier: Apache-2.0
"""deploy/compose.yaml and deploy/kubernetes: valid, with flags that exist, and closed as they say.

No container is started and no cluster asked.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from cryptography import x509

from stratakv.engine.cli import route, serve
from stratakv.engine.config.cache_server_options import CacheServerOptions
from stratakv.engine.config.offload_config import OffloadConfig
from stratakv.tiers.settings.values import ConfigError

from .deploy_manifests import (
    DEPLOY,
    KUBERNETES,
    Workload,
    compose,
    manifests,
    nodes,
    parse,
    settings_of,
    size,
    workloads,
)
from .free_ports import free_ports

# The oldest with what is used (a pause before the end), and the newest that the package knows.
VERSIONS = ("1.30.0", "1.37.0")
COMPOSE_FILES = ("compose.yaml", "compose.gpu.yaml")
README = (DEPLOY / "README.md").read_text()
PAGE = (DEPLOY.parent / "docs" / "prefill-decode.md").read_text()
ROLES = ("stratakv-cache", "stratakv-prefill", "stratakv-decode", "stratakv-proxy")
GIB = 2**30


def render(folder: str) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(params=workloads().values(), ids=workloads())
def workload(request: pytest.FixtureRequest) -> Workload:
    assert isinstance(request.param, Workload)
    return request.param


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(version: str) -> None:
    for each in manifests():
        kubernetes_validate.validate(each, version, strict=True)


def test_the_validator_sees_a_field_that_is_not_there() -> None:
    (policy,) = [each for each in manifests() if each["metadata"]["name"] == "stratakv-nothing"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**policy, "spec": {"podSelectors": {}}}, VERSIONS[-1], strict=True
        )


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_files_are_valid(name: str) -> None:
    validator = jsonschema.Draft202012Validator(get_builtin_schema("vendor.compose-spec"))
    assert [error.message for error in validator.iter_errors(compose(name))] == []
    assert list(validator.iter_errors({"services": {"x": {"imagee": "y"}}}))


def test_kustomize_takes_every_manifest() -> None:
    whole = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    files = {path.name for path in KUBERNETES.iterdir()} - {"kustomization.yaml"}
    assert sorted(whole["resources"]) == sorted(files)
    assert whole["namespace"] == "stratakv"


def test_kustomize_renders_both_variants() -> None:
    gpu, cpu = render("kubernetes"), render("kubernetes-cpu")
    for each in (*gpu, *cpu):
        kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    assert "nvidia.com/gpu" in str(gpu)
    assert "nvidia.com/gpu" not in str(cpu) and "/model" not in str(cpu)
    for each in cpu:
        if each["kind"] in ("StatefulSet", "Deployment"):
            check_memory(Workload(each["metadata"]["name"], each))


def test_there_is_one_of_each() -> None:
    assert sorted(workloads()) == sorted(ROLES)
    assert {name: config.role for (name, config) in ((w.name, c) for w, c in nodes())} == {
        "stratakv-prefill": "prefill",
        "stratakv-decode": "decode",
    }


# Command lines


def command_lines() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Every one in these files, with its environment."""
    for workload in workloads().values():
        yield workload.name, workload.container["args"], workload.environment
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "exec" in workload.container[probe]:
                words = workload.container[probe]["exec"]["command"]
                yield f"{workload.name} {probe}", words[1:], {}
    for name in COMPOSE_FILES:
        for service, whole in compose(name)["services"].items():
            yield f"{name} {service}", whole["command"], whole.get("environment", {})
            test = whole.get("healthcheck", {}).get("test", [])
            if "stratakv" in test:
                yield f"{name} {service} healthcheck", test[2:], {}
    script = subprocess.run(
        [sys.executable, str(DEPLOY / "cluster.py")], stdout=subprocess.PIPE, text=True, check=True
    )
    for text in (script.stdout, README, PAGE):
        for line in re.findall(r"^stratakv .*$", text.replace("\\\n", " "), re.MULTILINE):
            yield line[:40], shlex.split(line, comments=True)[1:], {}


COMMAND_LINES = list(command_lines())


@pytest.mark.parametrize(
    ("words", "environment"),
    [line[1:] for line in COMMAND_LINES],
    ids=[line[0] for line in COMMAND_LINES],
)
def test_every_command_line_is_understood(words: list[str], environment: dict[str, str]) -> None:
    parse(words, environment)
    with pytest.raises(ConfigError):
        parse([*words, "--no-such-flag=1"], environment)


def test_each_kind_of_command_was_found() -> None:
    assert {words[0] for _, words, _ in COMMAND_LINES} == {
        "serve", "cache-server", "route", "ping"
    }  # fmt: skip
    assert len(COMMAND_LINES) >= 25


def test_the_proxy_names_every_node() -> None:
    config = settings_of(workloads()["stratakv-proxy"])
    for role in ("prefill", "decode"):
        named = [address.url for address in getattr(config, role)]
        hosts = workloads()[f"stratakv-{role}"].hosts
        assert named == [f"https://{host}:8000" for host in hosts]


def test_the_nodes_name_every_cache_server() -> None:
    hosts = workloads()["stratakv-cache"].hosts
    for workload, _ in nodes():
        (flag,) = [word for word in workload.container["args"] if "--kv-offload=" in word]
        assert flag == "--kv-offload=cpu," + ",".join(f"grpcs://{host}:9400" for host in hosts)


def test_both_compose_files_start_the_same_services() -> None:
    services = compose()["services"]
    assert sorted(services) == ["cache", "decode", "prefill", "proxy"]
    assert compose("compose.gpu.yaml")["services"].keys() < services.keys()


# How they are started, looked at and ended


def test_pods_have_no_more_rights_than_they_need(workload: Workload) -> None:
    pod, container = workload.pod, workload.container
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_services_have_no_more_rights_than_they_need() -> None:
    for service in compose()["services"].values():
        assert service["user"] == "10001:10001"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["healthcheck"] and service["deploy"]["resources"]["limits"]["memory"]
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_the_user_is_that_of_the_image() -> None:
    assert "\nUSER 10001:10001\n" in (DEPLOY / "Containerfile").read_text()


def test_probes_ask_what_is_there(workload: Workload) -> None:
    settings, container = settings_of(workload), workload.container
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    port = getattr(settings, "port", 8000)
    assert next(iter(named.values())) == port
    has_tls = any(word.startswith("--ssl-certfile=") for word in container["args"])
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]
        if "exec" in probe:
            assert probe["exec"]["command"][:3] == [
                "stratakv", "ping", f"grpcs://127.0.0.1:{port}"
            ]  # fmt: skip
            continue
        assert named[probe["httpGet"]["port"]] == port
        assert (probe["httpGet"].get("scheme") == "HTTPS") is has_tls
        # Of the proxy /health tells of its nodes, and is no reason to start it again.
        is_own = workload.name != "stratakv-proxy" or kind == "readinessProbe"
        assert probe["httpGet"]["path"] == ("/health" if is_own else "/metrics")


def end_seconds(words: list[str]) -> float:
    """For which a program may take to end."""
    if words[0] == "serve":
        own = serve._REQUEST_SECONDS + serve._LAST_WORDS_SECONDS + serve._CLOSE_GRACE_SECONDS
        return own + OffloadConfig().shutdown_seconds
    settings = parse(words)
    if words[0] == "route":
        return float(settings.drain_seconds + route._LAST_WORDS_SECONDS)
    return float(settings.drain_seconds)


def test_they_may_take_as_long_to_end_as_they_need(workload: Workload) -> None:
    hook = workload.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
    needed = end_seconds(workload.container["args"]) + hook.get("seconds", 0)
    assert workload.pod["terminationGracePeriodSeconds"] >= needed + 5


def test_services_may_take_as_long_to_end_as_they_need() -> None:
    for service in compose()["services"].values():
        grace = float(service["stop_grace_period"].removesuffix("s"))
        assert grace >= end_seconds(service["command"]) + 5


def check_memory(workload: Workload) -> None:
    """A node's or a server's memory has room for its tiers, and is asked for in full."""
    resources, settings = workload.container["resources"], settings_of(workload)
    limit = size(resources["limits"]["memory"])
    assert resources["requests"]["cpu"] and resources["limits"]["cpu"]
    if workload.name == "stratakv-proxy":
        assert limit >= GIB
        return
    if isinstance(settings, CacheServerOptions):
        assert size(resources["requests"]["memory"]) == limit
        assert limit >= settings.cpu_bytes + GIB
        return
    slab = settings.offload.cpu.capacity_bytes
    pool = settings.cache.memory_bytes or 0
    assert (settings.model.device == "cpu") == (settings.cache.memory_bytes is not None)
    assert limit >= slab + pool + 2 * GIB


def test_memory_is_enough(workload: Workload) -> None:
    check_memory(workload)


def test_memory_of_services_is_enough() -> None:
    services = compose()["services"]
    for name in COMPOSE_FILES:
        for service, whole in compose(name)["services"].items():
            limits = whole["deploy"]["resources"]["limits"]
            settings = parse(whole["command"])
            limit = size(limits["memory"])
            if service == "cache":
                assert limit >= settings.cpu_bytes + GIB
            elif service != "proxy":
                pool = settings.cache.memory_bytes or 0
                assert limit >= settings.offload.cpu.capacity_bytes + pool + 2 * GIB
            assert services[service]["deploy"]["resources"]["reservations"]


def test_nodes_ask_for_a_gpu() -> None:
    for workload, config in nodes():
        assert config.model.device == "cuda"
        assert workload.container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    devices = [
        device
        for service in ("prefill", "decode")
        for device in compose("compose.gpu.yaml")["services"][service]["deploy"]["resources"][
            "reservations"
        ]["devices"]
    ]
    assert [device["device_ids"] for device in devices] == [["0"], ["1"]]


def test_every_workload_has_a_budget_for_disruptions() -> None:
    budgets = [each["spec"] for each in manifests() if each["kind"] == "PodDisruptionBudget"]
    for workload in workloads().values():
        (budget,) = [each for each in budgets if selects(each["selector"]["matchLabels"], workload)]
        replicas = workload.whole["spec"]["replicas"]
        assert budget.get("maxUnavailable") == 1 or 0 < budget["minAvailable"] < replicas


# Who reaches whom


def selects(labels: dict[str, str], workload: Workload) -> bool:
    return labels.items() <= workload.labels.items()


def policies() -> list[dict[str, Any]]:
    return [each["spec"] for each in manifests() if each["kind"] == "NetworkPolicy"]


def allowed(workload: Workload, direction: str, peers: str) -> set[tuple[str, str]]:
    """Peers and ports that the policies allow to it; `*` is everybody, `names` DNS."""
    found = set()
    for policy in policies():
        if not selects(policy["podSelector"].get("matchLabels", {}), workload):
            continue
        for rule in policy.get(direction, []):
            for port in rule["ports"]:
                for peer in rule.get(peers, [None]):
                    if peer is None:
                        found.add(("*", str(port["port"])))
                    elif "namespaceSelector" in peer:
                        found.add(("names", str(port["port"])))
                    else:
                        labels = peer["podSelector"]["matchLabels"]
                        found |= {
                            (each.name, str(port["port"]))
                            for each in workloads().values()
                            if selects(labels, each)
                        }
    return found


def test_only_the_proxy_reaches_nodes_and_only_nodes_the_cache_server() -> None:
    nothing = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert nothing in policies()
    cache, prefill, decode, proxy = (workloads()[name] for name in ROLES)
    assert allowed(proxy, "ingress", "from") == {("*", "http")}
    for node in (prefill, decode):
        assert allowed(node, "ingress", "from") == {("stratakv-proxy", "https")}
    assert allowed(cache, "ingress", "from") == {
        (name, port) for name in ROLES[1:3] for port in ("grpc", "data")
    }


def test_what_may_be_sent_is_what_may_come() -> None:
    names = {("names", "53")}
    cache, prefill, decode, proxy = (workloads()[name] for name in ROLES)
    assert allowed(cache, "egress", "to") == names
    for node in (prefill, decode):
        ports = {("stratakv-cache", "grpc"), ("stratakv-cache", "data")}
        assert allowed(node, "egress", "to") == names | ports
    assert allowed(proxy, "egress", "to") == names | {(name, "https") for name in ROLES[1:3]}


def test_networks_of_services_are_apart() -> None:
    whole = compose()
    joined = {name: set(each["networks"]) for name, each in whole["services"].items()}
    assert joined == {
        "cache": {"cache"},
        "prefill": {"nodes", "cache"},
        "decode": {"nodes", "cache"},
        "proxy": {"nodes", "clients"},
    }
    assert all(whole["networks"][name]["internal"] for name in ("nodes", "cache"))


# Secrets


def test_files_that_commands_name_are_mounted(workload: Workload) -> None:
    (volume,) = [each for each in workload.pod["volumes"] if each["name"] == "secrets"]
    assert volume["projected"]["defaultMode"] == 0o440
    files = {
        item["path"]
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }
    named = set(re.findall(r"/etc/stratakv/([\w.-]+)", str(workload.container)))
    assert named == files


def test_files_that_services_name_are_secrets() -> None:
    whole = compose()
    for service in whole["services"].values():
        text = str((service["command"], service["healthcheck"]))
        named = set(re.findall(r"/run/secrets/([\w.-]+)", text))
        assert named == set(service.get("secrets", []))
        assert named <= whole["secrets"].keys()


def test_no_secret_is_in_a_manifest() -> None:
    assert not [each for each in manifests() if each["kind"] == "Secret"]


def test_the_readme_makes_every_secret() -> None:
    """Those that the manifests name, with every key that they take."""
    made: dict[str, set[str]] = {}
    text = README.replace("\\\n", " ")
    for name, rest in re.findall(r"create secret generic (\S+)(.*)", text):
        files = re.findall(r"--from-file=(?:([\w.-]+)=)?\S*?([\w.-]+)(?=\s|$)", rest)
        made[name] = {key or file for key, file in files}
    needed: dict[str, set[str]] = {}
    for workload in workloads().values():
        for volume in workload.pod["volumes"]:
            for source in volume.get("projected", {}).get("sources", []):
                keys = {item["key"] for item in source["secret"]["items"]}
                needed.setdefault(source["secret"]["name"], set()).update(keys)
        for each in workload.container.get("env", []):
            if "valueFrom" in each:
                of = each["valueFrom"]["secretKeyRef"]
                needed.setdefault(of["name"], set()).add(of["key"])
    assert made == needed


def make_secrets(folder: Path, names: str) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    command = [str(DEPLOY / "make-secrets.sh"), str(folder), *shlex.split(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def names_of_certificates() -> list[str]:
    """As the README gives them to the script: for Compose and for Kubernetes."""
    return re.findall(r"^deploy/make-secrets\.sh \S+ (.*)$", README, re.MULTILINE)


def test_certificates_are_for_the_names_that_are_asked_for(tmp_path: Path) -> None:
    pods = [host for name in ROLES[:3] for host in workloads()[name].hosts]
    for number, (names, hosts) in enumerate(
        zip(names_of_certificates(), (["cache"], pods), strict=True)
    ):
        folder = make_secrets(tmp_path / str(number), names)
        for part in ("cache", "node"):
            certificate = x509.load_pem_x509_certificate((folder / f"{part}.crt").read_bytes())
            found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            patterns = set(found.value.get_values_for_type(x509.DNSName))
            for host in hosts:
                assert {host, f"*.{host.partition('.')[2]}"} & patterns, host


def test_secrets_are_private_and_not_made_twice(tmp_path: Path) -> None:
    folder = make_secrets(tmp_path / "secrets", "cache 10.0.0.5")
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert not (folder / "errors").exists()
    texts = [(folder / name).read_text() for name in ("token", "api-key", "tenant-secret")]
    assert len(set(texts)) == 3 and all(re.fullmatch("[0-9a-f]{64}", text) for text in texts)
    again = [str(DEPLOY / "make-secrets.sh"), str(folder), "cache"]
    assert subprocess.run(again, stderr=subprocess.DEVNULL, check=False).returncode != 0
    assert (folder / "token").read_text() == texts[0]


def test_the_probe_of_the_cache_server_finds_it_serving(tmp_path: Path) -> None:
    """With the arguments of the manifest, but for ports, size and where the secrets are."""
    folder = make_secrets(tmp_path / "secrets", names_of_certificates()[1])
    for mounted, name in (("tls.crt", "cache.crt"), ("tls.key", "cache.key")):
        (folder / name).rename(folder / mounted)
    container = workloads()["stratakv-cache"].container
    port, data_port = free_ports(2)

    def here(words: list[str]) -> list[str]:
        moved = [word.replace("/etc/stratakv", str(folder)) for word in words]
        return [word.replace("127.0.0.1:9400", f"127.0.0.1:{port}") for word in moved]

    flags = here(container["args"][1:])
    flags += ["--port", str(port), "--data-port", str(data_port), "--cpu-bytes", "16MiB"]
    probe = here(container["readinessProbe"]["exec"]["command"])
    probe[0] = str(Path(sys.executable).with_name("stratakv"))
    process = subprocess.Popen(
        [probe[0], container["args"][0], *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert "(TLS)" in process.stdout.readline()
        done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and "SERVING" in done.stdout, done.stderr
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.communicate()
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
