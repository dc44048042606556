#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs cluster.py: a prefill node, a decode node, a cache server and a proxy. PYTHON may name the
# interpreter for which StrataKV is installed; otherwise find-python.sh finds one.
here=$(dirname -- "$0")
. "$here/find-python.sh"
exec "$python" "$here/cluster.py" "$@"
