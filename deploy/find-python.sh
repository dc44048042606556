# SPDX-License-Identifier: Apache-2.0
# Sets `python` to the interpreter that StrataKV is installed for: PYTHON where it is given, else
# python3, else that of .venv in the clone that these files lie in. Read by the scripts beside it,
# which set `here`.
has_stratakv() { "$1" -P -c 'import stratakv' 2>/dev/null; }
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && ! has_stratakv python3 && [ -x "$here/../.venv/bin/python" ]; then
    python=$here/../.venv/bin/python
fi
if ! has_stratakv "$python"; then
    echo "StrataKV is not installed for $python; name the Python that it is installed for: PYTHON=... $0 (\`make env\` installs it into .venv, which is found)" >&2
    exit 2
fi
