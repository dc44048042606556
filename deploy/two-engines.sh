#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Two engines that share a cache server, on this machine; two_engines.py says more. PYTHON is the
# interpreter that StrataKV is installed for; without it one is looked for.
here=$(dirname -- "$0")
. "$here/find-python.sh"
exec "$python" "$here/two_engines.py" "$@"
