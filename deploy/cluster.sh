#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A prefill node, a decode node, a cache server and a proxy; cluster.py says more. PYTHON is the
# interpreter that StrataKV is installed for.
exec "${PYTHON:-python3}" "$(dirname -- "$0")/cluster.py" "$@"
