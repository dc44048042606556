#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Two engines that share a cache server, on this machine; two_engines.py says more. PYTHON is the
# interpreter that StrataKV is installed for.
exec "${PYTHON:-python3}" "$(dirname -- "$0")/two_engines.py" "$@"
