# SPDX-License-Identifier: Apache-2.0
"""The layer of environment variables: `STRATAKV_BLOCK_SIZE=32` is `--block-size 32`.

A variable that begins so and is none is refused, since a mistyped one would be ignored in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...tiers.settings.setting_layers import VARIABLE, Given
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from .schema import SCHEMA, VARIABLE_PREFIX, variable_of
from .unsupported_options import explain_not_built
from .vllm_aliases import ALIASES

CONFIG_VARIABLE = "STRATAKV_CONFIG"
# Variables of `stratakv cache-server`, which reads them itself.
CACHE_SERVER_PREFIX = "STRATAKV_CACHE_SERVER_"
# Variables that are no options, and what they are for.
OTHER_VARIABLES: Mapping[str, str] = {
    CONFIG_VARIABLE: "the file of options",
    "STRATAKV_ARGS": "arguments that the systemd unit adds",
    "STRATAKV_COMMIT": "the commit in reports of benchmarks, for benchmarks/harness/report.py",
    "STRATAKV_BYTES": "none leaves the compiled library of tiers/native/native_library.py alone",
    "STRATAKV_CPU_KERNELS": "which compiled kernels of the CPU run, for kernels/cpu/library.py",
}
MAX_NAME_CHARACTERS = 80
# Kubernetes gives these to every container beside a service whose name begins with `stratakv`.
_SERVICE_LINK = re.compile(r".*_SERVICE_(HOST|PORT|PORT_.+)|.*_PORT_\d+_(TCP|UDP|SCTP)(_.+)?")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.+")


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """The options in these variables; raises ConfigError for one that cannot be."""
    known = {variable_of(name): name for name in SCHEMA}
    layer = {}
    for variable, value in environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable.startswith(CACHE_SERVER_PREFIX) or is_service_link(variable, value):
            continue
        name = known.get(variable)
        if name is None:
            raise ConfigError(_explain_unknown(variable, known))
        layer[name] = Given(SCHEMA[name].read(variable, value), VARIABLE, variable)
    return layer


def is_service_link(variable: str, value: str) -> bool:
    """Whether Kubernetes has set this variable, for a service whose name begins as ours do."""
    if _SERVICE_LINK.fullmatch(variable):
        return True
    return variable.endswith("_PORT") and _SERVICE_URL.fullmatch(value) is not None


def _explain_unknown(variable: str, known: Mapping[str, str]) -> str:
    shown = variable[:MAX_NAME_CHARACTERS]
    if variable.removeprefix(VARIABLE_PREFIX).lower() in ALIASES:
        return (
            f"{shown} is set, and names of vLLM's options are taken as flags and in files only; "
            "use StrataKV's own name"
        )
    explained = explain_not_built(shown, variable.removeprefix(VARIABLE_PREFIX).lower())
    if explained:
        return f"{explained}; unset it"
    # Without the prefix, which makes any two of them alike.
    ends = [name.removeprefix(VARIABLE_PREFIX) for name in (*known, *OTHER_VARIABLES)]
    near = did_you_mean(variable.removeprefix(VARIABLE_PREFIX), ends)
    near = re.sub(r"\b([A-Z][A-Z_]*)", rf"{VARIABLE_PREFIX}\1", near)
    return f"{shown} is set and names no option{near or '; `stratakv config show` lists them'}"
