#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A prefill node, a decode node, a cache server and a proxy; cluster.py says more. PYTHON is the
# interpreter that StrataKV is installed for; without it one is looked for.
here=$(dirname -- "$0")
. "$here/find-python.sh"
exec "$python" "$here/cluster.py" "$@"
