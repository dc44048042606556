# SPDX-License-Identifier: Apache-2.0
# Sets `python` to the interpreter for which StrataKV is installed: PYTHON if it is set, else
# python3, else that of .venv in this clone. The scripts cluster.sh and two-engines.sh set `here`
# and source this file.
has_stratakv() { "$1" -P -c 'import stratakv' 2>/dev/null; }
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && ! has_stratakv python3 && [ -x "$here/../.venv/bin/python" ]; then
    python=$here/../.venv/bin/python
fi
if ! has_stratakv "$python"; then
    echo "StrataKV is not installed for $python; name the Python that it is installed for: PYTHON=... $0 (\`make env\` installs it into .venv, which is found)" >&2
    exit 2
fi
