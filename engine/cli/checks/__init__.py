# SPDX-License-Identifier: Apache-2.0
"""The checks of `stratakv doctor` before the start of an engine.

base.py      findings, and the run of checks
probe.py     the script that runs in the other engine's Python, without StrataKV
python.py    the script's results: that Python, its packages, vLLM
host.py      this machine for an engine or a cache server, and the list of checks for it
machine.py   memory, shared memory, the clock
disk.py      the place of an SSD tier
servers.py   cache servers
vllm.py      vLLM's transfer configuration, and the list of checks for vLLM"""
