#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs two_engines.py: two engines that share a cache server, on this machine. PYTHON may name the
# interpreter for which StrataKV is installed; otherwise find-python.sh finds one.
here=$(dirname -- "$0")
. "$here/find-python.sh"
exec "$python" "$here/two_engines.py" "$@"
